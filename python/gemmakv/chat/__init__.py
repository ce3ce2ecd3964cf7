"""Messages, the templates that render them, and sessions."""

"""The service: runs requests to the model. Knows no HTTP."""

"""The routes, a module for each API."""

"""OpenWhisk's action proxy for Python functions.  Standard library only."""

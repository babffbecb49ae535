"""OpenWhisk's action proxy for Python functions.  It uses only the standard library."""

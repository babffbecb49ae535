"""OpenWhisk's REST API: one file for each kind of entity, and shared functions for their bodies and answers."""

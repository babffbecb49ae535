"""OpenWhisk's REST API: one file for each kind of entity, beside what their bodies and answers have in common."""

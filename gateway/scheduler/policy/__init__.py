"""The policy: it turns events and the view into decisions.  decide.py calls one file for each reason to decide.
Pure."""

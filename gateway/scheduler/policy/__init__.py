"""The policy turns events and the view into decisions.  It is pure; decide.py calls one file for each reason to
decide."""

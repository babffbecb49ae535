"""What is decided, from events and the view: decide.py calls one file for each reason to decide.  Pure."""

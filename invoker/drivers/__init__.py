"""What runs containers: one Protocol (base.py), one folder for each implementation, and what they share."""

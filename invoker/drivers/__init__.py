"""The drivers that run containers: one Protocol (base.py), one folder for each implementation, and shared parts."""

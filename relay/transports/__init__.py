"""Transports between the stages of a group.  One protocol (base.py), one conformance suite; here so far: redis."""

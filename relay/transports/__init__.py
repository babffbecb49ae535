"""Transports between the stages of a group: redis, tcp, object.  One protocol (base.py), one conformance suite."""

"""The host's port for gateways.  It forwards each run to its container, and the answer back."""

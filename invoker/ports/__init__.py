"""The host's port for gateways: runs on their way to a container and back."""

"""The state server (Redis protocol): its keys, and typed access to the data that the components share there."""

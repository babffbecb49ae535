"""The state server (Redis protocol): its keys, and typed access to what the components leave there for one another."""

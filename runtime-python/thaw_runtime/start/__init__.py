"""From a process that has imported everything to a container, and the trace of its start."""

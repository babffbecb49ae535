"""The kernel's services for a container's process: signals, hang-ups, stopped children, the time of threads."""

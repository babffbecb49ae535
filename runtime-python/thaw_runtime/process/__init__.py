"""What a container's process asks of the kernel: signals, hang-ups, stopped children, the time of threads."""

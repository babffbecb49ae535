"""Every byte that crosses a process: frames, messages, segment layout, transports, typed clients, metrics."""

"""A container's life on this host: chosen, started, initialised, serving, gone; and what each of them holds."""

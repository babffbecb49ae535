"""The loop's reads and writes: the state server, the lease, the relay's users, the metrics."""

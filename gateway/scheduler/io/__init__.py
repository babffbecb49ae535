"""What the loop reads and writes: the state server, the lease, the relay's users, the metrics."""

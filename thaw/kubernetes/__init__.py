"""What talks to a cluster's API server: its client and watch, which the invoker's driver uses too, and the operator."""

"""Clients of a cluster's API server: calls and watch, which the invoker's driver uses too, and the operator."""

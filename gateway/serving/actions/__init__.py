"""What this gateway knows about actions, the packages that they are in, and the quotas of their namespaces."""

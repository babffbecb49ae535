"""This gateway's knowledge of actions, of the packages that they are in, and of the quotas of their namespaces."""

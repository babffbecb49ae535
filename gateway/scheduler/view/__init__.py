"""The scheduler's knowledge of hosts, instances, demand and models, and of the times of earlier starts.

``cluster.py`` is the view; the other files are its indexes, which keep the work for one event small.  It is pure.
"""

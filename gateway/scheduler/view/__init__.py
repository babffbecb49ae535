"""What the scheduler knows of hosts, instances, demand and models, and what it has learned from earlier starts.

``cluster.py`` is the view; the other files are its indexes, which keep the work for one event small.  It is pure.
"""

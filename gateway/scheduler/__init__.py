"""The scheduler: pure policy files, and ``loop.py``, ``effects.py`` and ``leading.py`` that do the I/O.

``decide(view, event, now_s)`` takes one event and returns decisions; the same code runs in production, in tests and
in the simulator.  docs/scheduling.md is the guide.
"""

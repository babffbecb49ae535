"""The scheduler.  ``policy``, ``placement`` and ``view`` are pure; ``loop.py`` and ``io`` do the I/O.

``policy.decide.decide_all(view, events, now_s)`` returns decisions; the same code runs in production, in tests and in
the simulator.  docs/scheduling.md is the guide.
"""

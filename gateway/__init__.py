"""The control plane: gateways, which take requests, and the scheduler, a process of its own.

``app.py`` has the HTTP routes of ``api/``; ``core.py`` joins the parts of one gateway process; ``serving/`` takes one
request from its arrival to its record.  ``scheduler/`` decides which host starts what.
"""

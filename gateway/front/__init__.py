"""What stands between a socket and the application, so that no client can hold one of its threads by being slow.

::

    accept ─▶ IDLE ─▶ READING ──────────────────────────────▶ RUNNING ─▶ IDLE, or ENDING
                         │ the body is long                      ▲   │
                         ▼                                       │   ▼ the client has not read it all
                      CHECKING (key and size) ─▶ LINED_UP ─▶ READING  WRITING ─▶ IDLE, or ENDING

Only RUNNING and CHECKING are on a thread.  In every other state the worker's selector waits for the client
(gateway/worker.py), and the connection has a deadline.  The files here are pure but for ``connection.py``.
"""

"""What stands between a socket and the application, so that no client can hold one of its threads by being slow.

::

    accept ─▶ IDLE ─▶ READING ───────────────────────────▶ (QUEUED) ─▶ RUNNING ─▶ IDLE, or ENDING
                         │ the body is long                   ▲           │
                         ▼                                    │           ▼ the client has not read it all
                     (QUEUED) ─▶ CHECKING ─▶ LINED_UP ─▶ READING       WRITING ─▶ IDLE, or ENDING

An answer that is made as it is read goes from WRITING to (QUEUED) ─▶ RUNNING again for its next part, on threads that
requests do not get.

Only RUNNING and CHECKING (key and size) are on a thread; QUEUED waits for one, LINED_UP for memory.  In every other
state the worker's selector waits for the client (gateway/worker.py).  Every state but RUNNING has a deadline, and in
each of them an account has what the connection holds, so that somebody gives way when there is too much of it.  The
files here are pure but for ``connection.py``.
"""

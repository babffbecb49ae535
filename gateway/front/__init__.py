"""The layer between a socket and the application, so that no slow client can occupy one of the threads.

::

    accept ─▶ IDLE ─▶ READING ───────────────────────────▶ (QUEUED) ─▶ RUNNING ─▶ IDLE, or ENDING
                         │ the body is long                   ▲           │
                         ▼                                    │           ▼ the client has not read it all
                     (QUEUED) ─▶ CHECKING ─▶ LINED_UP ─▶ READING       WRITING ─▶ IDLE, or ENDING

An answer that is made as it is read goes from WRITING to (QUEUED) ─▶ RUNNING again for its next part, on threads that
requests do not get.

Only RUNNING and CHECKING (key and size) are on a thread; QUEUED waits for one, LINED_UP for memory.  In every other
state the worker's selector waits for the client (gateway/worker.py).  Every state but RUNNING has a deadline, and in
each of them an account counts the resources that the connection holds, so that a connection is closed when they run
out.  The files here are pure but for ``connection.py``.
"""

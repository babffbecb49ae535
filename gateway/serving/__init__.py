"""One request, from its arrival to its record: it finds an instance or waits for one, and is sent there.

``dispatch.py`` finds the instance, ``waiting_room.py`` holds requests that have none, ``runs.py`` reads the answer, and
``recorder.py`` writes the record.  No file here knows an HTTP route of the gateway.
"""

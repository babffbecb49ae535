"""One request, from its arrival to its record: it finds an instance or waits for one, and is sent there.

``dispatch.py`` finds the instance, ``runs.py`` reads the answer, and ``recorder.py`` writes the record.  The folders:
``routing/`` is the way from a call to an instance, ``answers/`` is the form of an LLM's answer, ``moving/`` takes a
running request to another worker, ``scaling/`` keeps and warms instances, ``actions/`` is a gateway's knowledge of
actions, and ``held/`` holds requests until there is news.  No file here knows an HTTP route of the gateway.
"""

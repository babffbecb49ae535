"""The HTTP surface.

``openwhisk/`` has OpenWhisk's routes under ``/api/v1``, ``platform/`` has those that only this platform has.  The files
here are OpenAI's routes under ``/v1`` (``openai*.py``, ``responses*.py``) and the code that all routes share
(``http.py``, ``held.py``).  A route authenticates the caller, checks the request, and hands a Call to
``gateway.serving``.
"""

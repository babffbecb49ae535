"""The HTTP surface: one file for each group of routes, OpenWhisk's under ``/api/v1`` and OpenAI's under ``/v1``.

A route authenticates the caller, checks the request, and hands a Call to ``gateway.serving``.  ``http.py`` has what all
routes share.
"""

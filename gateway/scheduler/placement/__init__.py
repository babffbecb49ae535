"""The papers' algorithms: which hosts, how many stages, and how long a start will take.

``select.py`` is ParaServe's Algorithm 1, ``predict.py`` its cost model, ``link_ledger.py`` its admission of fetches.
``serverlessllm.py`` is ServerlessLLM's choice of a server.  All of it is pure and knows no view.
"""

"""Thaw: container functions on GPU hosts, and large language models that start in the time their bytes need.

This package is the vocabulary that every component shares (errors, ids, action, activation, model, plan, host,
instance) and does no I/O.  Its folders: ``checkpoints/`` and ``hub/`` are about models in their stores, ``tracing/`` is
about the seconds of a start, and ``process/`` has the code that every process needs.  ``thaw.cli`` is the command line,
``thaw.dev`` runs the platform on one machine, and ``thaw.kubernetes`` talks to a cluster; the vocabulary imports none
of them.
"""

__version__ = "0.1.0"

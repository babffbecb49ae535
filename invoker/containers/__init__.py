"""The instances of this host, from the command that starts one to the release of everything it held.

``start.py`` is one start, ``fleet.py`` knows all instances, ``instance.py`` is the table of their states, and
``recovery.py`` adopts the containers that an earlier invoker left.
"""

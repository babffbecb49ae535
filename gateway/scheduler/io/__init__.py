"""The scheduler's only input and output: the loop uses these files to read events and to carry decisions out.

``reading.py`` reads the registry, ``effects.py`` writes plans and commands, ``leading.py`` holds the lease, and
``group_admission.py`` admits groups to the relay server.
"""

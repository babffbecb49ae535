"""The ``thaw`` command: typer, rich and requests.  Commands import what they need when they run, so help is quick."""

"""The ``thaw`` command: typer, rich and requests.  A command does its imports when it runs, so help is quick."""

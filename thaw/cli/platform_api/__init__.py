"""The platform's HTTP API, seen from the command line: the client, its property file, and what failures mean."""

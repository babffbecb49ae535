"""One request: to an instance or into the waiting room, to its outcome, and into its record.  Knows no HTTP route."""

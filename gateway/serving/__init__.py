"""One request on its way: to an instance or into the waiting room, to its outcome, and into its record.  No routes of HTTP."""

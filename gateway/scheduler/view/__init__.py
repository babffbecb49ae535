"""The scheduler's knowledge, indexed so that the cost of an event depends only on what it touches.  It is pure."""

"""What the scheduler knows, indexed so that the cost of an event depends only on what it touches.  Pure."""

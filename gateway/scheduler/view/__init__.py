"""What the scheduler knows, indexed so that one event costs what it touches.  Pure."""

"""A deploy finds out whether the model would start, which packages are needed, and which image runs."""

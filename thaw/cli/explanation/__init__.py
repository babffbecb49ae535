"""What ``thaw activation explain`` prints: the drawn timeline, and the lines below it."""

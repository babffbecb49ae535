"""Models in stores: push, copy, verify, list and remove them."""

"""A segment's bytes as tensors, while they are arriving."""

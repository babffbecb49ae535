"""What processes say to one another: frames, messages, tensors, a model's bytes in memory.  See docs/formats/."""

"""What is said between processes: frames, messages, tensors, and a model's bytes in shared memory.  See docs/formats/."""

"""The formats between processes: frames, messages, tensors, a model's bytes in memory.  See docs/formats/."""

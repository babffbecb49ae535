"""The engine process: token ids in, token events out; and how much memory its KV cache gets."""

"""Checkpoints and their versions: headers, the index beside a model, its hash tree, and adapters of it."""

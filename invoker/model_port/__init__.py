"""The model port: reads a model's files for programs on this host that are none of the platform's containers."""

"""The code inside a container: ``action/`` for Python functions; ``llm/`` and ``engine/`` for language models.

``llm/`` is the proxy process (HTTP and text), ``engine/`` the engine process (token ids, vLLM), ``pipeline/`` the
messages between the stages of a group, ``weights/`` a segment's bytes as tensors, and ``start/`` the zygote.
"""

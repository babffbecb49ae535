"""The engine process of an LLM container: token ids in, token events out.

``protocol.py`` defines the interface of every engine, and ``vllm/`` is the only engine so far.  ``main.py`` is the
process, ``link.py`` is the proxy's side of it, and ``kv_memory.py`` computes how much memory the KV cache gets.
"""

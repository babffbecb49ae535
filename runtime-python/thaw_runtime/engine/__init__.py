"""The engine process of an LLM container: token ids in, token events out.

``protocol.py`` is what every engine offers, ``vllm/`` the one there is.  ``main.py`` is the process, ``link.py`` the
proxy's side of it, and ``kv_memory.py`` computes how much memory the KV cache gets.
"""

"""The proxy of an LLM container: HTTP and text on this side, the engine process on the other."""

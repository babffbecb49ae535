"""The form of an LLM's answer for its client, and the part of it that is kept for a client that reconnects."""

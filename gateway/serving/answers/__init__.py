"""What an LLM's answer looks like to its client, and what is kept of it for a client that reconnects."""

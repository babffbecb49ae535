"""The engine on vLLM.  No other folder knows its names."""

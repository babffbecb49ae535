"""Running LLM requests that move to another worker, and what an operator hears about a host that is being emptied."""

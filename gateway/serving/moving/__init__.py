"""Running LLM requests that move to another worker, and reports to an operator about a host that is being emptied."""

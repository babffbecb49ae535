"""The routes that neither OpenWhisk nor OpenAI has: hosts, keys, work, scaling, preflights, and probes of a gateway."""

"""Requests that are held until there is news: endings of calls, standings of models, and work in progress."""

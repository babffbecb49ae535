"""The groups of commands, one module for each word after ``thaw``."""

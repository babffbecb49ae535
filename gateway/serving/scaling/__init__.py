"""How many instances an action keeps, and starting one before anybody calls."""

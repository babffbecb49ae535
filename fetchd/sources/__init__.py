"""The stores of models: one Protocol, one file per kind of store."""

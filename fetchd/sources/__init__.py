"""Where models come from: one Protocol, one file per kind of store."""

"""What commands print: tables, entities, progress and saved files."""

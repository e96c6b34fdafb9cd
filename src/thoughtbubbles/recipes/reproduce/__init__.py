"""The experiments of docs/results: protocols, the command that runs their rows, and the report made from records."""

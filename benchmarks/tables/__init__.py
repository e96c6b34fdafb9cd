"""Tables of the docs, by subject; benchmarks/table.py puts them into their pages."""

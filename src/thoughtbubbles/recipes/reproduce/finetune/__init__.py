"""`reproduce clutrr` and `reproduce gsm8k`: models trained on the examples of a benchmark, then tested on it."""

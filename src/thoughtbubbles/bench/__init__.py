"""What a model costs, and benchmarks of training speed: cases, a check of correctness, then timings."""

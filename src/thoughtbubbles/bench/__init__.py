"""Benchmarks of training speed: cases, a check of correctness, then timings."""

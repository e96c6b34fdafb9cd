"""How fast training steps are: cases, a check of correctness, then times."""

"""The paper, and only the paper. Reading order: config, budget, streams, selection, fork, attention, block, head, transformer."""

"""From text to batches: tokenizers, sources, preparation into shards, and the loader. NumPy only, without torch."""

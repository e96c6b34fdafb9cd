"""Text generation: decoding with a KV cache, sampling, and the command."""

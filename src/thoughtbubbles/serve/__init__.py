"""A local web page on which to watch a model fork: `thoughtbubbles watch`. Needs the extra `serve`."""

"""A model over HTTP: an API like OpenAI's (`serve`), and a page on which to watch a model fork (`watch`).

Needs the extra `serve`.
"""

"""Thinking while writing: from a model to text."""

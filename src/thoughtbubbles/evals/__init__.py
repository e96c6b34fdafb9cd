"""Exams."""

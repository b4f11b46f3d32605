"""Placeholder package docstring, filled with the public surface."""

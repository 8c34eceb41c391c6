"""Symbolic attention for a few tokens and dimensions, as text, LaTeX and an HTML page."""

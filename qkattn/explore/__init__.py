"""Attention worked out on symbols for a few tokens and dimensions, as text, LaTeX and a page."""

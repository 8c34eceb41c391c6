"""Scores, the ways to write A[n]: each module holds one family."""

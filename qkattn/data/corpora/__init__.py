"""Datasets: where texts come from, and how they are split."""

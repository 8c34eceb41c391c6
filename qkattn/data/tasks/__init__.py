"""Tasks: the rows that a model is trained on, and what it predicts in them."""

"""Training: the loop, its compiled programs, checkpoints and results."""

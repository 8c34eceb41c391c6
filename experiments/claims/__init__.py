"""The claims: statements, the evidence that decides them, and verdicts."""

"""The claims: what each says, what decides it, and the verdicts."""

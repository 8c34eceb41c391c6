"""What claims read from studies beside verdicts: curves of losses, sweeps of settings."""

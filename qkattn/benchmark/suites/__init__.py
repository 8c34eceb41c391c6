"""The suites of `experiments.benchmark`, one file each."""

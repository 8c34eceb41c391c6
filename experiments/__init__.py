"""One absl script per job; each main is short, the logic is in qkattn."""

"""The claims, a file for each group of questions; a `Claim` that is added here is listed."""

"""The checks of exact claims, in float64: algebra on small matrices, counts on parameter trees."""

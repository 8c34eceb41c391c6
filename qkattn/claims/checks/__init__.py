"""The checks of exact claims: algebra on small matrices, counts on real parameter trees."""

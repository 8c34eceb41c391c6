"""Implementations of attention beside the einsums, and the choice between them."""

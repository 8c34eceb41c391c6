"""Conversions between attention variants, and models by path.

A conversion returns a layer of another variant that computes the same function in the same dtype,
by way of float64, or raises `ConversionError` with the reason. `truncate` and `truncate_vo` change
the function and return the error. `conversions` is the registry; `loading` reads models.
"""

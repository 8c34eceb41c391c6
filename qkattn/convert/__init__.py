"""Conversions between attention variants, and models by path.

A conversion returns a layer of another variant that computes the same function in the same dtype,
or raises `ConversionError` with the reason. `conversions` is the registry; `loading` reads models.
"""

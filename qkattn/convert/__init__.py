"""Conversions between attention variants, and loading of models.

A conversion returns a layer of another variant that computes the same function in the same dtype,
or raises `ConversionError`. `conversions` is the registry, and `loading` reads models.
"""

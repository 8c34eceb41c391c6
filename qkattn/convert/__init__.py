"""Conversions between attention variants, and models by path.

A conversion takes a layer and returns a layer of another variant that computes the same function
in the same dtype; the arithmetic in between is float64. Where a precondition does not hold, it
raises `ConversionError` with the reason. Only `truncate` and `truncate_vo` change the function;
they return the error. `conversions` is the registry and converts whole models; `loading` reads
runs, exported parameters and published files.
"""

"""Attention variants outside the registries, named by import path: examples.frozen:Frozen/vo."""

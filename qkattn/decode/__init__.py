"""Decoding: continuations, beam search and translation, and models for evaluation harnesses."""

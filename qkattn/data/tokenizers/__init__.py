"""Tokenizers: text to token ids and back."""

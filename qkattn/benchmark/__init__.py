"""Timing of training and decoding beside other implementations, in processes of their own."""

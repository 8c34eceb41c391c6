"""Training and decoding timed beside other implementations, on one machine."""

"""Data as a pure function: batch = f(dataset, seed, step), without TensorFlow."""

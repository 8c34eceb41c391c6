"""Programs that compute attention: with einsums, in blocks, or by kernels of JAX's libraries."""

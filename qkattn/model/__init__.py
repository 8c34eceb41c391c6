"""Models built from attention variants."""

from qkattn.model.transformer import (
    Decoder,
    Encoder,
    EncoderDecoder,
    abstract_model,
    build,
    with_params,
)

__all__ = ['Decoder', 'Encoder', 'EncoderDecoder', 'abstract_model', 'build', 'with_params']

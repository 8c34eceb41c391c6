"""Models built from attention cells."""

from qkattn.model.decoder import Decoder

__all__ = ['Decoder']

"""Models built from attention variants."""

from qkattn.model.build import abstract_model, build, with_params
from qkattn.model.decoder import Decoder
from qkattn.model.encoder import Encoder
from qkattn.model.encoder_decoder import EncoderDecoder

__all__ = ['Decoder', 'Encoder', 'EncoderDecoder', 'abstract_model', 'build', 'with_params']

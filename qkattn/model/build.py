"""Models from their settings."""

import functools

import jax
from flax import nnx

from qkattn.attention.parameters import shapes_only
from qkattn.config import ModelConfig
from qkattn.model.decoder import Decoder
from qkattn.model.encoder import Encoder
from qkattn.model.encoder_decoder import EncoderDecoder
from qkattn.model.transformer import Transformer

KINDS: dict[str, type[Transformer]] = {
    'decoder': Decoder,
    'encoder': Encoder,
    'encoder_decoder': EncoderDecoder,
}


def build(
    config: ModelConfig, *, key: jax.Array | None = None, rngs: nnx.Rngs | None = None
) -> Transformer:
    """A model of config.kind at initialization; its parameters are drawn with a key or rngs."""
    return KINDS[config.kind](config, key=key, rngs=rngs)


@functools.lru_cache(maxsize=4096)
def abstract_model(config: ModelConfig) -> Transformer:
    """The model with shapes in place of arrays; nothing is allocated."""
    with shapes_only():
        return nnx.eval_shape(lambda: build(config, key=jax.random.key(0)))


def with_params(config: ModelConfig, params: dict) -> Transformer:
    """The model with these parameters."""
    return nnx.merge(nnx.graphdef(abstract_model(config)), params)

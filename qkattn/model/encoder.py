"""The encoder-only model."""

from qkattn.model.decoder import Decoder


class Encoder(Decoder):
    """Bidirectional transformer (Devlin et al. 2019): logits of the token at every position.

    The head is the output matrix alone, without BERT's dense layer before it.
    """

    causal = False

"""Translation with a trained encoder-decoder."""

import math
from collections.abc import Sequence

import jax
import numpy as np

from qkattn.config import DecodeConfig
from qkattn.data.tokenizers.tokenizer import Tokenizer
from qkattn.decode.generate import search
from qkattn.errors import ConfigError
from qkattn.jobs import agreement
from qkattn.model import EncoderDecoder

# Sources per batch.
BATCH_SIZE = 64
# Sources are padded to a multiple of this length, so that few programs are compiled.
WIDTH_STEP = 16


def translate(
    model: EncoderDecoder, tokenizer: Tokenizer, sources: Sequence[str], config: DecodeConfig
) -> list[str]:
    """Translates sources by beam search, and returns the best translation of each source.

    Raises:
        ConfigError: A source cannot be encoded, or is longer than model.source_context.
    """
    encoded_sources = []
    for i, source in enumerate(sources):
        try:
            encoded_sources.append(tokenizer.encode(source))
        except ValueError as error:
            raise ConfigError(f'source {i + 1} cannot be encoded: {error}') from error
    return translate_ids(model, tokenizer, encoded_sources, config)


def translate_ids(
    model: EncoderDecoder, tokenizer: Tokenizer, sources: Sequence[np.ndarray], config: DecodeConfig
) -> list[str]:
    """Translates sources of token ids, given without separators.

    All processes of a job must call this with the same arguments. They share the work, and all get
    all translations.

    Raises:
        ConfigError: A source with its separator is longer than model.source_context.
    """
    longest = model.config.encoder.context
    for i, source in enumerate(sources):
        if len(source) + 1 > longest:
            raise ConfigError(
                f'source {i + 1} has {len(source)} tokens, but model.source_context={longest} has '
                f'room for {longest - 1} and the separator'
            )

    # Batches of indices of sources, of similar length.
    by_length = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    batches = []
    for begin in range(0, len(sources), BATCH_SIZE):
        batches.append(by_length[begin : begin + BATCH_SIZE])

    # Of P processes, process p translates the batches p, p + P, p + 2 P ...
    own_translations: dict[int, str] = {}  # by index of the source
    for batch in batches[jax.process_index() :: jax.process_count()]:
        sources_of_batch = [sources[i] for i in batch]
        texts = _translations_of_batch(model, tokenizer, sources_of_batch, config)
        own_translations |= dict(zip(batch, texts, strict=True))

    own_pairs = list(own_translations.items())
    pairs_of_processes = agreement.gather_from_processes(own_pairs, limit=agreement.OWNER_LIMIT)
    translations: dict[int, str] = {}
    for pairs in pairs_of_processes:
        translations.update(pairs)
    return [translations[i] for i in range(len(sources))]


def _translations_of_batch(
    model: EncoderDecoder, tokenizer: Tokenizer, sources: Sequence[np.ndarray], config: DecodeConfig
) -> list[str]:
    """Translates at most BATCH_SIZE sources of token ids, given without separators."""
    separator = tokenizer.separator
    longest = max(len(source) for source in sources) + 1  # with the separator
    rounded_width = math.ceil(longest / WIDTH_STEP) * WIDTH_STEP
    width = min(rounded_width, model.config.encoder.context)
    source_BS = np.zeros((BATCH_SIZE, width), np.int32)
    valid_BS = np.zeros((BATCH_SIZE, width), bool)
    # Fill spare rows with repeated sources. Empty rows would rarely finish, and delay the search.
    for row in range(BATCH_SIZE):
        source_ids = np.append(sources[row % len(sources)], separator)
        source_BS[row, : len(source_ids)] = source_ids
        valid_BS[row, : len(source_ids)] = True

    hypotheses = search(
        model,
        prompts_BT=np.full((BATCH_SIZE, 1), separator, np.int32),
        num_tokens=model.config.context,
        source=(source_BS, valid_BS),
        separator=separator,
        beam=config.beam,
        length_penalty=config.length_penalty,
        vocab_size=tokenizer.vocab_size,
    )
    best_BT = np.asarray(hypotheses.tokens_BKT[:, 0])  # hypotheses are sorted, best first
    translations = []
    for tokens_T in best_BT[: len(sources)]:
        translations.append(tokenizer.decode(tokens_T[tokens_T != separator]))
    return translations

"""Translation of sentences with a trained encoder-decoder, and scores of a split."""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qkattn.config import Config, DecodeConfig
from qkattn.data.tasks.rows import Rows
from qkattn.data.tasks.translation import TranslationRows
from qkattn.data.tokenizers.tokenizer import Tokenizer
from qkattn.data.tokens import PairDataset
from qkattn.decode.beam import Hypotheses, beam_search
from qkattn.decode.kv_cache import decode_step, encode_source, prefill, take_rows
from qkattn.decode.translation_scores import translation_scores
from qkattn.errors import ConfigError
from qkattn.jobs import agreement
from qkattn.metrics import PREFIXES
from qkattn.model import EncoderDecoder, with_params

# Sources of similar length share a batch, padded to a multiple of this many tokens, so that few
# shapes are compiled.
WIDTH_STEP = 16
BATCH_SIZE = 64

log = logging.getLogger(__name__)


def translate(
    model: EncoderDecoder, tokenizer: Tokenizer, sources: Sequence[str], config: DecodeConfig
) -> list[str]:
    """The best hypothesis for each source, in the order of `sources`.

    Raises:
      ConfigError: a model that is no encoder-decoder; a source that is empty, cannot be encoded or
        is longer than model.source_context; an option of the search out of range.
    """
    encoded = []
    for i, source in enumerate(sources):
        try:
            encoded.append(tokenizer.encode(source))
        except ValueError as error:
            raise ConfigError(f'source {i + 1} cannot be encoded: {error}') from error
        if not len(encoded[-1]):
            raise ConfigError(f'source {i + 1} is empty; it must hold at least one token')
    translations = translate_ids(model, encoded, tokenizer.separator, config, tokenizer.vocab_size)
    return [tokenizer.decode(ids) for ids in translations]


def translate_ids(
    model: EncoderDecoder,
    sources: Sequence[np.ndarray],
    separator: int,
    config: DecodeConfig,
    vocab_size: int,
) -> list[np.ndarray]:
    """`translate` for token ids; neither sources nor translations end with the separator.

    The processes of a job share the batches; all of them call this with the same arguments.
    """
    if not isinstance(model, EncoderDecoder):
        raise ConfigError(
            f'model.kind={model.config.kind!r} does not translate; it must be encoder_decoder'
        )
    room = model.config.encoder.context
    for i, source in enumerate(sources):
        if len(source) + 1 > room:
            raise ConfigError(
                f'source {i + 1} has {len(source)} tokens, but model.source_context={room} has '
                f'room for {room - 1} and the separator'
            )
    by_length = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    batches = [by_length[at : at + BATCH_SIZE] for at in range(0, len(sources), BATCH_SIZE)]
    translations: dict[int, list[int]] = {}
    for chosen in batches[jax.process_index() :: jax.process_count()]:
        width = max(len(sources[i]) for i in chosen) + 1
        width = min(-(-width // WIDTH_STEP) * WIDTH_STEP, room)
        source_BS = np.zeros((BATCH_SIZE, width), np.int32)
        valid_BS = np.zeros((BATCH_SIZE, width), bool)
        for row, i in enumerate(chosen):
            ids = np.append(sources[i], separator)
            source_BS[row, : len(ids)], valid_BS[row, : len(ids)] = ids, True
        best = _search(
            model,
            source_BS,
            valid_BS,
            beam=config.beam,
            length_penalty=config.length_penalty,
            separator=separator,
            vocab_size=vocab_size,
        )
        tokens_BT, lengths_B = np.asarray(best.tokens_BKT[:, 0]), np.asarray(best.lengths_BK[:, 0])
        for row, i in enumerate(chosen):
            ids = tokens_BT[row, : lengths_B[row]]
            translations[i] = ids[ids != separator].tolist()
    parts = agreement.from_all(list(translations.items()), limit=agreement.OWNER_LIMIT)
    found = {i: ids for part in parts for i, ids in part}
    return [np.array(found[i], np.int32) for i in range(len(sources))]


@functools.partial(jax.jit, static_argnames=('beam', 'length_penalty', 'separator', 'vocab_size'))
def _search(
    model: EncoderDecoder,
    source_BS: jax.Array,
    valid_BS: jax.Array,
    *,
    separator: int,
    **options: Any,
) -> Hypotheses:
    length = model.config.context
    cache = encode_source(model, source_BS, valid_BS, length)
    start_B1 = jnp.full((len(source_BS), 1), separator, jnp.int32)
    logits_BV, cache = prefill(model, start_B1, cache)
    step = functools.partial(decode_step, model)
    return beam_search(
        logits_BV, cache, step, take_rows, num_tokens=length, separator=separator, **options
    )


def score_split(
    model: EncoderDecoder,
    pairs: PairDataset,
    split: str,
    config: DecodeConfig,
    *,
    lowercase: bool,
) -> dict[str, Any]:
    """Translates the first `config.max_sources` sentences of a split: see `translation_scores`.

    A source that is longer than model.source_context is truncated, so that the scores are still
    those of the whole split; the log says how many are.
    """
    tokenizer = pairs.source.tokenizer
    sources, targets = (side[: config.max_sources] for side in pairs.sentences(split))
    room = model.config.encoder.context - 1
    truncated = sum(len(source) > room for source in sources)
    if truncated:
        log.warning(
            '%d of %d sources of split %r truncated to %d tokens',
            truncated,
            len(sources),
            split,
            room,
        )
    sources = [source[:room] for source in sources]
    translations = translate_ids(model, sources, tokenizer.separator, config, tokenizer.vocab_size)
    return translation_scores(
        [tokenizer.decode(ids) for ids in translations],
        [tokenizer.decode(ids) for ids in targets],
        lowercase=lowercase,
    )


def score_trial(
    config: Config, rows: Rows, fetch_params: Callable[[], dict]
) -> dict[str, Any] | None:
    """`score_split` of every split but 'train' with one trial's parameters, by result field.

    Args:
      fetch_params: brings the parameters to one device of each process.

    Returns:
      None where the rows are not parallel text.
    """
    if not isinstance(rows, TranslationRows):
        return None
    model = with_params(config.model, fetch_params())
    lowercase = config.data.lowercase
    return {
        f'{PREFIXES[split]}_{name}': value
        for split in rows.splits[1:]
        for name, value in score_split(
            model, rows.pairs, split, config.decode, lowercase=lowercase
        ).items()
    }

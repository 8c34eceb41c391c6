"""Translation of sentences with a trained encoder-decoder; BLEU and chrF of a split."""

import functools
import importlib
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
    most = model.config.encoder.context
    for i, source in enumerate(sources):
        if len(source) + 1 > most:
            raise ConfigError(
                f'source {i + 1} has {len(source)} tokens, but model.source_context={most} has '
                f'room for {most - 1} and the separator'
            )
    by_length = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    batches = [by_length[at : at + BATCH_SIZE] for at in range(0, len(sources), BATCH_SIZE)]
    translations: dict[int, list[int]] = {}
    for chosen in batches[jax.process_index() :: jax.process_count()]:
        width = max(len(sources[i]) for i in chosen) + 1
        width = min(-(-width // WIDTH_STEP) * WIDTH_STEP, most)
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
    translations = dict(pair for part in parts for pair in part)
    return [np.array(translations[i], np.int32) for i in range(len(sources))]


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
    tokenizer, most = pairs.source.tokenizer, model.config.encoder.context - 1
    sources, targets = (side[: config.max_sources] for side in pairs.sentences(split))
    if truncated := sum(len(source) > most for source in sources):
        text = '%d of %d sources of split %r truncated to %d tokens'
        log.warning(text, truncated, len(sources), split, most)
    sources = [source[:most] for source in sources]
    translations = translate_ids(model, sources, tokenizer.separator, config, tokenizer.vocab_size)
    hypotheses, references = (list(map(tokenizer.decode, ids)) for ids in (translations, targets))
    return translation_scores(hypotheses, references, lowercase=lowercase)


def translation_scores(
    hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False
) -> dict[str, float | int | str]:
    """Scores of a whole test set of detokenized text, with one reference per sentence.

    Args:
      lowercase: whether all scores ignore case.

    Returns:
      bleu: corpus BLEU in percent (Papineni et al. 2002), as computed by sacrebleu (Post 2018).
      chrf: corpus chrF2 in percent (Popović 2015), as computed by sacrebleu.
      bleu_signature, chrf_signature: sacrebleu's settings; scores are comparable where they agree.
      exact_match: fraction of the hypotheses that equal their reference, character by character.
      num_sentences: number of sentences.
    """
    metrics = importlib.import_module('sacrebleu.metrics')  # slow, and seldom needed
    bleu, chrf = metrics.BLEU(lowercase=lowercase), metrics.CHRF(lowercase=lowercase)
    scores = {
        'bleu': bleu.corpus_score(hypotheses, [references]).score,
        'chrf': chrf.corpus_score(hypotheses, [references]).score,
    }
    cased = str.lower if lowercase else str
    pairs = zip(map(cased, hypotheses), map(cased, references), strict=True)
    return scores | {
        'bleu_signature': str(bleu.get_signature()),
        'chrf_signature': str(chrf.get_signature()),
        'exact_match': sum(one == other for one, other in pairs) / len(hypotheses),
        'num_sentences': len(hypotheses),
    }


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

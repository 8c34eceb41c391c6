"""Translation of sentences with a trained encoder-decoder; BLEU and chrF of a split."""

import importlib
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from qkattn.config import Config, DecodeConfig
from qkattn.data.tasks.rows import Rows
from qkattn.data.tasks.translation import TranslationRows
from qkattn.data.tokenizers.tokenizer import Tokenizer
from qkattn.data.tokens import PairDataset
from qkattn.decode.generate import search
from qkattn.errors import ConfigError
from qkattn.jobs import agreement
from qkattn.metrics import PREFIXES
from qkattn.model import EncoderDecoder, with_params

# Sources per batch.
BATCH_SIZE = 64
# A batch is padded to a multiple of this length, so that few programs are compiled.
WIDTH_STEP = 16

log = logging.getLogger(__name__)


def translate(
    model: EncoderDecoder, tokenizer: Tokenizer, sources: Sequence[str], config: DecodeConfig
) -> list[str]:
    """The best hypothesis for each source, in the order of `sources`.

    ConfigError for a source that cannot be encoded or is longer than model.source_context.
    """
    encoded = []
    for i, source in enumerate(sources):
        try:
            encoded.append(tokenizer.encode(source))
        except ValueError as error:
            raise ConfigError(f'source {i + 1} cannot be encoded: {error}') from error
    return translate_ids(model, tokenizer, encoded, config)


def translate_ids(
    model: EncoderDecoder, tokenizer: Tokenizer, sources: Sequence[np.ndarray], config: DecodeConfig
) -> list[str]:
    """`translate` for the token ids of the sources, without separators.

    The processes of a job share the batches; all of them call this with the same arguments.
    """
    longest = model.config.encoder.context
    separator = tokenizer.separator
    for i, source in enumerate(sources):
        if len(source) + 1 > longest:
            raise ConfigError(
                f'source {i + 1} has {len(source)} tokens, but model.source_context={longest} has '
                f'room for {longest - 1} and the separator'
            )
    # Batches of similar length, as lists of indices of sources.
    by_length = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    batches = []
    for begin in range(0, len(sources), BATCH_SIZE):
        batches.append(by_length[begin : begin + BATCH_SIZE])

    translations: dict[int, str] = {}
    for batch in batches[jax.process_index() :: jax.process_count()]:
        most_tokens = len(sources[batch[-1]]) + 1
        width = min(math.ceil(most_tokens / WIDTH_STEP) * WIDTH_STEP, longest)
        source_BS = np.zeros((BATCH_SIZE, width), np.int32)
        valid_BS = np.zeros((BATCH_SIZE, width), bool)
        # A batch that is not full repeats its sources: empty rows would search to the last token.
        for row, i in enumerate(np.resize(batch, BATCH_SIZE)):
            ids = np.append(sources[i], separator)
            source_BS[row, : len(ids)] = ids
            valid_BS[row, : len(ids)] = True
        best = search(
            model,
            np.full((BATCH_SIZE, 1), separator, np.int32),
            model.config.context,
            (source_BS, valid_BS),
            separator=separator,
            beam=config.beam,
            length_penalty=config.length_penalty,
            vocab_size=tokenizer.vocab_size,
        )
        best_BT = np.asarray(best.tokens_BKT[:, 0])
        for i, ids in zip(batch, best_BT, strict=False):
            translations[i] = tokenizer.decode(ids[ids != separator])
    parts = agreement.from_all(list(translations.items()), limit=agreement.OWNER_LIMIT)
    translations = dict(pair for part in parts for pair in part)
    return [translations[i] for i in range(len(sources))]


def score_split(
    model: EncoderDecoder, pairs: PairDataset, split: str, config: DecodeConfig, *, lowercase: bool
) -> dict[str, Any]:
    """Translates the first `config.max_sources` sentences of a split: see `translation_scores`.

    Sources longer than model.source_context are truncated, and the log says how many: the scores
    are still those of the whole split.
    """
    tokenizer = pairs.source.tokenizer
    longest = model.config.encoder.context - 1  # one position is the separator's
    sources, targets = (side[: config.max_sources] for side in pairs.sentences(split))
    num_truncated = sum(len(source) > longest for source in sources)
    if num_truncated:
        log.warning(
            '%d of %d sources of split %r truncated to %d tokens',
            num_truncated,
            len(sources),
            split,
            longest,
        )
    truncated = [source[:longest] for source in sources]
    hypotheses = translate_ids(model, tokenizer, truncated, config)
    references = [tokenizer.decode(target) for target in targets]
    return translation_scores(hypotheses, references, lowercase=lowercase)


def translation_scores(
    hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False
) -> dict[str, float | int | str]:
    """Scores of a whole test set of detokenized text, with one reference per sentence.

    `bleu` and `chrf` are corpus BLEU (Papineni et al. 2002) and chrF2 (Popović 2015) in percent, as
    computed by sacrebleu (Post 2018), comparable where their signatures agree; `exact_match` is the
    fraction of the hypotheses that equal their reference. With `lowercase` all scores ignore case.
    """
    metrics = importlib.import_module('sacrebleu.metrics')  # slow, and seldom needed
    bleu = metrics.BLEU(lowercase=lowercase)
    chrf = metrics.CHRF(lowercase=lowercase)
    # Before the signatures, which name the number of references that a score was computed from.
    bleu_score = bleu.corpus_score(hypotheses, [references]).score
    chrf_score = chrf.corpus_score(hypotheses, [references]).score
    num_equal = 0
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        if lowercase:
            hypothesis = hypothesis.lower()
            reference = reference.lower()
        if hypothesis == reference:
            num_equal += 1
    return {
        'bleu': bleu_score,
        'chrf': chrf_score,
        'bleu_signature': str(bleu.get_signature()),
        'chrf_signature': str(chrf.get_signature()),
        'exact_match': num_equal / len(hypotheses),
        'num_sentences': len(hypotheses),
    }


def score_trial(
    config: Config, rows: Rows, fetch_params: Callable[[], dict]
) -> dict[str, Any] | None:
    """`score_split` of every split but 'train' with one trial's parameters, by result field.

    None where the rows are not parallel text. `fetch_params` brings the parameters to one device of
    each process.
    """
    if not isinstance(rows, TranslationRows):
        return None
    model = with_params(config.model, fetch_params())
    results = {}
    for split in rows.splits:
        if split == 'train':
            continue
        scores = score_split(
            model, rows.pairs, split, config.decode, lowercase=config.data.lowercase
        )
        for name, value in scores.items():
            results[f'{PREFIXES[split]}_{name}'] = value
    return results

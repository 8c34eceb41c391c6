"""Translation: order, batches, agreement with the uncached model, scores."""

import dataclasses
import functools
import math
import socket
import types

import jax
import numpy as np
import pytest

from qkattn.config import DecodeConfig, ModelConfig
from qkattn.data.tasks.translation import score_split
from qkattn.data.tokenizers.tokenizer import ByteTokenizer
from qkattn.data.tokens import PairDataset
from qkattn.decode import translate
from qkattn.jobs import agreement
from qkattn.metrics.translation import translation_scores
from qkattn.model import EncoderDecoder, build
from tests.data.datasets import token_dataset
from tests.refusals import refused

CONFIG = ModelConfig(
    kind='encoder_decoder',
    **dict(d_model=16, num_layers=1, num_heads=2, context=9, source_context=20, vocab_size=50),
    **dict(d_ff=32, scan_unroll=1, tied_embeddings=False),
)
SEPARATOR = 3
GREEDY = DecodeConfig(beam=1)


class NumberTokenizer:
    """A tokenizer whose words are the ids themselves: [4, 17] is '4 17'."""

    vocab_size = 45
    separator = SEPARATOR

    def decode(self, ids):
        return ' '.join(str(token) for token in ids)


@functools.cache
def make_model(**fields) -> EncoderDecoder:
    """A model whose translations depend on the source, and differ in length."""
    model = build(dataclasses.replace(CONFIG, **fields), key=jax.random.key(0))
    model.w_embedding_VD[...] *= 5
    model.w_output_DV[:, SEPARATOR] *= 1.7
    model.blocks.cross_attention.value.w_o_NHD[...] *= 9
    return model


def random_sources(count: int) -> list[np.ndarray]:
    """Source sentences of 1, 7, 15 or 19 tokens, in random order."""
    rng = np.random.default_rng(0)
    lengths = rng.choice([19, 1, 7, 15], count)
    return [rng.integers(SEPARATOR + 1, 40, length) for length in lengths]


def translate_ids(sources, model=None, **options) -> list[list[int]]:
    """The ids of the translations, by the model of `make_model` by default."""
    if model is None:
        model = make_model()
    texts = translate.translate_ids(model, NumberTokenizer(), sources, DecodeConfig(**options))
    return [[int(word) for word in text.split()] for text in texts]


def greedy_without_cache(model, sources) -> list[list[int]]:
    """Greedy translations, each token by a pass over the whole sequences."""
    B = len(sources)
    T = CONFIG.context
    source_BS = np.zeros((B, CONFIG.source_context), int)
    segments_BS = np.zeros((B, CONFIG.source_context), int)
    for row, source in enumerate(sources):
        source_BS[row, : len(source) + 1] = [*source, SEPARATOR]
        segments_BS[row, : len(source) + 1] = 1

    compute_logits = jax.jit(lambda model, *args, **kwargs: model(*args, **kwargs))
    tokens_BT = np.full((B, T + 1), SEPARATOR)
    for t in range(T):
        logits_BTV = compute_logits(
            model, tokens_BT[:, :T], source_BS=source_BS, source_segments_BS=segments_BS
        )
        logits_BV = np.asarray(logits_BTV[:, t, : NumberTokenizer.vocab_size])
        tokens_BT[:, t + 1] = logits_BV.argmax(-1)

    translations = []
    for tokens in tokens_BT[:, 1:].tolist():
        length = tokens.index(SEPARATOR) if SEPARATOR in tokens else T
        translations.append(tokens[:length])
    return translations


def test_greedy_translations_are_the_same_without_a_cache():
    sources = random_sources(150)  # two full batches of 64, and a part of one

    translations = translate_ids(sources, beam=1)

    assert translations == greedy_without_cache(make_model(), sources)
    lengths = {len(ids) for ids in translations}
    assert len(lengths) > 3


def test_no_sources_have_no_translations():
    assert translate_ids([]) == []


def test_a_batch_is_filled_up_with_repeated_sources(monkeypatch):
    given_sources = []

    def fake_search(model, prompts_BT, num_tokens, source, **options):
        given_sources.append(source)
        only_separators = np.full((64, 1, num_tokens), SEPARATOR)
        return types.SimpleNamespace(tokens_BKT=only_separators)

    monkeypatch.setattr(translate, 'search', fake_search)

    assert translate_ids(random_sources(3)) == [[], [], []]

    assert len(given_sources) == 1
    source_BS, valid_BS = given_sources[0]
    repeated_BS = np.resize(source_BS[:3], source_BS.shape)
    np.testing.assert_array_equal(source_BS, repeated_BS)
    assert np.all(valid_BS.any(axis=1))


def num_tokens_of(translations) -> int:
    return sum(len(ids) for ids in translations)


@pytest.mark.slow
def test_the_search_follows_its_settings():
    sources = random_sources(8)
    model = make_model(context=5)

    short = translate_ids(sources, model, beam=4, length_penalty=-2.0)
    long = translate_ids(sources, model, beam=4, length_penalty=4.0)
    greedy = translate_ids(sources, model, beam=1)

    assert num_tokens_of(short) < num_tokens_of(long)
    assert greedy != short
    assert greedy != long


def test_a_source_that_cannot_be_encoded_is_refused():
    with refused('source 2 cannot be encoded: '):
        translate.translate(make_model(vocab_size=256), ByteTokenizer(), ['a', 'b\0'], GREEDY)


def dataset_of(lines: list[str]):
    """A dataset of bytes whose validation split has these lines as documents."""
    text = ''.join(f'{line}\0' for line in lines)
    tokens = np.frombuffer(text.encode(), np.uint8)
    return token_dataset('side', ByteTokenizer(), {'validation': tokens})


def test_the_score_of_a_split_is_that_of_its_translations(caplog):
    model = make_model(vocab_size=256)
    tokenizer = ByteTokenizer()
    sources = ['one', 'a source that is too long', 'two', 'three']
    truncated_sources = [source[:19] for source in sources]
    translations = translate.translate(model, tokenizer, truncated_sources, GREEDY)
    # Only the second target is right, up to its case.
    targets = ['eins', translations[1].swapcase(), 'zwei', 'drei']

    for max_sources, lowercase in ((4, False), (4, True), (1, False)):
        scores = score_split(
            PairDataset(dataset_of(sources), dataset_of(targets)),
            'validation',
            functools.partial(translate.translate_ids, model, tokenizer, config=GREEDY),
            longest_source=19,
            max_sources=max_sources,
            lowercase=lowercase,
        )
        assert scores['num_sentences'] == max_sources
        assert scores == translation_scores(
            translations[:max_sources], targets[:max_sources], lowercase=lowercase
        )

    # The first source alone is not truncated.
    truncated = "1 of 4 sources of split 'validation' truncated to 19 tokens"
    assert caplog.messages == [truncated, truncated]


def test_processes_share_the_work_of_a_translation(monkeypatch):
    sources = random_sources(7)
    monkeypatch.setattr(translate, 'BATCH_SIZE', 2)
    expected = translate_ids(sources, beam=1)

    part_of_rank = {}

    def translate_as(rank):
        """Translates as one of three processes, which run one after another here."""

        def gather(part, limit):
            part_of_rank[rank] = part
            # Processes that have not run yet are replaced by empty translations.
            empty = [(index, '') for index in range(len(sources))]
            return [empty, *part_of_rank.values()]

        monkeypatch.setattr(jax, 'process_count', lambda: 3)
        monkeypatch.setattr(jax, 'process_index', lambda: rank)
        monkeypatch.setattr(agreement, 'gather_from_processes', gather)
        return translate_ids(sources, beam=1)

    for rank in (0, 1, 2):
        translate_as(rank)

    # Process 0 has two of the four batches, which have 2, 2, 2 and 1 sources.
    assert len(part_of_rank[0]) == 3
    assert len(part_of_rank[1]) == 2
    assert len(part_of_rank[2]) == 2
    # Now that all parts are known, process 0 returns all translations.
    assert translate_as(0) == expected


def test_scores_are_those_of_sacrebleu(monkeypatch):
    monkeypatch.setattr(socket, 'socket', None)  # nothing is downloaded
    hypotheses = ['the cat sat on the', 'a b']
    references = ['the cat sat on a mat', 'a c']

    scores = translation_scores(hypotheses, references)

    # Precisions of 1-grams to 4-grams, over both sentences.
    precisions = [5 / 7, 3 / 5, 2 / 3, 1 / 2]
    geometric_mean = math.prod(precisions) ** (1 / 4)
    brevity_penalty = math.exp(1 - 8 / 7)  # 7 words, and 8 in the references
    assert scores['bleu'] == pytest.approx(100 * brevity_penalty * geometric_mean)
    assert scores['num_sentences'] == 2
    assert scores['exact_match'] == 0.0


def test_case_counts_unless_lowercase(monkeypatch):
    monkeypatch.setattr(socket, 'socket', None)  # nothing is downloaded
    hypotheses = ['EIN HUND LÄUFT HIER', 'ja']
    references = ['Ein Hund läuft hier', 'nein']

    cased = translation_scores(hypotheses, references, lowercase=False)
    uncased = translation_scores(hypotheses, references, lowercase=True)

    assert cased['exact_match'] == 0.0
    assert uncased['exact_match'] == 0.5
    for metric in ('bleu', 'chrf'):
        assert cased[metric] < uncased[metric]
        assert '|case:mixed|' in cased[f'{metric}_signature']
        assert '|case:lc|' in uncased[f'{metric}_signature']

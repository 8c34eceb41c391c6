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


# Words are numbers.
WORDS = types.SimpleNamespace(
    vocab_size=45, separator=SEPARATOR, decode=lambda ids: ' '.join(map(str, ids))
)


@functools.cache
def make_model(**fields) -> EncoderDecoder:
    """A model whose embeddings and sources matter, and of whose translations some end."""
    model = build(dataclasses.replace(CONFIG, **fields), key=jax.random.key(0))
    model.w_embedding_VD[...] *= 5
    model.w_output_DV[:, SEPARATOR] *= 1.7
    model.blocks.cross_attention.value.w_o_NHD[...] *= 9
    return model


def sources_of(count: int) -> list[np.ndarray]:
    """Source sentences of 1, 7, 15 or 19 tokens, in no order of length."""
    rng = np.random.default_rng(0)
    return [rng.integers(SEPARATOR + 1, 40, size) for size in rng.choice([19, 1, 7, 15], count)]


def translate_ids(sources, model=None, **options) -> list[list[int]]:
    texts = translate.translate_ids(model or make_model(), WORDS, sources, DecodeConfig(**options))
    return [[*map(int, text.split())] for text in texts]


def test_greedy_translations_are_the_same_without_a_cache():
    @jax.jit
    def uncached_logits(model, tokens_BT, source_BS):
        segments_BS = (source_BS >= 0).astype(int)
        return model(tokens_BT, source_BS=abs(source_BS), source_segments_BS=segments_BS)

    sources = sources_of(150)  # two full batches and a part of one
    source_BS = np.full((150, 20), -1)
    tokens_BT = np.full((150, 10), SEPARATOR)
    for row, source in enumerate(sources):
        source_BS[row, : len(source) + 1] = np.append(source, SEPARATOR)
    for t in range(9):
        logits_BV = uncached_logits(make_model(), tokens_BT[:, :9], source_BS)[:, t, :45]
        tokens_BT[:, t + 1] = np.asarray(logits_BV).argmax(-1)
    expected = [ids[: [*ids, SEPARATOR].index(SEPARATOR)] for ids in tokens_BT[:, 1:].tolist()]
    assert translate_ids(sources, beam=1) == expected
    assert len({len(ids) for ids in expected}) > 3
    assert translate_ids([]) == []


def test_a_batch_is_filled_up_with_repeated_sources(monkeypatch):
    def search(model, prompts_BT, num_tokens, source, **options):
        given.append(source)
        return types.SimpleNamespace(tokens_BKT=np.full((64, 1, num_tokens), SEPARATOR))

    given = []
    monkeypatch.setattr(translate, 'search', search)
    assert translate_ids(sources_of(3)) == [[]] * 3
    ((source_BS, valid_BS),) = given
    np.testing.assert_array_equal(source_BS, np.resize(source_BS[:3], source_BS.shape))
    assert valid_BS.any(1).all()


@pytest.mark.slow
def test_the_search_follows_its_settings():
    sources = sources_of(8)
    model = make_model(context=5)
    short, long = (translate_ids(sources, model, beam=4, length_penalty=a) for a in (-2.0, 4.0))
    assert sum(map(len, short)) < sum(map(len, long))
    assert translate_ids(sources, model, beam=1) not in (short, long)


def test_the_score_of_a_split_is_that_of_its_translations(caplog):
    model = make_model(vocab_size=256)
    tokenizer = ByteTokenizer()
    sources = ['one', 'a source that is too long', 'two', 'three']
    with refused('source 2 cannot be encoded: '):
        translate.translate(model, tokenizer, ['a', 'b\0'], GREEDY)
    texts = translate.translate(model, tokenizer, [source[:19] for source in sources], GREEDY)
    # The second reference is that of the model in other letters; the others are wrong.
    targets = ['eins', texts[1].swapcase(), 'zwei', 'drei']
    sides = []
    for lines in (sources, targets):
        tokens = np.frombuffer('\0'.join([*lines, '']).encode(), np.uint8)
        sides.append(token_dataset('side', tokenizer, {'validation': tokens}))
    truncated = "1 of 4 sources of split 'validation' truncated to 19 tokens"
    for number, lowercase in ((4, False), (4, True), (1, False)):
        got = score_split(
            PairDataset(*sides),
            'validation',
            functools.partial(translate.translate_ids, model, tokenizer, config=GREEDY),
            longest_source=19,
            max_sources=number,
            lowercase=lowercase,
        )
        assert got == translation_scores(texts[:number], targets[:number], lowercase=lowercase)
    assert got['num_sentences'] == 1
    assert caplog.messages == [truncated] * 2


def test_processes_share_the_work_of_a_translation(monkeypatch):
    monkeypatch.setattr(translate, 'BATCH_SIZE', 2)
    parts = {}
    sources = sources_of(7)
    expected = translate_ids(sources, beam=1)
    monkeypatch.setattr(jax, 'process_count', lambda: 3)
    for rank in (0, 1, 2, 0):

        def from_all(part, limit, rank=rank):
            parts[rank] = part
            return [[(i, '') for i in range(7)], *parts.values()]  # until all have arrived

        monkeypatch.setattr(jax, 'process_index', lambda rank=rank: rank)
        monkeypatch.setattr(agreement, 'gather_from_processes', from_all)
        last = translate_ids(sources, beam=1)
    assert [len(parts[rank]) for rank in range(3)] == [3, 2, 2]  # of batches of 2, 2, 2 and 1
    assert last == expected


def test_scores_are_those_of_sacrebleu(monkeypatch):
    monkeypatch.setattr(socket, 'socket', None)  # nothing is downloaded
    # Pooled over both sentences, the precisions of n = 1 to 4 are 5 / 7, 3 / 5, 2 / 3, 1 / 2.
    scores = translation_scores(['the cat sat on the', 'a b'], ['the cat sat on a mat', 'a c'])
    precision = math.prod((5 / 7, 3 / 5, 2 / 3, 1 / 2)) ** (1 / 4)
    assert scores['bleu'] == pytest.approx(100 * math.exp(1 - 8 / 7) * precision)
    assert scores['num_sentences'] == 2
    assert scores['exact_match'] == 0.0


def test_case_counts_unless_lowercase(monkeypatch):
    monkeypatch.setattr(socket, 'socket', None)
    texts = ['EIN HUND LÄUFT HIER', 'ja'], ['Ein Hund läuft hier', 'nein']
    cased, uncased = (translation_scores(*texts, lowercase=lower) for lower in (False, True))
    assert (cased['exact_match'], uncased['exact_match']) == (0.0, 0.5)
    for name in ('bleu', 'chrf'):
        assert cased[name] < uncased[name]
        assert '|case:mixed|' in cased[f'{name}_signature']
        assert '|case:lc|' in uncased[f'{name}_signature']

"""Translation: order, batches, agreement with the uncached model, scores."""

import dataclasses
import functools
import math
import socket

import jax
import numpy as np
import pytest

from qkattn.config import Config, DecodeConfig, ModelConfig
from qkattn.data.tokenizers.tokenizer import ByteTokenizer
from qkattn.data.tokens import PairDataset
from qkattn.decode import translate
from qkattn.decode.translate import translation_scores
from qkattn.jobs import agreement
from qkattn.model import EncoderDecoder, build
from tests.data.datasets import token_dataset
from tests.data.refusals import refused

CONFIG = ModelConfig(
    kind='encoder_decoder',
    **dict(d_model=16, num_layers=1, num_heads=2, context=9, source_context=20, vocab_size=50),
    **dict(d_ff=32, scan_unroll=1, tied_embeddings=False),
)
SEPARATOR = 3
GREEDY = DecodeConfig(beam=1)


class Words:
    """A tokenizer of words that are numbers."""

    vocab_size, separator = 45, SEPARATOR

    def decode(self, ids):
        return ' '.join(map(str, ids))


@functools.cache
def make(**fields) -> EncoderDecoder:
    """A model whose embeddings and sources matter, and of whose translations some end."""
    model = build(dataclasses.replace(CONFIG, **fields), key=jax.random.key(0))
    model.w_embedding_VD[...] *= 5
    model.w_output_DV[:, SEPARATOR] *= 1.7
    model.blocks.cross_attention.value.w_o_NHD[...] *= 9
    return model


def sources_of(count: int) -> list[np.ndarray]:
    """Of 1 to 19 tokens, in no order of length."""
    rng = np.random.default_rng(0)
    return [rng.integers(SEPARATOR + 1, 40, size) for size in rng.choice([19, 1, 7, 15], count)]


def translated(sources, model=None, **options) -> list[list[int]]:
    texts = translate.translate_ids(model or make(), Words(), sources, DecodeConfig(**options))
    return [[*map(int, text.split())] for text in texts]


@jax.jit
def _uncached(model, tokens_BT, source_BS, valid_BS):
    return model(tokens_BT, source_BS=source_BS, source_segments_BS=valid_BS)


def uncached(model, tokens_BT, sources) -> np.ndarray:
    """Logits of the whole model."""
    source_BS = np.zeros((len(sources), 20), np.int32)
    valid_BS = np.zeros((len(sources), 20), np.int32)
    for row, source in enumerate(sources):
        source_BS[row, : len(source) + 1] = np.append(source, SEPARATOR)
        valid_BS[row, : len(source) + 1] = 1
    return np.asarray(_uncached(model, tokens_BT, source_BS, valid_BS))[..., :45]


def test_greedy_translations_are_those_without_a_cache():
    sources = sources_of(150)  # two full batches and a part of one
    tokens_BT = np.full((150, 10), SEPARATOR)
    for t in range(9):
        tokens_BT[:, t + 1] = uncached(make(), tokens_BT[:, :9], sources)[:, t].argmax(-1)
    expected = [ids[: [*ids, SEPARATOR].index(SEPARATOR)] for ids in tokens_BT[:, 1:].tolist()]
    assert translated(sources, beam=1) == expected
    lengths = {len(ids) for ids in expected}
    assert 9 in lengths and len(lengths) > 3
    assert max(max(ids, default=0) for ids in expected) > 30
    assert translated([]) == []


def test_the_search_has_the_beam_and_the_length_penalty_of_the_settings():
    sources, model = sources_of(8), make(context=5)
    penalties = (-2.0, 0.0, 4.0)
    lengths = [
        sum(map(len, translated(sources, model, beam=8, length_penalty=a))) for a in penalties
    ]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]
    assert translated(sources, model, beam=8) != translated(sources, model, beam=1)


@pytest.mark.parametrize(
    ('texts', 'message'),
    [
        (['a', 'b' * 20], 'source 2 has 20 tokens, but model.source_context=20 has room for 19'),
        (['a', 'b\0'], 'source 2 cannot be encoded: '),
    ],
)
def test_bad_input_is_one_sentence(texts, message):
    with refused(message):
        translate.translate(make(vocab_size=256), ByteTokenizer(), texts, DecodeConfig())


def test_a_split_is_scored_as_its_translations_are(monkeypatch):
    model, tokenizer = make(vocab_size=256), ByteTokenizer()
    sources = ['one', 'a source that is too long', 'two', 'three']
    texts = translate.translate(model, tokenizer, [source[:19] for source in sources], GREEDY)
    # The second reference is that of the model in other letters; the others are wrong.
    targets = ['eins', texts[1].swapcase(), 'zwei', 'drei']
    sides = {}
    for name, lines in (('a', sources), ('b', targets)):
        tokens = np.concatenate([np.append(tokenizer.encode(line), 0) for line in lines])
        sides[name] = token_dataset(name, tokenizer, {'validation': tokens.astype(np.uint8)})
    pairs = PairDataset(*sides.values())
    warnings = []
    monkeypatch.setattr(translate.log, 'warning', lambda text, *args: warnings.append(text % args))
    for lowercase in (False, True):
        got = translate.score_split(model, pairs, 'validation', GREEDY, lowercase=lowercase)
        assert got == translation_scores(texts, targets, lowercase=lowercase)
    assert warnings == ["1 of 4 sources of split 'validation' truncated to 19 tokens"] * 2
    first = dataclasses.replace(GREEDY, max_sources=1)
    got = translate.score_split(model, pairs, 'validation', first, lowercase=False)
    assert got == translation_scores(texts[:1], targets[:1])
    assert got['num_sentences'] == 1 and len(warnings) == 2


def test_processes_share_the_batches_and_know_all_translations(monkeypatch):
    monkeypatch.setattr(translate, 'BATCH_SIZE', 2)
    sources = sources_of(7)
    want = translated(sources, beam=1)
    monkeypatch.setattr(jax, 'process_count', lambda: 3)
    given: list = [[]] * 3
    for rank in (0, 1, 2, 0):
        monkeypatch.setattr(jax, 'process_index', lambda rank=rank: rank)

        def from_all(own, rank=rank, limit=None):
            given[rank] = own
            # Until all have arrived, others answer for them.
            arrived = {i for part in given for i, _ in part}
            return [*given, [(i, '') for i in range(7) if i not in arrived]]

        monkeypatch.setattr(agreement, 'from_all', from_all)
        last = translated(sources, beam=1)
    assert [len(part) for part in given] == [3, 2, 2]  # of batches of 2, 2, 2 and 1
    assert last == want


def test_only_translations_fetch_the_parameters_of_a_trial():
    """They may not fit on one device."""
    assert translate.score_trial(Config(), object(), lambda: pytest.fail('fetched')) is None


def test_bleu_is_the_geometric_mean_of_clipped_precisions_and_the_brevity_penalty(monkeypatch):
    monkeypatch.setattr(socket, 'socket', None)  # nothing is downloaded
    # Pooled over both sentences. Matches of n = 1: the cat sat on (the second 'the' is clipped),
    # a; n = 2: 'the cat', 'cat sat', 'sat on'; n = 3: 'the cat sat', 'cat sat on'; n = 4: one.
    scores = translation_scores(['the cat sat on the', 'a b'], ['the cat sat on a mat', 'a c'])
    precisions, brevity = [5 / 7, 3 / 5, 2 / 3, 1 / 2], math.exp(1 - 8 / 7)
    assert scores['bleu'] == pytest.approx(100 * brevity * math.prod(precisions) ** (1 / 4))
    assert scores['num_sentences'] == 2 and scores['exact_match'] == 0.0
    # Punctuation is split off: of the 6 tokens all but the last match.
    scores = translation_scores(['ja, das ist gut!'], ['ja, das ist gut.'])
    precisions = [5 / 6, 4 / 5, 3 / 4, 2 / 3]
    assert scores['bleu'] == pytest.approx(100 * math.prod(precisions) ** (1 / 4))
    # 'ab' against 'abc': n = 1: 2 of 2, 2 of 3; n = 2: 1 of 1, 1 of 2; longer n are in neither.
    precision, recall = 1.0, (2 / 3 + 1 / 2) / 2
    f2 = 5 * precision * recall / (4 * precision + recall)
    assert translation_scores(['ab'], ['abc'])['chrf'] == pytest.approx(100 * f2)


def test_case_counts_unless_lowercase():
    texts = ['EIN HUND LÄUFT HIER', 'ja'], ['Ein Hund läuft hier', 'nein']
    cased, uncased = (translation_scores(*texts, lowercase=lower) for lower in (False, True))
    assert (cased['exact_match'], uncased['exact_match']) == (0.0, 0.5)
    for name in ('bleu', 'chrf'):
        assert cased[name] < uncased[name]
        assert '|case:mixed|' in cased[f'{name}_signature']
        assert '|case:lc|' in uncased[f'{name}_signature']
    assert '|tok:13a|' in cased['bleu_signature']

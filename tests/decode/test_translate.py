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
    """Greedy translations, for which the model reads the whole sequences for each token.

    A translation ends before the first separator, or after CONFIG.context tokens.
    """
    B = len(sources)
    T = CONFIG.context
    # A source ends with a separator. Segment 0 is padding.
    source_BS = np.zeros((B, CONFIG.source_context), int)
    segments_BS = np.zeros((B, CONFIG.source_context), int)
    for row, source in enumerate(sources):
        source_BS[row, : len(source) + 1] = [*source, SEPARATOR]
        segments_BS[row, : len(source) + 1] = 1

    compute_logits = jax.jit(lambda model, *args, **kwargs: model(*args, **kwargs))
    # Column 0 is a separator, with which each translation starts.
    tokens_BT = np.full((B, T + 1), SEPARATOR)
    for t in range(T):
        logits_BTV = compute_logits(
            model, tokens_BT[:, :T], source_BS=source_BS, source_segments_BS=segments_BS
        )
        # The model has 50 ids. Only the 45 ids of the tokenizer may be chosen.
        logits_BV = np.asarray(logits_BTV[:, t, : NumberTokenizer.vocab_size])
        tokens_BT[:, t + 1] = logits_BV.argmax(-1)

    translations = []
    for tokens in tokens_BT[:, 1:].tolist():
        length = tokens.index(SEPARATOR) if SEPARATOR in tokens else T
        translations.append(tokens[:length])
    return translations


def test_greedy_translations_are_the_same_without_a_cache():
    sources = random_sources(150)  # 64 + 64 + 22, since a batch has 64 rows

    translations = translate_ids(sources, beam=1)

    assert translations == greedy_without_cache(make_model(), sources)
    lengths = {len(ids) for ids in translations}
    assert len(lengths) > 3


def test_no_sources_have_no_translations():
    assert translate_ids([]) == []


def test_a_batch_is_filled_up_with_repeated_sources(monkeypatch):
    """A batch has 64 rows, so 3 sources are repeated in order: 0, 1, 2, 0, 1, 2 and so on."""
    batches = []

    def fake_search(model, prompts_BT, num_tokens, source, **options):
        """Replaces the beam search: records the sources, and returns empty translations."""
        batches.append(source)
        only_separators = np.full((64, 1, num_tokens), SEPARATOR)
        return types.SimpleNamespace(tokens_BKT=only_separators)

    monkeypatch.setattr(translate, 'search', fake_search)

    translations = translate_ids(random_sources(3))

    assert translations == [[], [], []]
    assert len(batches) == 1
    source_BS, valid_BS = batches[0]
    # `resize` repeats the three rows until the shape is filled.
    repeated_BS = np.resize(source_BS[:3], source_BS.shape)
    np.testing.assert_array_equal(source_BS, repeated_BS)
    # Every row has a token that is not padding.
    assert np.all(valid_BS.any(axis=1))


def num_tokens_of(translations) -> int:
    return sum(len(ids) for ids in translations)


@pytest.mark.slow
def test_the_search_follows_its_settings():
    """The score of a translation is its log-probability / length ** length_penalty.

    Log-probabilities are negative, so a larger penalty favours longer translations.
    """
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
    """The first `max_sources` sources are truncated to 19 bytes, translated and scored."""
    model = make_model(vocab_size=256)
    tokenizer = ByteTokenizer()
    sources = ['one', 'a source that is too long', 'two', 'three']
    truncated_sources = [source[:19] for source in sources]
    translations = translate.translate(model, tokenizer, truncated_sources, GREEDY)
    # Only the second target is right: it is the model's translation with upper and lower case
    # exchanged.
    targets = ['eins', translations[1].swapcase(), 'zwei', 'drei']
    pairs = PairDataset(dataset_of(sources), dataset_of(targets))
    translate_greedily = functools.partial(translate.translate_ids, model, tokenizer, config=GREEDY)

    for max_sources, lowercase in ((4, False), (4, True), (1, False)):
        scores = score_split(
            pairs,
            'validation',
            translate_greedily,
            longest_source=19,
            max_sources=max_sources,
            lowercase=lowercase,
        )

        expected_scores = translation_scores(
            translations[:max_sources], targets[:max_sources], lowercase=lowercase
        )
        assert scores['num_sentences'] == max_sources
        assert scores == expected_scores

    # Both calls for 4 sources warn. The call for the first source, 'one', truncates nothing.
    warning = "1 of 4 sources of split 'validation' truncated to 19 tokens"
    assert caplog.messages == [warning, warning]


def test_processes_share_the_work_of_a_translation(monkeypatch):
    """Each of three processes translates some batches, and returns all translations.

    The batches 0 to 3 go to the processes 0, 1, 2 and 0.
    """
    sources = random_sources(7)
    monkeypatch.setattr(translate, 'BATCH_SIZE', 2)
    expected_translations = translate_ids(sources, beam=1)

    part_of_rank = {}  # pairs of the index of a source and its translation

    def translate_as(rank):
        """Translates as the process `rank`. The test runs the processes one after another."""

        def gather(part, limit):
            """Replaces the exchange between processes: returns the parts so far."""
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

    # The four batches have 2, 2, 2 and 1 sources. Process 0 has the first and the last batch.
    assert len(part_of_rank[0]) == 2 + 1
    assert len(part_of_rank[1]) == 2
    assert len(part_of_rank[2]) == 2
    # In this second call of process 0, the parts of all processes are known.
    assert translate_as(0) == expected_translations


def test_scores_are_those_of_sacrebleu(monkeypatch):
    monkeypatch.setattr(socket, 'socket', None)  # nothing is downloaded
    hypotheses = ['the cat sat on the', 'a b']
    references = ['the cat sat on a mat', 'a c']

    scores = translation_scores(hypotheses, references)

    # BLEU counts the n-grams of both hypotheses that occur in their references.
    # Of 7 words, 5 occur: the second 'the' and 'b' do not.
    # The precisions of 1-grams to 4-grams follow.
    precisions = [5 / 7, 3 / 5, 2 / 3, 1 / 2]
    geometric_mean = math.prod(precisions) ** (1 / 4)
    # The hypotheses have 7 words, and the references have 8.
    brevity_penalty = math.exp(1 - 8 / 7)
    assert scores['bleu'] == pytest.approx(100 * brevity_penalty * geometric_mean)

    assert scores['num_sentences'] == 2
    # No hypothesis equals its reference.
    assert scores['exact_match'] == 0.0


def test_case_counts_unless_lowercase(monkeypatch):
    monkeypatch.setattr(socket, 'socket', None)  # nothing is downloaded
    hypotheses = ['EIN HUND LÄUFT HIER', 'ja']
    references = ['Ein Hund läuft hier', 'nein']

    cased = translation_scores(hypotheses, references, lowercase=False)
    uncased = translation_scores(hypotheses, references, lowercase=True)

    # Without case, one of the two hypotheses equals its reference.
    assert cased['exact_match'] == 0.0
    assert uncased['exact_match'] == 0.5

    # A signature of sacrebleu states the settings of a score.
    for metric in ('bleu', 'chrf'):
        assert cased[metric] < uncased[metric]
        assert '|case:mixed|' in cased[f'{metric}_signature']
        assert '|case:lc|' in uncased[f'{metric}_signature']

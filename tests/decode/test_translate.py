"""Translation: order, batches, agreement with the uncached model; and a task learned end to end."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from qkattn.config import (
    Config,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    TrialsConfig,
)
from qkattn.data.parallel import PairDataset
from qkattn.data.tokenizers.tokenizer import ByteTokenizer
from qkattn.data.tokens import SplitInfo, TokenDataset
from qkattn.decode import translate, translation_scores
from qkattn.errors import ConfigError
from qkattn.model import EncoderDecoder, build
from qkattn.train import train

CONFIG = ModelConfig(
    kind='encoder_decoder',
    d_model=16,
    num_layers=1,
    num_heads=2,
    context=9,
    source_context=20,
    vocab_size=50,
    d_ff=32,
    scan_unroll=1,
    tied_embeddings=False,
)
SEPARATOR = 3
GREEDY = DecodeConfig(beam=1)


@functools.cache
def make(**fields) -> EncoderDecoder:
    """A model whose embeddings and sources matter, and of whose translations some end."""
    model = build(dataclasses.replace(CONFIG, **fields), key=jax.random.key(0))
    model.w_embedding_VD[...] *= 5
    model.w_output_DV[:, SEPARATOR] *= 1.5
    if model.config.kind == 'encoder_decoder':
        model.blocks.cross_attention.value.w_o_NHD[...] *= 9
    return model


def sources_of(count: int) -> list[np.ndarray]:
    """Of 1 to 19 tokens, in no order of length."""
    rng = np.random.default_rng(0)
    return [rng.integers(SEPARATOR + 1, 40, size) for size in rng.choice([19, 1, 7, 15], count)]


def translated(sources, **options) -> list[list[int]]:
    found = translate.translate_ids(make(), sources, SEPARATOR, DecodeConfig(**options), 45)
    return [ids.tolist() for ids in found]


@jax.jit
def _uncached(model, tokens_BT, source_BS, valid_BS):
    return model(tokens_BT, source_BS=source_BS, source_segments_BS=valid_BS)


def uncached(model, tokens_BT, sources) -> np.ndarray:
    """Logits of the whole model, in one shape for all tests."""
    source_BS = np.zeros((150, 20), np.int32)
    valid_BS = np.zeros((150, 20), np.int32)
    for row, source in enumerate(sources):
        source_BS[row, : len(source) + 1] = np.append(source, SEPARATOR)
        valid_BS[row, : len(source) + 1] = 1
    padded_BT = np.zeros((150, 9), np.int32)
    padded_BT[: len(sources)] = tokens_BT
    return np.asarray(_uncached(model, padded_BT, source_BS, valid_BS))[: len(sources), :, :45]


@pytest.mark.parametrize(
    'fields', [{}, {'positions': 'rope', 'cross_variant': 'merged/vo'}], ids=['qk/vo', 'merged']
)
def test_greedy_translations_are_those_without_a_cache(fields):
    model = make(**fields)
    sources = sources_of(150)  # two full batches and a part of one
    found = translate.translate_ids(model, sources, SEPARATOR, GREEDY, 45)
    tokens_BT = np.full((150, 10), SEPARATOR)
    for t in range(9):
        tokens_BT[:, t + 1] = uncached(model, tokens_BT[:, :9], sources)[:, t].argmax(-1)
    for ids, expected_T in zip(found, tokens_BT[:, 1:].tolist(), strict=True):
        assert ids.tolist() == expected_T[: [*expected_T, SEPARATOR].index(SEPARATOR)]
    lengths = {len(ids) for ids in found}
    assert 9 in lengths and len(lengths) > 3
    assert max(max(ids, default=0) for ids in found) > 30


def test_a_translation_does_not_depend_on_its_batch(monkeypatch):
    sources = sources_of(11)
    together = translated(sources, beam=4, length_penalty=0.0)
    monkeypatch.setattr(translate, 'BATCH_SIZE', 4)
    assert translated(sources[::-1], beam=4, length_penalty=0.0)[::-1] == together
    assert len({tuple(ids) for ids in together}) > 5
    assert translated([], beam=4) == []


def test_the_best_hypothesis_is_taken():
    """By the uncached model it scores higher than greedy decoding and another penalty's best."""
    model, sources = make(), sources_of(64)

    def scores(translations, penalty):
        ended = [[SEPARATOR, *ids, SEPARATOR][:10] for ids in translations]
        tokens_BT = np.array([ids + [0] * (10 - len(ids)) for ids in ended])
        logits_BTV = uncached(model, tokens_BT[:, :9], sources)
        nats_BTV = np.asarray(jax.nn.log_softmax(logits_BTV), np.float64)
        nats_BT = np.take_along_axis(nats_BTV, tokens_BT[:, 1:, None], -1)[..., 0]
        lengths_B = np.array([len(ids) - 1 for ids in ended])
        return (nats_BT * (np.arange(9) < lengths_B[:, None])).sum(1) / lengths_B**penalty

    greedy = translated(sources, beam=1)
    best = {penalty: translated(sources, beam=4, length_penalty=penalty) for penalty in (0.0, 2.0)}
    for penalty, other in ((0.0, 2.0), (2.0, 0.0)):
        own = scores(best[penalty], penalty)
        gained = own - scores(greedy, penalty)
        # The search stops once 4 hypotheses are finished, so a few may score lower.
        assert np.mean(gained >= -1e-4) > 0.8 and gained.mean() > 0.01
        assert own.mean() > scores(best[other], penalty).mean() + 0.01


def test_text_goes_in_and_comes_out():
    model = make(vocab_size=256)
    tokenizer = ByteTokenizer()
    texts = ['héllo', 'a', 'Ein Hund', 'b' * 19]  # the last one as long as the context allows
    found = translate.translate(model, tokenizer, texts, GREEDY)
    encoded = [tokenizer.encode(text) for text in texts]
    ids = translate.translate_ids(model, encoded, tokenizer.separator, GREEDY, 256)
    assert found == [tokenizer.decode(one) for one in ids]
    assert len(set(found)) > 1


@pytest.mark.parametrize(
    ('texts', 'fields', 'options', 'message'),
    [
        (
            ['a', 'b' * 20],
            {},
            {},
            'source 2 has 20 tokens, but model.source_context=20 has room for 19',
        ),
        (['a', 'b\0'], {}, {}, 'source 2 cannot be encoded: '),
        (['a', ''], {}, {}, 'source 2 is empty'),
        (['a'], {'kind': 'decoder', 'source_context': None}, {}, "kind='decoder' does not transl"),
        (['a'], {}, {'beam': 0}, 'beam=0 must be at least 1'),
        (['a'], {}, {'length_penalty': float('inf')}, 'length_penalty=inf must be finite'),
        (['a'], {'vocab_size': 100}, {}, 'vocab_size=256 must be from 1 to the 100 logits'),
    ],
    ids=str,
)
def test_bad_input_is_one_sentence(texts, fields, options, message):
    model = make(**{'vocab_size': 256} | fields)
    with pytest.raises(ConfigError, match=message) as caught:
        translate.translate(model, ByteTokenizer(), texts, DecodeConfig(**options))
    assert '\n' not in str(caught.value)


def side(name: str, texts: dict[str, list[str]]) -> TokenDataset:
    tokenizer, splits = ByteTokenizer(), {}
    for split, lines in texts.items():
        tokens = np.concatenate([np.append(tokenizer.encode(x), 0) for x in lines])
        info = SplitInfo(
            dataset=name,
            version='1',
            tokenizer=tokenizer.name,
            split=split,
            dtype='uint8',
            num_documents=len(lines),
            num_tokens=len(tokens),
            num_bytes=len(tokens),
            unigram_nats_per_token=1.0,
            fingerprint=name,
        )
        splits[split] = (tokens.astype(np.uint8), info)
    return TokenDataset(name, '1', tokenizer, splits)


def test_a_split_is_scored_as_its_translations_are(monkeypatch):
    model = make(vocab_size=256)
    sources = ['one', 'a source that is too long', 'two', 'three']
    shown = [source[:19] for source in sources]
    found = translate.translate(model, ByteTokenizer(), shown, GREEDY)
    # The second reference is what the model says, in other letters; the others are wrong.
    targets = ['eins', found[1].swapcase(), 'zwei', 'drei']
    train_side = ['x']
    pairs = PairDataset(
        side('a', {'train': train_side, 'validation': sources}),
        side('b', {'train': train_side, 'validation': targets}),
    )
    warnings = []
    monkeypatch.setattr(translate.log, 'warning', lambda text, *args: warnings.append(text % args))
    for lowercase in (False, True):
        got = translate.score_split(model, pairs, 'validation', GREEDY, lowercase=lowercase)
        assert got == translation_scores.translation_scores(found, targets, lowercase=lowercase)
    assert warnings == ["1 of 4 sources of split 'validation' truncated to 19 tokens"] * 2
    first = dataclasses.replace(GREEDY, max_sources=1)
    got = translate.score_split(model, pairs, 'validation', first, lowercase=False)
    assert got == translation_scores.translation_scores(found[:1], targets[:1])
    assert got['num_sentences'] == 1 and len(warnings) == 2


def test_reversal_is_learned_from_files(tmp_path):
    """The whole way: files, vocabulary, packed rows, training, beam search, scores."""
    rng = np.random.default_rng(0)
    words = {''.join(rng.choice(list('abcdefgh'), rng.integers(2, 6))) for _ in range(4000)}
    words = sorted(words)
    rng.shuffle(words)
    splits = {'validation': words[:100], 'train': words[100:]}
    for split, lines in splits.items():
        (tmp_path / f'{split}.fw').write_text('\n'.join(lines) + '\n')
        (tmp_path / f'{split}.bw').write_text('\n'.join(line[::-1] for line in lines) + '\n')
    config = Config(
        model=ModelConfig(
            kind='encoder_decoder',
            d_model=32,
            num_layers=1,
            num_heads=2,
            context=24,
            vocab_size=16,
            scan_unroll=1,
        ),
        data=DataConfig(
            name='parallel',
            path=str(tmp_path),
            languages='fw-bw',
            tokenizer='characters',
            data_dir=str(tmp_path / 'cache'),
        ),
        optimizer=OptimizerConfig(warmup_steps=20),
        train=TrainConfig(
            num_steps=400,
            batch_size=32,
            steps_per_dispatch=50,
            log_every=50,
            eval_every=200,
            checkpoint_every=400,
        ),
        trials=TrialsConfig(learning_rates=(1e-2,), weight_decays=(0.0,)),
        decode=DecodeConfig(beam=2),
    )
    (result,) = train(config, tmp_path / 'run')
    assert result['val_exact_match'] >= 0.95
    assert result['val_num_sentences'] == 100
    assert result['val_chrf'] > 95 and result['val_accuracy'] > 0.95 and result['val_loss'] < 0.2
    assert result['test_loss'] is None and 'test_bleu' not in result

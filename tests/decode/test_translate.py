"""Translation: order, batches, what the uncached model would say; and a task learned whole."""

import dataclasses

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


def make(**fields) -> EncoderDecoder:
    """A model whose embeddings are large enough that every token matters."""
    model = build(dataclasses.replace(CONFIG, **fields), key=jax.random.key(0))
    model.w_embedding_VD[...] *= 5
    return model


def sources_of(count: int, vocab_size: int = 40) -> list[np.ndarray]:
    """Of 1 to 19 tokens, in no order of length."""
    rng = np.random.default_rng(0)
    return [
        rng.integers(SEPARATOR + 1, vocab_size, size) for size in rng.choice([19, 1, 7, 15], count)
    ]


def uncached_greedy(model, sources, vocab_size):
    """Token after token with the whole model, without padding in the source."""
    logits = jax.jit(EncoderDecoder.__call__)
    T, found = model.config.context, [None] * len(sources)
    for size in {len(source) for source in sources}:
        chosen = [i for i, source in enumerate(sources) if len(source) == size]
        source_BS = np.array([np.append(sources[i], SEPARATOR) for i in chosen])
        tokens_BT = np.full((len(chosen), T + 1), SEPARATOR)
        for t in range(T):
            logits_BTV = logits(model, tokens_BT[:, :T], source_BS=source_BS)
            tokens_BT[:, t + 1] = logits_BTV[:, t, :vocab_size].argmax(-1)
        for i, ids in zip(chosen, tokens_BT[:, 1:].tolist(), strict=True):
            found[i] = ids[: ids.index(SEPARATOR)] if SEPARATOR in ids else ids
    return found


@pytest.mark.parametrize(
    'fields', [{}, {'positions': 'rope', 'cross_variant': 'merged/no_vo'}], ids=['qk/vo', 'merged']
)
def test_greedy_translations_are_those_without_a_cache(fields):
    model = make(**fields)
    model.w_output_DV[:, SEPARATOR] *= 1.5  # so that some end
    sources = sources_of(150)  # two full batches and a part of one
    found = translate.translate_ids(model, sources, SEPARATOR, GREEDY, 45)
    assert [ids.tolist() for ids in found] == uncached_greedy(model, sources, 45)
    lengths = {len(ids) for ids in found}
    assert 9 in lengths and len(lengths) > 3
    assert max(max(ids, default=0) for ids in found) > 30


def test_a_source_is_translated_alike_in_any_company(monkeypatch):
    model = make()
    model.blocks.cross_attention.value.w_o_NHD[...] *= 9  # translations of different sources differ
    sources = sources_of(11)
    config = DecodeConfig(beam=3)
    together = translate.translate_ids(model, sources, SEPARATOR, config, 50)
    monkeypatch.setattr(translate, 'BATCH_SIZE', 4)
    apart = translate.translate_ids(model, sources[::-1], SEPARATOR, config, 50)[::-1]
    for one, other in zip(together, apart, strict=True):
        np.testing.assert_array_equal(one, other)
    assert len({tuple(ids.tolist()) for ids in together}) > 5
    assert translate.translate_ids(model, [], SEPARATOR, config, 50) == []


def test_the_best_hypothesis_is_taken(monkeypatch):
    """Of a beam of 4, none has a better score by the uncached model; the penalty matters."""
    model = make()
    sources = sources_of(5)
    logits = jax.jit(EncoderDecoder.__call__)

    def score(source, ids, penalty):
        ids = np.append(ids, SEPARATOR)[:9]
        tokens = np.append(SEPARATOR, ids)[:-1]
        padded = np.pad(tokens, (0, 9 - len(tokens)))
        source_BS = np.append(source, SEPARATOR)
        source_BS, kept = np.pad(source_BS, (0, 20 - len(source_BS))), np.arange(20)
        logits_TV = logits(
            model,
            padded[None],
            source_BS=source_BS[None],
            source_segments_BS=(kept <= len(source)).astype(np.int32)[None],
        )[0, : len(ids)]
        nats_TV = np.asarray(jax.nn.log_softmax(logits_TV), np.float64)
        return nats_TV[np.arange(len(ids)), ids].sum() / len(ids) ** penalty

    def found(**options):
        return translate.translate_ids(model, sources, SEPARATOR, DecodeConfig(**options), 50)

    for penalty in (0.0, 2.0):
        greedy, beam = (found(beam=beam, length_penalty=penalty) for beam in (1, 4))
        scores = [
            [score(source, ids, penalty) for source, ids in zip(sources, side, strict=True)]
            for side in (greedy, beam)
        ]
        assert np.all(np.array(scores[1]) >= np.array(scores[0]) - 1e-4)
        assert np.any(np.array(scores[1]) > np.array(scores[0]) + 1e-2)


def test_text_goes_in_and_comes_out():
    model = make(vocab_size=256)
    tokenizer = ByteTokenizer()
    texts = ['héllo', 'a', 'Ein Hund']
    found = translate.translate(model, tokenizer, texts, GREEDY)
    encoded = [tokenizer.encode(text) for text in texts]
    ids = translate.translate_ids(model, encoded, tokenizer.separator, GREEDY, 256)
    assert found == [tokenizer.decode(one) for one in ids]
    assert len(set(found)) > 1


@pytest.mark.parametrize(
    ('texts', 'fields', 'options', 'said'),
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
def test_bad_input_is_one_sentence(texts, fields, options, said):
    model = make(**{'vocab_size': 256} | fields)
    with pytest.raises(ConfigError, match=said) as caught:
        translate.translate(model, ByteTokenizer(), texts, DecodeConfig(**options))
    assert '\n' not in str(caught.value)


def test_a_source_as_long_as_the_context_fits():
    (found,) = translate.translate(make(vocab_size=256), ByteTokenizer(), ['b' * 19], GREEDY)
    assert isinstance(found, str)


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
    assert warnings == ["1 sources of split 'validation' are cut to 19 tokens"] * 2
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

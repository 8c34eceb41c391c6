"""Every kind of model with every kind of data: the right rows, or one sentence."""

import dataclasses

import numpy as np
import pytest

from qkattn.config import Config, DataConfig, ModelConfig
from qkattn.data.load import load, tokenizer_of
from qkattn.data.parallel import PairDataset
from qkattn.data.tasks.language import LanguageRows
from qkattn.data.tasks.masked import MaskedRows
from qkattn.data.tasks.probes import CausalProbeRows, LabellingProbeRows
from qkattn.data.tasks.task_registry import TASKS, rows_of, task_of
from qkattn.data.tasks.translation import TranslationRows
from qkattn.data.tokens import TokenDataset
from qkattn.errors import ConfigError

LINES = {
    'en': [f'the {n} dog{"s" * (n > 1)} run home' for n in range(40)],
    'de': [f'der {n} Hund läuft nach Hause' for n in range(40)],
}
DECODER, ENCODER, BOTH = 'decoder', 'encoder', 'encoder_decoder'
SPLITS = {'train': slice(0, 24), 'validation': slice(24, 32), 'test': slice(32, 40)}


@pytest.fixture
def files(tmp_path):
    """A directory that is both text and parallel text; the caches lie elsewhere."""
    path = tmp_path / 'files'
    path.mkdir()
    for split, part in SPLITS.items():
        for language, lines in LINES.items():
            text = ''.join(f'{line}\n' for line in lines[part])
            (path / f'{split}.{language}').write_text(text, encoding='utf-8')
        (path / f'{split}.txt').write_text('\n'.join(LINES['en'][part]), encoding='utf-8')
    return path


@pytest.fixture
def config_of(files, tmp_path):
    """config_of('encoder', 'text', model={...}, data={...})."""
    own = {
        'text': {'name': 'text', 'path': str(files)},
        'parallel': {'name': 'parallel', 'path': str(files), 'languages': 'en-de'},
        'causal probe': {'name': 'recall(pairs=2, keys=4, values=4)'},
        'labelling probe': {'name': 'successor(keys=4, payloads=2)'},
    }

    def make(kind: str, what: str, *, model=None, data=None) -> Config:
        length = {'causal probe': 7, 'labelling probe': 4}.get(what, 40)
        fields = {'kind': kind, 'context': length, 'vocab_size': 300} | (model or {})
        named = own[what] | {'data_dir': str(tmp_path / 'cache')} | (data or {})
        return Config(model=ModelConfig(**fields), data=DataConfig(**named))

    return make


@pytest.mark.parametrize(
    ('kind', 'what', 'rows_type', 'names'),
    [
        (DECODER, 'text', LanguageRows, set()),
        (DECODER, 'causal probe', CausalProbeRows, set()),
        (ENCODER, 'text', MaskedRows, set()),
        (ENCODER, 'labelling probe', LabellingProbeRows, set()),
        (BOTH, 'parallel', TranslationRows, {'source_BS', 'source_segments_BS', 'segments_BT'}),
    ],
)
def test_the_kind_of_model_says_what_the_rows_are(config_of, kind, what, rows_type, names):
    config = config_of(kind, what, model={'source_context': 60} if names else {})
    rows = rows_of(config)
    assert type(rows) is rows_type is task_of(config)
    assert rows_type in TASKS
    assert rows.splits == ('train', 'validation', 'test')
    batch = rows.read('validation', np.arange(2) % 1, np.zeros((2, 2), np.uint64))
    assert set(batch) == {'tokens_BT', 'targets_BT', 'loss_weights_BT'} | names
    stated = rows_type.array_shapes(config.model)
    assert {name: (a.shape[1], a.dtype) for name, a in batch.items()} == stated
    assert batch['loss_weights_BT'].any()
    lengths = {name: array.shape[1] for name, array in batch.items()}
    T = {'causal probe': 7, 'labelling probe': 4}.get(what, 40)
    assert lengths == {name: 60 if name.startswith('source') else T for name in lengths}


@pytest.mark.parametrize(
    ('kind', 'what', 'said'),
    [
        (BOTH, 'text', "'text' is text in one language, .* needs a translation set"),
        (DECODER, 'parallel', "'parallel' is a translation set, .* or a causal probe"),
        (ENCODER, 'parallel', "'parallel' is a translation set, .* or a labelling probe"),
        (ENCODER, 'causal probe', "'recall.*' is a causal probe, .* a labelling probe"),
        (BOTH, 'causal probe', 'is a causal probe, .* needs a translation set'),
        (DECODER, 'labelling probe', "'successor.*' is a labelling probe, .* a causal probe"),
        (BOTH, 'labelling probe', 'is a labelling probe, .* needs a translation set'),
    ],
)
def test_data_of_no_use_to_the_model_is_refused(config_of, kind, what, said):
    refused(config_of(kind, what), said)
    refused(config_of(kind, what), f"^data.name='.*model.kind='{kind}' needs")


def refused(config: Config, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        rows_of(config)
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
    ('kind', 'what', 'model', 'data', 'said'),
    [
        (DECODER, 'causal probe', {'context': 8}, {}, 'model.context=8 must equal .*, 7.$'),
        (ENCODER, 'labelling probe', {'context': 3}, {}, 'model.context=3 must equal .*, 4.$'),
        (DECODER, 'causal probe', {'vocab_size': 7}, {}, 'vocab_size=7 is too small .*recall.* 8 '),
        (ENCODER, 'text', {'vocab_size': 256}, {}, 'vocab_size=256 is too small .* at least 257'),
        (DECODER, 'text', {'vocab_size': 20}, {'tokenizer': 'characters'}, 'vocab_size=20 is too'),
        (DECODER, 'text', {}, {'tokenizer': 'bpe', 'tokenizer_size': 5000}, 'tokenizer_size=5000'),
        (DECODER, 'causal probe', {}, {'name': 'recal(pairs=2)'}, 'recal'),
        (DECODER, 'causal probe', {}, {'lowercase': True}, 'data.lowercase=True has no effect'),
        (ENCODER, 'labelling probe', {}, {'path': 'x.txt'}, "data.path='x.txt' has no effect"),
        (DECODER, 'causal probe', {}, {'tokenizer': 'bpe'}, "leave it 'bytes'"),
        (DECODER, 'text', {}, {'name': 'txet'}, "'txet' is not a known dataset.*'text'"),
        (BOTH, 'parallel', {}, {'languages': 'en-fr'}, 'train.fr.* is missing'),
        (
            BOTH,
            'parallel',
            {'source_context': 10},
            {},
            '40 of 40 .* longer than model.source_context=10',
        ),
        (
            BOTH,
            'parallel',
            {'source_context': 10},
            {'drop_long': True},
            "split 'train' .* no sentence pair",
        ),
        (DECODER, 'text', {'context': 300}, {}, "context=300 is too long for split 'valid"),
        (ENCODER, 'text', {'context': 300}, {}, "context=300 is too long for split 'valid"),
    ],
    ids=str,
)
def test_a_setting_that_does_not_fit_the_data_is_one_sentence(
    config_of, kind, what, model, data, said
):
    refused(config_of(kind, what, model=model, data=data), said)


def test_both_sides_of_a_translation_share_a_vocabulary_of_the_training_split(config_of):
    config = config_of('encoder_decoder', 'parallel', data={'tokenizer': 'characters'})
    tokenizer = tokenizer_of(config.data)
    for text in ('läuft', 'dogs'):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    pairs = load(config.data)
    assert isinstance(pairs, PairDataset)
    assert pairs.source.tokenizer.vocab_size == pairs.target.tokenizer.vocab_size
    sources, targets = pairs.sentences('test')
    decode = pairs.source.tokenizer.decode
    assert [decode(ids) for ids in sources] == LINES['en'][32:]
    assert [decode(ids) for ids in targets] == LINES['de'][32:]
    # The other way round it is the same text, and another dataset.
    other = load(dataclasses.replace(config.data, languages='de-en'))
    assert [decode(ids) for ids in other.sentences('test')[0]] == LINES['de'][32:]
    assert other.identity() != pairs.identity()


def test_text_is_lowered_where_asked(config_of):
    config = config_of('encoder_decoder', 'parallel', data={'lowercase': True})
    pairs = load(config.data)
    found = pairs.source.tokenizer.decode(pairs.sentences('train')[1][0])
    assert found == LINES['de'][0].lower() != LINES['de'][0]


def test_settings_reach_the_rows(config_of):
    shifted = rows_of(config_of('decoder', 'text', data={'shift_windows': True}))
    assert shifted.shift and shifted.count('train') < rows_of(config_of('decoder', 'text')).count(
        'train'
    )
    masked = rows_of(config_of('encoder', 'text', data={'mask_rate': 0.5}))
    batch = masked.read('train', np.arange(3), np.zeros((3, 2), np.uint64))
    assert batch['loss_weights_BT'].sum() == 3 * 20
    assert isinstance(load(config_of('decoder', 'text').data), TokenDataset)


def test_long_pairs_are_left_out_where_asked(config_of, files):
    for language in LINES:
        with (files / f'train.{language}').open('a') as file:
            file.write('very ' * 20 + 'long\n')
    refused(config_of('encoder_decoder', 'parallel'), '1 of 41 sentence pairs are longer')
    rows = rows_of(config_of('encoder_decoder', 'parallel', data={'drop_long': True}))
    assert rows.identity()['dropped_pairs'] == {'train': 1, 'validation': 0, 'test': 0}

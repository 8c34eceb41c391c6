"""Every kind of model with every kind of data: the right rows, or one sentence."""

import dataclasses
import itertools

import numpy as np
import pytest

from qkattn.config import Config, DataConfig, ModelConfig
from qkattn.data.load import load
from qkattn.data.parallel import PairDataset
from qkattn.data.tasks.language import LanguageRows, MaskedRows
from qkattn.data.tasks.probe_tasks import CausalProbeRows, LabellingProbeRows
from qkattn.data.tasks.task_registry import TASKS, rows_of, task_of
from qkattn.data.tasks.translation import TranslationRows
from qkattn.data.tokens import TokenDataset
from tests.data.datasets import read_rows
from tests.data.refusals import refused

LINES = {
    'en': [f'the {n} dog{"s" * (n > 1)} run home' for n in range(40)],
    'de': [f'der {n} Hund läuft nach Hause' for n in range(40)],
}
SPLITS = {'train': slice(0, 24), 'validation': slice(24, 32), 'test': slice(32, 40)}
DECODER, ENCODER, BOTH = 'decoder', 'encoder', 'encoder_decoder'
NEEDS = {DECODER: 'a causal probe', ENCODER: 'a labelling probe', BOTH: 'a translation set'}
FORMS = {
    'text': 'text in one language',
    'parallel': 'a translation set',
    'causal': 'a causal probe',
    'labelling': 'a labelling probe',
}
ROWS = {
    (DECODER, 'text'): LanguageRows,
    (DECODER, 'causal'): CausalProbeRows,
    (ENCODER, 'text'): MaskedRows,
    (ENCODER, 'labelling'): LabellingProbeRows,
    (BOTH, 'parallel'): TranslationRows,
}
LENGTHS = {'text': 40, 'parallel': 40, 'causal': 7, 'labelling': 4}


@pytest.fixture
def config_of(tmp_path):
    """config_of('encoder', 'text', **fields): own files and caches in two directories."""
    path = tmp_path / 'files'
    path.mkdir()
    for split, part in SPLITS.items():
        for language, lines in LINES.items():
            text = ''.join(f'{line}\n' for line in lines[part])
            (path / f'{split}.{language}').write_text(text, encoding='utf-8')
        (path / f'{split}.txt').write_text('\n'.join(LINES['en'][part]), encoding='utf-8')
    own = {
        'text': {'name': 'text', 'path': str(path)},
        'parallel': {'name': 'parallel', 'path': str(path), 'languages': 'en-de'},
        'causal': {'name': 'recall(pairs=2, keys=4, values=4)'},
        'labelling': {'name': 'successor(keys=4, payloads=2)'},
    }

    def make(kind: str, what: str, **fields) -> Config:
        model = {'kind': kind, 'context': LENGTHS[what], 'vocab_size': 300}
        data = own[what] | {'data_dir': str(tmp_path / 'cache')}
        for field, value in fields.items():
            (model if hasattr(ModelConfig, field) else data)[field] = value
        return Config(model=ModelConfig(**model), data=DataConfig(**data))

    return make


@pytest.mark.parametrize(('kind', 'what'), [*itertools.product(NEEDS, FORMS)])
def test_the_kind_of_model_says_what_the_rows_are(config_of, kind, what):
    config = config_of(kind, what, **({'source_context': 60} if kind == BOTH else {}))
    if (kind, what) not in ROWS:
        needs = f".*model.kind='{kind}' needs .*{NEEDS[kind]}"
        with refused(f"^data.name='{config.data.name[:5]}.*' is {FORMS[what]}, {needs}"):
            rows_of(config)
        return
    rows = rows_of(config)
    assert type(rows) is ROWS[kind, what] is task_of(config)
    assert type(rows) in TASKS.values()
    assert rows.splits == tuple(SPLITS)
    batch = read_rows(rows, 'validation', [0, 0])
    lengths = dict.fromkeys(('tokens_BT', 'targets_BT', 'loss_weights_BT'), LENGTHS[what])
    if kind == BOTH:
        lengths |= {'segments_BT': 40, 'source_BS': 60, 'source_segments_BS': 60}
    assert {name: array.shape[1] for name, array in batch.items()} == lengths
    stated = rows.array_shapes(config.model)
    assert {name: (a.shape[1], a.dtype) for name, a in batch.items()} == stated
    assert batch['loss_weights_BT'].any()


@pytest.mark.parametrize(
    ('kind', 'what', 'fields', 'says'),
    [
        (DECODER, 'causal', {'context': 8}, 'model.context=8 must equal .*, 7.$'),
        (ENCODER, 'labelling', {'context': 3}, 'model.context=3 must equal .*, 4.$'),
        (DECODER, 'causal', {'vocab_size': 7}, 'vocab_size=7 is too small .*recall.* 8 '),
        (ENCODER, 'text', {'vocab_size': 256}, 'vocab_size=256 is too small .* at least 257'),
        (DECODER, 'text', {'tokenizer': 'bpe', 'tokenizer_size': 5000}, 'tokenizer_size=5000'),
        (DECODER, 'causal', {'lowercase': True}, 'data.lowercase=True has no effect'),
        (ENCODER, 'labelling', {'path': 'x.txt'}, "data.path='x.txt' has no effect"),
        (DECODER, 'causal', {'tokenizer': 'bpe'}, "leave it 'bytes'"),
        (BOTH, 'parallel', {'source_context': 10, 'drop_long': True}, "'train' .* no sentence"),
        (DECODER, 'text', {'context': 300}, "context=300 is too long for split 'valid"),
        (ENCODER, 'text', {'context': 300}, "context=300 is too long for split 'valid"),
    ],
    ids=str,
)
def test_a_setting_that_does_not_fit_the_data_is_one_sentence(config_of, kind, what, fields, says):
    with refused(says):
        rows_of(config_of(kind, what, **fields))


def test_both_sides_of_a_translation_share_a_vocabulary_of_the_training_split(config_of):
    data = config_of(BOTH, 'parallel', tokenizer='characters').data
    pairs = load(data)
    assert isinstance(pairs, PairDataset)
    assert pairs.source.tokenizer.vocab_size == pairs.target.tokenizer.vocab_size
    decode = pairs.source.tokenizer.decode
    for language, sentences in zip(('en', 'de'), pairs.sentences('test'), strict=True):
        assert [decode(ids) for ids in sentences] == LINES[language][32:]
    # The other way round it is the same text, and another dataset.
    other = load(dataclasses.replace(data, languages='de-en'))
    assert [decode(ids) for ids in other.sentences('test')[0]] == LINES['de'][32:]
    assert other.identity() != pairs.identity()


def test_settings_reach_the_rows(config_of):
    text = config_of(DECODER, 'text').data
    assert isinstance(load(text), TokenDataset)
    assert load(dataclasses.replace(text, lowercase=True)).version.endswith('-lower')
    assert rows_of(config_of(DECODER, 'text', shift_windows=True)).shift
    masked = rows_of(config_of(ENCODER, 'text', mask_rate=0.5))
    assert read_rows(masked, 'train', np.arange(3))['loss_weights_BT'].sum() == 3 * 20

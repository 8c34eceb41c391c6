"""Small runs of every task."""

import functools

import pytest

from qkattn.config import Config
from qkattn.train import program
from tests.runs import SMALL

NUMBERS = ['one', 'two', 'three', 'four', 'five', 'six']
ANIMALS = ['ox', 'cat', 'hen', 'dog', 'rat']
# 30 pairs such as ('two cat', 'cat und two').
PAIRS = [(f'{a} {b}', f'{b} und {a}') for a in NUMBERS for b in ANIMALS]


@pytest.fixture
def evaluation_only(monkeypatch):
    """Makes the training step do nothing, because compiling a real one takes time."""

    def keep_state(state, hyper, batch):
        return state, {}

    monkeypatch.setattr(program, 'train_steps', lambda *_: keep_state)


@pytest.fixture(scope='session')
def small(tiny):
    """A function that makes a config of two trials, quick to compile; see `tiny`."""
    return functools.partial(tiny, model=SMALL)


@pytest.fixture(scope='session')
def pairs_files(tmp_path_factory):
    """A directory with PAIRS in files such as train.en and validation.de.

    The first 24 of the 30 pairs are for training, and 6 for validation.
    """
    directory = tmp_path_factory.mktemp('pairs')
    for split, pairs in (('train', PAIRS[:24]), ('validation', PAIRS[24:])):
        english = ''.join(f'{source}\n' for source, _ in pairs)
        german = ''.join(f'{target}\n' for _, target in pairs)
        (directory / f'{split}.en').write_text(english)
        (directory / f'{split}.de').write_text(german)
    return directory


@pytest.fixture(scope='session')
def task(tiny, pairs_files, tmp_path_factory):
    """A function that makes a config of a task, as in task('masked', train={...}).

    The names of tasks, and what a model predicts:

    - 'language' and 'separate documents': the next token of a text
    - 'masked': hidden tokens of a text
    - 'translation': the German sentence of a pair in `pairs_files`
    - 'causal probe' and 'labelling probe': artificial tasks without a text

    By default, a run has 8 steps and two trials of a model with one layer of width 16. Translations
    are searched with a beam of 2.
    """
    translator = {'kind': 'encoder_decoder', 'context': 32, 'source_context': 24}
    pairs = {
        'name': 'parallel',
        'path': str(pairs_files),
        'languages': 'en-de',
        'data_dir': str(tmp_path_factory.getbasetemp() / 'task-data'),
    }
    recall = 'recall(pairs=2, keys=4, values=4)'
    successor = 'successor(keys=4, payloads=2)'
    models = {
        'language': {},
        'separate documents': {},
        'masked': {'kind': 'encoder', 'vocab_size': 257},
        'translation': translator,
        'causal probe': {'context': 7},
        'labelling probe': {'kind': 'encoder', 'context': 4},
    }
    data = {
        'language': {},
        'separate documents': {'cross_documents': False},
        'masked': {},
        'translation': pairs,
        'causal probe': {'name': recall},
        'labelling probe': {'name': successor},
    }

    def make(name: str, **sections) -> Config:
        settings = {
            'model': SMALL | {'scan_unroll': 1} | models[name],
            'data': data[name],
            'train': {'num_steps': 8},
            'decode': {'beam': 2},
        }
        # Fields in `sections` replace the fields above.
        for section, fields in sections.items():
            settings[section] = settings.get(section, {}) | fields
        return tiny(**settings)

    return make

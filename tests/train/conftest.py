"""Small runs of every task."""

import functools

import pytest

from qkattn.config import Config
from qkattn.train import program
from tests.runs import SMALL

NUMBERS = ['one', 'two', 'three', 'four', 'five', 'six']
ANIMALS = ['ox', 'cat', 'hen', 'dog', 'rat']
PAIRS = [(f'{a} {b}', f'{b} und {a}') for a in NUMBERS for b in ANIMALS]


@pytest.fixture
def evaluation_only(monkeypatch):
    """Programs whose training step does nothing, so that only the evaluation is compiled."""
    monkeypatch.setattr(program, 'train_steps', lambda *_: lambda state, hyper, batch: (state, {}))


@pytest.fixture(scope='session')
def small(tiny):
    """A run of two trials, quick to compile."""
    return functools.partial(tiny, model=SMALL)


@pytest.fixture(scope='session')
def pairs_files(tmp_path_factory):
    """A directory of sentence pairs."""
    path = tmp_path_factory.mktemp('pairs')
    for split, pairs in (('train', PAIRS[:24]), ('validation', PAIRS[24:])):
        for side, language in enumerate(('en', 'de')):
            text = ''.join(f'{pair[side]}\n' for pair in pairs)
            (path / f'{split}.{language}').write_text(text)
    return path


@pytest.fixture(scope='session')
def task(tiny, pairs_files, tmp_path_factory):
    """task('masked', model={...}): a tiny run of two trials."""
    cache = str(tmp_path_factory.getbasetemp() / 'task-data')
    pairs = {'name': 'parallel', 'path': str(pairs_files), 'languages': 'en-de', 'data_dir': cache}
    recall = 'recall(pairs=2, keys=4, values=4)'
    successor = 'successor(keys=4, payloads=2)'
    settings = {
        'language': ({}, {}),
        'separate documents': ({}, {'cross_documents': False}),
        'masked': ({'kind': 'encoder', 'vocab_size': 257}, {}),
        'translation': ({'kind': 'encoder_decoder', 'context': 32, 'source_context': 24}, pairs),
        'causal probe': ({'context': 7}, {'name': recall}),
        'labelling probe': ({'kind': 'encoder', 'context': 4}, {'name': successor}),
    }

    def make(name: str, **sections) -> Config:
        model, data = settings[name]
        model = SMALL | {'scan_unroll': 1} | model
        given = {'model': model, 'data': data, 'train': {'num_steps': 8}, 'decode': {'beam': 2}}
        merged = {key: fields | sections.pop(key, {}) for key, fields in given.items()}
        return tiny(**merged, **sections)

    return make

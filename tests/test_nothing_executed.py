"""Whatever is loaded is data: a pickle or a module in the place of any file does not run."""

import contextlib
import dataclasses
import json
import pickle
import re
import shutil
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

from qkattn.config import DataConfig, ModelConfig
from qkattn.convert.published import load_gpt2, load_nanogpt
from qkattn.data.load import load, prepare
from qkattn.errors import CheckpointError, ConfigError, SpecError
from qkattn.model.cost import abstract_params
from qkattn.report import show_run_report, tables
from qkattn.train import exported
from qkattn.train.checkpoint import Checkpoints
from qkattn.verdict import find, load_study
from tests.data.datasets import write_texts
from tests.studies import trial_record, write_study
from tests.test_architecture import FILES, ROOT

MODEL = ModelConfig(d_model=16, num_layers=1, num_heads=2, context=8)


class _Payload:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), 'w')


@pytest.fixture
def marker(tmp_path):
    """A file that a payload makes when it runs; it must not be there at the end."""
    path = tmp_path / 'marker'
    pickle.loads(pickle.dumps(_Payload(path))).close()
    assert path.exists()
    path.unlink()
    yield path
    assert not path.exists()


@pytest.fixture
def payload(marker) -> bytes:
    return pickle.dumps(_Payload(marker))


# Each writes files below a directory, and returns what reads such a directory.


def checkpoint(path):
    state = {'step': jax.numpy.int32(4), 'w': jax.numpy.arange(64.0)}
    target = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), state)
    with contextlib.closing(Checkpoints(path)) as saved:
        saved.save(4, state, {'data': {}, 'train_seconds': 1.0}, 2.0)

    def restore(directory):
        with contextlib.closing(Checkpoints(directory)) as opened:
            np.testing.assert_array_equal(opened.restore(target)[0]['w'], state['w'])

    return restore


def exported_parameters(path):
    shapes = abstract_params(MODEL)
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), shapes)
    exported.save(path, MODEL, params, origin={})
    return exported.load


def study(path):
    write_study(path, [trial_record('qk/vo'), trial_record('b/vo')])
    return lambda directory: find(load_study(directory))


def prepared_data(path, **fields):
    texts = write_texts(path.with_name('texts'))
    config = DataConfig(name='text', path=str(texts), data_dir=str(path), **fields)
    load(config)

    def read(directory):
        dataset = load(dataclasses.replace(config, data_dir=str(directory)))
        dataset.windows('train', np.arange(2), 8)

    return read


def prepared_subwords(path):
    return prepared_data(path, tokenizer='bpe', tokenizer_size=300)


def shards(path):
    texts = write_texts(path.with_name('texts'))
    prepare(DataConfig(name='text', path=str(texts)), str(path), shard_tokens=2000)
    return lambda directory: load(DataConfig(name='shards', path=str(directory)))


REFUSED = {
    checkpoint: {'4/record/metadata', '4/state/_METADATA'},
    exported_parameters: {exported.PARAMETERS, exported.ABOUT},
    study: {'study.json'},
    prepared_data: set(),
    prepared_subwords: set(),
    shards: {'index.json'},
}


@pytest.mark.parametrize('write', REFUSED)
def test_a_pickle_in_the_place_of_any_file_is_not_executed(tmp_path, payload, write):
    path, refused = tmp_path / 'd', set()
    read = write(path)
    names = sorted(file.relative_to(path) for file in path.rglob('*') if file.is_file())
    for number, name in enumerate(names):
        copy = shutil.copytree(path, tmp_path / f'd-{number}')
        (copy / name).write_bytes(payload)
        try:
            read(copy)
        except (ConfigError, CheckpointError) as error:
            assert '\n' not in str(error)
            refused.add(str(name))
        shutil.rmtree(copy)
    assert names and REFUSED[write] <= refused


def test_no_file_of_a_run_is_executed(tmp_path, payload):
    path = tmp_path / 'run'
    path.mkdir()
    for name in ('config.json', 'provenance.json', 'result.json', 'metrics.jsonl'):
        (path / name).write_bytes(payload)
    with pytest.raises(ConfigError, match='config.json is damaged'):
        show_run_report(path)
    with pytest.raises(ConfigError):
        exported.load(path)


def test_a_module_beside_a_run_is_not_imported(tmp_path, marker):
    """Variants from outside the package come from the path of the interpreter alone."""
    path = tmp_path / 'run'
    path.mkdir()
    (path / 'evil.py').write_text(f'open({str(marker)!r}, "w")')
    config = {'model': {'score': 'evil:Score'}}
    (path / 'config.json').write_text(json.dumps({'hash': 'x', 'config': config}))
    (path / 'checkpoints').mkdir()
    for read in (show_run_report, exported.load):
        with pytest.raises((ConfigError, SpecError)):
            read(path)
    assert 'evil' not in sys.modules


@pytest.mark.parametrize(
    ('name', 'read'), [('model.safetensors', load_gpt2), ('ckpt.safetensors', load_nanogpt)]
)
def test_no_published_weights_are_executed(tmp_path, payload, name, read):
    sound = safetensors.numpy.save({'wte.weight': np.ones((2, 2), 'f4')})
    for weights, config in ((payload, b'{}'), (sound, payload)):
        (tmp_path / name).write_bytes(weights)
        (tmp_path / 'config.json').write_bytes(config)
        with pytest.raises(ConfigError):
            read(tmp_path / name)


def test_torch_is_told_to_load_tensors_only(tmp_path, monkeypatch, payload):
    asked = []

    def torch_load(file, **options):
        asked.append(options)
        raise pickle.UnpicklingError('Weights only load failed')

    monkeypatch.setitem(sys.modules, 'torch', types.SimpleNamespace(load=torch_load))
    (tmp_path / 'ckpt.pt').write_bytes(payload)
    with pytest.raises(ConfigError, match='cannot be read as a torch checkpoint: Weights only'):
        load_nanogpt(tmp_path / 'ckpt.pt')
    assert [options['weights_only'] for options in asked] == [True]


def test_torch_does_not_execute_a_pickle(tmp_path, payload, marker):
    torch = pytest.importorskip('torch', reason='torch is not installed')
    (tmp_path / 'raw.pt').write_bytes(payload)
    torch.save({'model': _Payload(marker)}, tmp_path / 'saved.pt')
    for name in ('raw.pt', 'saved.pt'):
        with pytest.raises(ConfigError, match='cannot be read as a torch checkpoint'):
            load_nanogpt(tmp_path / name)


# Calls that execute what they are given, and options with which a loader does.
EXECUTING = re.compile(
    r'(?<![\w.])(eval|exec|os\.system|os\.popen|yaml\.load|marshal\.loads?|dill\.loads?'
    r'|pickle\.loads?|joblib\.load)\('
    r'|\b(allow_pickle=True|weights_only=False|shell=True|trust_remote_code=True)'
)


def test_the_source_calls_nothing_that_executes_data():
    for path in [*FILES, *ROOT.glob('launch/*.py')]:
        assert not EXECUTING.search(path.read_text()), path
    for bad in ('pickle.load(f)', 'x = eval(y)', 'np.load(p, allow_pickle=True)'):
        assert EXECUTING.search(bad)
    for good in ('re.compile(p)', 'jax.jit(f).lower(x).compile()', 'literal_eval(x)'):
        assert not EXECUTING.search(good)


def test_a_terminal_gets_no_control_characters(study_dir):
    hostile = 'evil\x1b]0;owned\x07\x1b[2J\x9b31m'
    write_study(
        study_dir, [trial_record('qk/vo'), trial_record(hostile)], name=hostile, question=hostile
    )
    study = load_study(study_dir)
    text = tables.terminal_text(study, find(study), Path('report.html'), 100)
    assert 'evil' in text
    assert not {'\x1b', '\x07', '\x9b'} & set(text)

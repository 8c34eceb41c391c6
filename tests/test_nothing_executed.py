"""Whatever is loaded is data: a pickle or a module in the place of any file does not run."""

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
from qkattn.data.load import load
from qkattn.errors import CheckpointError, ConfigError, SpecError
from qkattn.model.cost import abstract_params
from qkattn.report import show_run_report, terminal
from qkattn.train import exported
from qkattn.train.checkpoint import Checkpoints
from qkattn.verdict import find, load_study
from tests.data.shards.examples import write_bin, write_texts
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


def replaced(directory: Path, payload: bytes, read) -> list:
    """(name, what `read` raised, None for nothing) for every file with the payload in its place."""
    names = sorted(p.relative_to(directory) for p in directory.rglob('*') if p.is_file())
    assert names
    refused = []
    for number, name in enumerate(names):
        copy = directory.with_name(f'{directory.name}-{number}')
        shutil.copytree(directory, copy)
        (copy / name).write_bytes(payload)
        try:
            read(copy)
            refused.append((str(name), None))
        except (ConfigError, CheckpointError) as error:
            assert '\n' not in str(error)
            refused.append((str(name), str(error)))
        shutil.rmtree(copy)
    return refused


def test_no_file_of_a_checkpoint_is_executed(tmp_path, payload):
    state = {'step': jax.numpy.int32(4), 'w': jax.numpy.arange(64.0)}
    saved = Checkpoints(tmp_path / 'c')
    saved.save(4, state, {'data': {}, 'train_seconds': 1.0}, 2.0)
    saved.close()
    target = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), state)

    def restore(directory):
        opened = Checkpoints(directory)
        try:
            np.testing.assert_array_equal(opened.restore(target)[0]['w'], state['w'])
        finally:
            opened.close()

    refused = dict(replaced(tmp_path / 'c', payload, restore))
    assert refused['4/record/metadata'] and refused['4/state/_METADATA']


def test_no_file_of_exported_parameters_is_executed(tmp_path, payload):
    shapes = abstract_params(MODEL)
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), shapes)
    exported.save(tmp_path / 'e', MODEL, params, origin={})
    refused = replaced(tmp_path / 'e', payload, exported.load)
    assert [name for name, error in refused if error] == [exported.PARAMETERS, exported.ABOUT]


def test_no_file_of_a_study_is_executed(study_dir, payload):
    write_study(study_dir, [trial_record('qk/vo'), trial_record('b/vo')])

    def report(directory):
        study = load_study(directory)
        find(study)

    assert dict(replaced(study_dir, payload, report))['study.json']


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


@pytest.mark.parametrize('dataset', [{}, {'tokenizer': 'bpe', 'tokenizer_size': 300}], ids=str)
def test_no_file_of_prepared_data_is_executed(tmp_path, payload, dataset):
    texts = str(write_texts(tmp_path / 'texts'))
    config = DataConfig(name='text', path=texts, data_dir=str(tmp_path / 'data'), **dataset)
    load(config)

    def read(directory):
        dataset = load(dataclasses.replace(config, data_dir=str(directory)))
        dataset.windows('train', np.arange(2), 8)

    replaced(tmp_path / 'data', payload, read)


def test_no_file_of_shards_is_executed(tmp_path, payload, marker):
    """nanoGPT puts a pickle of its vocabulary, meta.pkl, beside its shards."""
    shards = tmp_path / 'shards'
    for split in ('train', 'val'):
        write_bin(shards / f'{split}.bin', range(100), None)
    (shards / 'meta.pkl').write_bytes(payload)
    read = dict(replaced(shards, payload, lambda d: load(DataConfig(name='shards', path=str(d)))))
    assert read['meta.pkl'] is None


@pytest.mark.parametrize(
    ('name', 'load_it'), [('model.safetensors', load_gpt2), ('ckpt.safetensors', load_nanogpt)]
)
def test_no_published_weights_are_executed(tmp_path, payload, name, load_it):
    (tmp_path / name).write_bytes(payload)
    with pytest.raises(ConfigError):
        load_it(tmp_path / name)
    directory = tmp_path / 'published'
    directory.mkdir()
    safetensors.numpy.save_file({'wte.weight': np.ones((2, 2), 'f4')}, directory / name)
    (directory / 'config.json').write_text('{}')
    assert all(error for _, error in replaced(directory, payload, lambda d: load_it(d / name)))


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
    text = terminal.terminal_text(study, find(study), Path('report.html'), 100)
    assert 'evil' in text
    assert not {'\x1b', '\x07', '\x9b'} & set(text)

"""A run that is stopped, killed or damaged ends exactly like one that was never touched."""

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from qkattn import data
from qkattn.config import MeshConfig, to_json
from qkattn.errors import CheckpointError, ConfigError
from qkattn.run.records import read_json, read_metrics
from qkattn.run.signals import EXIT_REQUEUE
from qkattn.train import checkpoint, program, train
from qkattn.train.checkpoint import Checkpoints

SCRIPT = """
import json, sys
from qkattn.config import Config, from_json
from qkattn.train import loop
try:
    loop.train(from_json(Config, json.loads(sys.argv[1])), sys.argv[2])
except loop.Stopped:
    sys.exit(75)
"""


def start(config, workdir) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, '-c', SCRIPT, json.dumps(to_json(config)), str(workdir)],
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome(workdir: Path) -> dict:
    """Everything of a finished run that must not depend on interruptions."""
    records = read_metrics(workdir / 'metrics.jsonl')
    results = read_json(workdir / 'result.json')
    kept = ('trial', 'status', 'val_loss', 'test_loss', 'num_tokens')
    return {'metrics': records, 'results': [{k: r[k] for k in kept} for r in results]}


def final_state(config, workdir: Path) -> list[np.ndarray]:
    built = program.build(config, 'map')
    checkpoints = Checkpoints(workdir / 'checkpoints')
    state, _ = checkpoints.restore(built.abstract_state)
    checkpoints.close()
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


@pytest.fixture(scope='module')
def straight(tmp_path_factory, data_dir):
    """The uninterrupted run, in a process of its own like those it is compared with."""
    holder = {}

    def run(config) -> Path:
        if 'path' not in holder:
            holder['path'] = tmp_path_factory.mktemp('straight') / 'run'
            process = start(config, holder['path'])
            assert process.wait(300) == 0, process.stderr.read()
        return holder['path']

    return run


def config_of(tiny):
    return tiny(model={'dropout': 0.1}, train={'num_steps': 40, 'checkpoint_every': 4})


def test_a_run_killed_at_random_ends_bitwise_equal(tiny, straight, tmp_path):
    config = config_of(tiny)
    want = straight(config)
    metrics = tmp_path / 'run' / 'metrics.jsonl'
    seed = int.from_bytes(os.urandom(4))
    print(f'kill times drawn with seed {seed}')
    rng = random.Random(seed)
    for _ in range(3):
        process = start(config, tmp_path / 'run')
        target = rng.randrange(1, 36)
        while process.poll() is None:
            lines = metrics.read_bytes().splitlines() if metrics.exists() else []
            steps = [json.loads(line)['step'] for line in lines[:-1]]
            if steps and steps[-1] >= target:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.002)
        process.wait()
        process.stderr.close()
    process = start(config, tmp_path / 'run')
    assert process.wait(300) == 0, process.stderr.read()
    assert outcome(tmp_path / 'run') == outcome(want)
    for got, leaf in zip(
        final_state(config, tmp_path / 'run'), final_state(config, want), strict=True
    ):
        np.testing.assert_array_equal(got, leaf)
    steps = [r['step'] for r in outcome(want)['metrics'] if r['kind'] == 'train']
    assert steps == list(range(1, 41))


def test_sigterm_saves_and_asks_to_be_started_again(tiny, straight, tmp_path):
    config = config_of(tiny)
    process = start(config, tmp_path / 'run')
    metrics = tmp_path / 'run' / 'metrics.jsonl'
    while not metrics.exists() or not metrics.read_bytes():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == EXIT_REQUEUE, process.stderr.read()
    saved = max(int(p.name) for p in (tmp_path / 'run' / 'checkpoints').iterdir())
    assert read_metrics(metrics)[-1]['step'] == saved < 40
    process = start(config, tmp_path / 'run')
    assert process.wait(300) == 0, process.stderr.read()
    assert outcome(tmp_path / 'run') == outcome(straight(config))


def test_a_finished_run_returns_its_results(tiny, tmp_path):
    config = tiny()
    first = train(config, tmp_path)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / 'checkpoints').rglob('*')}
    assert train(config, tmp_path) == first
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / 'checkpoints').rglob('*')}


def test_a_damaged_checkpoint_is_named_and_the_one_before_used(tiny, tmp_path, caplog):
    config = tiny()
    want = train(config, tmp_path / 'a')
    train(config, tmp_path / 'b')
    (tmp_path / 'b' / 'result.json').unlink()
    damage(tmp_path / 'b' / 'checkpoints' / '12')
    got = train(config, tmp_path / 'b')
    assert [r['val_loss'] for r in got] == [r['val_loss'] for r in want]
    assert 'checkpoint 12 is damaged' in caplog.text
    metrics = [
        [{k: v for k, v in r.items()} for r in read_metrics(tmp_path / d / 'metrics.jsonl')]
        for d in 'ab'
    ]
    assert metrics[0] == metrics[1]


def test_nothing_but_damaged_checkpoints_is_an_error(tiny, tmp_path):
    config = tiny()
    train(config, tmp_path)
    (tmp_path / 'result.json').unlink()
    for step in (tmp_path / 'checkpoints').iterdir():
        damage(step)
    with pytest.raises(CheckpointError, match='every checkpoint in .* is damaged'):
        train(config, tmp_path)


def damage(step: Path) -> None:
    """Flips one bit in the middle of the largest array file."""
    files = [p for p in (step / 'state').rglob('*') if p.is_file()]
    largest = max(files, key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def test_a_flipped_bit_in_the_state_is_seen_by_the_checksums(tiny):
    state = {'w': jax.numpy.arange(8.0)}
    flipped = {'w': state['w'].at[3].set(3.0000002)}
    assert checkpoint.checksums(state) != checkpoint.checksums(flipped)


def test_another_configuration_is_refused_with_the_difference(tiny, tmp_path):
    train(tiny(), tmp_path)
    with pytest.raises(ConfigError, match=r'train.num_steps: 12 -> 16'):
        train(tiny(train={'num_steps': 16}), tmp_path)


def test_other_data_is_refused(tiny, tmp_path, monkeypatch):
    config = tiny()
    train(config, tmp_path)
    (tmp_path / 'result.json').unlink()
    real = data.tokens.TokenDataset.identity
    monkeypatch.setattr(
        data.tokens.TokenDataset, 'identity', lambda self: {**real(self), 'version': 'other'}
    )
    with pytest.raises(CheckpointError, match='was trained on .* but the dataset is'):
        train(config, tmp_path)


def test_the_newest_two_and_the_best_are_kept(tmp_path):
    state = {'step': jax.numpy.int32(0), 'trials': {'w': jax.numpy.zeros((1, 3))}}
    checkpoints = Checkpoints(tmp_path / 'c')
    for step, loss in ((1, 3.0), (2, 1.0), (3, float('nan')), (4, 2.0), (5, 2.5)):
        checkpoints.save(step, state, {'data': {}, 'train_seconds': 0.0}, loss)
    checkpoints.close()
    assert Checkpoints(tmp_path / 'c').steps() == [2, 4, 5]


def test_a_run_restores_onto_another_mesh(tiny, tmp_path):
    """The config hash leaves the mesh out; losses go on as they would have, to rounding."""
    config = tiny()
    want = train(config, tmp_path / 'a')
    shutil.rmtree(tmp_path / 'a' / 'checkpoints' / '12')
    (tmp_path / 'a' / 'result.json').unlink()
    got = train(dataclasses.replace(config, mesh=MeshConfig(data=2, tensor=2)), tmp_path / 'a')
    for g, w in zip(got, want, strict=True):
        assert abs(g['val_loss'] - w['val_loss']) < 1e-4

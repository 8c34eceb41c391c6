"""A run as one job of several processes: the run of one process with as many devices."""

import dataclasses
import json

import numpy as np
import pytest

from qkattn.config import MeshConfig, to_json
from qkattn.run.records import read_json, read_metrics
from qkattn.train import train
from tests.compiled_programs import FLAGS
from tests.distributed.jobs import ended, start_job

# Trains a run per line of a file; a rank that has lines of its own takes those. The results go to a
# file, since Gloo prints.
JOB = """
    import json, sys
    from pathlib import Path
    from qkattn.distributed import bootstrap
    rank = bootstrap.start().process_id
    from qkattn.config import Config, from_json
    from qkattn.errors import ConfigError
    from qkattn.train import train

    job = Path(sys.argv[1])
    own = job / f'runs{rank}.jsonl'
    got = []
    for line in (own if own.exists() else job / 'runs.jsonl').read_text().splitlines():
        config, workdir = json.loads(line)
        try:
            got.append(train(from_json(Config, config), workdir))
        except ConfigError as error:
            got.append(str(error))
    (job / f'got{rank}.json').write_text(json.dumps(got))
"""


def start(directory, runs, count=2, devices=4, source=JOB, **by_rank):
    """Starts a job that trains `runs`, pairs of config and run directory."""
    directory.mkdir(exist_ok=True)
    for name, pairs in {'runs': runs, **by_rank}.items():
        lines = [json.dumps([to_json(config), str(path)]) + '\n' for config, path in pairs]
        (directory / f'{name}.jsonl').write_text(''.join(lines))
    flags = FLAGS.replace('device_count=8', f'device_count={devices}')
    return start_job(source, count, directory, XLA_FLAGS=flags)


def got(directory, job, timeout=300):
    """What `train` returned in each process, or its error, by run; all ranks got the same."""
    for code, _, errors in ended(job, timeout):
        assert code == 0, errors
    first, *others = [json.loads((directory / f'got{r}.json').read_text()) for r in range(len(job))]
    assert all(other == first for other in others)
    return first


@pytest.fixture
def small(tiny):
    """A run of two trials on a mesh, quick to compile."""

    def make(mesh=(), train=(), model=(), **sections):
        config = tiny(
            model={'num_layers': 1, 'd_model': 16, **dict(model)},
            train={'num_steps': 8, 'batch_size': 16, **dict(train)},
            **sections,
        )
        return dataclasses.replace(config, mesh=MeshConfig(**dict(mesh)))

    return make


def results_of(path):
    return read_json(path / 'result.json', [{}])


def assert_same_run(of_job, of_one, tolerance=1e-5):
    """Both have the same records, whose numbers agree to rounding."""
    for mine, other in zip(results_of(of_job), results_of(of_one), strict=True):
        for name in ('val_loss', 'test_loss', 'val_induction_gain', 'val_bleu', 'test_bleu'):
            assert mine.get(name) == pytest.approx(other.get(name), abs=tolerance), name
        for name in ('eval_tokens', 'test_tokens', 'eval_rows', 'status', 'diverged_at'):
            assert mine[name] == other[name]
    records = [read_metrics(path / 'metrics.jsonl') for path in (of_job, of_one)]
    for mine, other in zip(*records, strict=True):
        assert (mine['kind'], mine['step']) == (other['kind'], other['step'])
        for name in ('loss', 'val_loss'):
            assert mine.get(name) == pytest.approx(other.get(name), abs=tolerance)
    mine, other = (json.loads((path / 'documents.json').read_text()) for path in (of_job, of_one))
    for split in mine.keys() & {'validation', 'test'}:
        assert mine[split]['tokens'] == other[split]['tokens']
        np.testing.assert_allclose(mine[split]['nats'], other[split]['nats'], atol=1e-3)


def test_two_processes_are_one_with_all_their_devices(small, tmp_path):
    config = small({'data': 2, 'fsdp': 2, 'tensor': 2})
    idle = dataclasses.replace(config, mesh=MeshConfig(data=4))
    runs = [(config, tmp_path / name) for name in ('two', 'two', 'differs')]
    runs.append((idle, tmp_path / 'idle'))
    other = [*runs[:2], (small(train={'num_steps': 9}), tmp_path / 'differs'), runs[3]]
    job = start(tmp_path / 'job', runs, runs1=other)
    train(config, tmp_path / 'one')
    first, again, differs, refused = got(tmp_path / 'job', job)
    assert_same_run(tmp_path / 'two', tmp_path / 'one')
    assert first == again == results_of(tmp_path / 'two')
    assert 'uses 4 of the 8 devices of 2 processes; it must use all of them' in refused
    assert 'process 1 has other settings than process 0 (' in differs
    assert 'train.num_steps: 8 -> 9' in differs
    assert not (tmp_path / 'idle').exists() and not (tmp_path / 'differs').exists()
    assert sorted(p.name for p in (tmp_path / 'two').iterdir()) == sorted(
        p.name for p in (tmp_path / 'one').iterdir()
    )
    begun = json.loads((tmp_path / 'two/provenance.json').read_text())['starts'][0]
    assert begun['devices'] == {'platform': 'cpu', 'kind': 'cpu', 'count': 8, 'processes': 2}

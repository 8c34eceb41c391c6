"""Checkpoints of a job of several processes: written by all, and refused by all if by one."""

import json

import pytest

from qkattn.train import checksums
from tests.jobs.jobs import ended, start_job
from tests.train.test_checkpoint import rewrite_record, save, save_format_1, state_of

JOB = """
    import json, logging, shutil, sys
    from pathlib import Path

    import jax
    import numpy as np
    from qkattn.config import MeshConfig
    from qkattn.jobs import agreement, bootstrap
    from qkattn.errors import CheckpointError
    from qkattn.train import checksums
    from qkattn.train.checkpoint import Checkpoints
    from tests.train.test_checkpoint import RECORD, placed, state_of

    rank, seen = bootstrap.start().process_id, {}
    own, single, old = map(Path, sys.argv[1:])
    target = placed(state_of(0), MeshConfig(trial=2, fsdp=2))

    def restore(directory, discard=False):
        opened = Checkpoints(directory)
        try:
            state, record = opened.restore(target)
            if discard:
                opened.discard_after(int(state['step']))
        except CheckpointError as error:
            return str(error)
        finally:
            opened.close()
        return [int(state['step']), np.asarray(checksums.sums(state)).tolist()]

    saved = Checkpoints(own)
    for step in (4, 8):
        shardings = jax.tree.map(lambda t: t.sharding, target)
        saved.save(step, jax.device_put(state_of(step), shardings), RECORD, 2.0)
    saved.close()
    seen['own'] = restore(own)
    seen['single'] = restore(single)
    seen['old'] = restore(old)
    # What process 1 wrote of the newest checkpoint, and process 0 does not read.
    def damage():
        shutil.copytree(own, copy)  # tensorstore has cached what it has read
        for path in (copy / '8/state/ocdbt.process_1/d').iterdir():
            path.unlink()

    copy = own.with_name('copy')
    agreement.on_owner(damage)
    logged = []
    logging.getLogger('qkattn.train.checkpoint').addFilter(lambda r: logged.append(r.getMessage()))
    seen['one damaged'] = restore(copy, discard=True)
    seen['logged'] = logged
    agreement.on_owner(lambda: (copy / '4/record/metadata').write_text('{}') and None)
    seen['all damaged'] = restore(copy)
    seen['left'] = sorted(path.name for path in copy.iterdir())
    print(json.dumps(seen))
"""


@pytest.mark.slow
def test_two_processes_restore_the_same_checkpoint_whatever_one_of_them_finds(tmp_path):
    own, single, old = (tmp_path / name for name in ('own', 'single', 'old'))
    save(single, 4)
    save_format_1(old, 4)
    save_format_1(old, 8)
    rewrite_record(old / '8', lambda text: text.replace('"step": ', '"step": 1'))
    flags = '--xla_force_host_platform_device_count=2'
    results = ended(start_job(JOB, 2, own, single, old, XLA_FLAGS=flags))
    assert [code for code, _, _ in results] == [0, 0], results
    seen, other = (json.loads(out.splitlines()[-1]) for _, out, _ in results)
    sums = {step: checksums.sums(state_of(step)).tolist() for step in (4, 8)}
    assert seen['own'] == [8, sums[8]]
    for name in ('single', 'old', 'one damaged'):
        assert seen[name] == [4, sums[4]], name
    line = seen['logged'][0]
    assert line.startswith('checkpoint 8 is damaged (process 1: ')
    assert 'every checkpoint' in seen['all damaged'] and seen['left'] == ['4']
    assert seen == other

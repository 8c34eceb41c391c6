import os

import pytest

from tests.launch.slurm import Cluster, missing


@pytest.fixture(scope='session')
def cluster(tmp_path_factory):
    """A private Slurm of two nodes."""
    if missing():
        pytest.skip(
            f'a private Slurm needs {", ".join(missing())} (Debian: slurmctld slurmd slurm-client)'
        )
    with Cluster(tmp_path_factory.mktemp('slurm') / 'cluster') as started:
        yield started


@pytest.fixture
def refused(tmp_path):
    """refused(start, tool, arguments, words): code 2, one sentence, and `tool` is not called."""

    def check(start, tool, arguments, words):
        called = tmp_path / tool
        called.write_text(f'#!/bin/sh\ntouch {tmp_path}/called\n')
        called.chmod(0o755)
        done = start(*arguments, env={**os.environ, 'PATH': f'{tmp_path}:{os.environ["PATH"]}'})
        assert done.returncode == 2
        assert done.stdout == '' and len(done.stderr.splitlines()) == 1, done.stderr
        assert all(word in done.stderr for word in words.split(' ')), done.stderr
        assert not (tmp_path / 'called').exists()

    return check

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

"""Dry runs from the command line."""

import pytest


def test_a_config_is_described_on_a_pod_without_accelerators(script, tmp_path):
    smaller = ('--config.model.num_layers=1', '--config.train.lifting=map')
    pod = ('--topology=v5e-16', '--config.mesh.data=16')
    done = script('train', '--config=small', '--dry_run', *pod, *smaller)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ['parameters', '237,952', 'of', '3', 'trials', 'each'] in lines
    assert ['parameters', f'{3 * 4 * 237_952:,}', '2.72', 'MiB'] in lines
    assert done.stdout.startswith('v5e-16: 16 v5e TPU chips on 4 hosts (4x4)')
    assert ['HBM', 'per', 'device', f'{2**34:,}', '16.00', 'GiB,'] in [line[:6] for line in lines]
    written = {path.name for path in tmp_path.iterdir()} - {'run.py', 'study.py'}
    assert not written


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (
            ('--dry_run', '--topology=v5p-64', '--config.mesh.data=16'),
            "has 16 devices, but topology 'v5p-64' has 32; valid is, for example, "
            '--config.mesh.data=32 --config.train.batch_size=32',
        ),
        (('--dry_run', '--topology=v5q-64'), 'did you mean v5p?'),
        (('--topology=v5p-64',), '--topology needs --dry_run'),
        # Reading /dev/full has no end.
        (('--dry_run', '--dry_run_log=/dev/full'), '--dry_run_log=/dev/full must be a CSV file'),
        (('--dry_run', '--dry_run_log=absent/x.csv'), 'must be a CSV file, or a name for one in a'),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(script_here, flags, message):
    done = script_here('train', '--config=small', *flags)
    assert done.returncode == 2 and message in done.stderr
    assert len(done.stderr.splitlines()) == 1

"""Names of pods, and the chips of device kinds."""

import pytest

from qkattn.errors import ConfigError
from qkattn.train.pods import CHIPS, chip_of, pod_of


@pytest.mark.parametrize(
    ('name', 'shape', 'devices', 'hosts'),
    [
        ('v5p-64', (2, 4, 4), 32, 8),  # 64 TensorCores, 2 per chip, 4 chips per host
        ('v5p-8192', (16, 16, 16), 4096, 1024),
        ('v4-8', (2, 2, 1), 4, 1),
        ('v5p-4x2x4', (2, 4, 4), 32, 8),
        ('v6e-256', (16, 16), 256, 64),
        ('v5e-8', (2, 4), 8, 1),
        ('v5litepod-16', (4, 4), 16, 4),
        ('tpu7x-128', (4, 4, 4), 128, 16),  # 64 chips of 2 devices
        ('a3-16x8', (16, 8), 128, 16),
        ('A4-2x4', (2, 4), 8, 2),
    ],
)
def test_names_of_pods(name, shape, devices, hosts):
    pod = pod_of(name)
    assert (pod.shape, pod.devices, pod.hosts) == (shape, devices, hosts)


@pytest.mark.parametrize(
    ('name', 'message'),
    [
        ('v5q-64', r"'v5q-64' is unknown, did you mean v5p\?"),
        ('a3-2x8;touch x', r"'a3-2x8;touch x' is unknown, did you mean a3\?"),
        ('cluster', r"'cluster' is unknown; known are .* of v4, v5e, .*, b200$"),
        ('v5p-1' + '0' * 18, r'the closest slice is v5p-12288$'),
        ('v5p-63', r'count TensorCores, 2 per chip; the closest slice is v5p-64$'),
        ('v6e-100', r'count chips; the closest slice is v6e-128$'),
        ('v5p-3x4x4', r'does not exist: .* the closest slice is v5p-64$'),
        ('a3-16', r'must be hosts x GPUs of a host, as in a3-16x8'),
        ('a3-16x9', r'1 to 4,096 hosts of 1, 2, 4 or 8 GPUs'),
    ],
)
def test_an_unknown_pod_is_refused_with_the_closest_one(name, message):
    with pytest.raises(ConfigError, match=message):
        pod_of(name)


@pytest.mark.parametrize(
    ('kind', 'name'),
    [('TPU v5 lite', 'v5e'), ('TPU v5', 'v5p'), ('TPU v6 lite', 'v6e'), ('TPU7x', 'tpu7x')]
    + [('NVIDIA H100 80GB HBM3', 'H100'), ('NVIDIA A100-SXM4-80GB', 'A100 80GB'), ('cpu', None)],
)
def test_the_chip_of_a_device_kind(kind, name):
    chip = chip_of(kind)
    assert (chip and chip.name) == name


def test_every_chip_has_its_source():
    assert all(chip.source.startswith('https://') for chip in CHIPS.values())

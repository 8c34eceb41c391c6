"""Accelerators, and the FLOPs of a training step."""

import dataclasses
from typing import Literal

from qkattn.config import Config
from qkattn.model import cost

# Units of memory, in bytes. Data sheets use GB for GPUs and GiB for TPUs.
GB = 10**9
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """An accelerator."""

    kind: Literal['TPU', 'GPU']
    # Bytes of memory.
    hbm: int
    # Peak rate of dense bfloat16 matrix products, in FLOP/s.
    flops: float
    # The `device_kind` of the chip in JAX. Variants with another peak rate, such as the H100 PCIe,
    # are left out.
    device_kinds: tuple[str, ...]
    # How many numbers the shape of a pod has, such as 3 in v5p-2x4x4.
    sides: int = 2
    # The number of JAX devices per chip.
    devices: int = 1


# Numbers are from docs.cloud.google.com/tpu/docs/NAME and nvidia.com/en-us/data-center/NAME. Names
# of TPUs are from jax/_src/pallas/mosaic/tpu_info.py, names of GPUs are those in CUDA.
CHIPS = {
    'v4': Chip('TPU', 32 * GIB, 275e12, ('TPU v4',), sides=3),
    'v5e': Chip('TPU', 16 * GIB, 197e12, ('TPU v5e', 'TPU v5 lite')),
    'v5p': Chip('TPU', 95 * GIB, 459e12, ('TPU v5p', 'TPU v5'), sides=3),
    'v6e': Chip('TPU', 32 * GIB, 918e12, ('TPU v6e', 'TPU v6 lite')),
    'tpu7x': Chip('TPU', 192 * GIB, 2307e12, ('TPU7x',), sides=3, devices=2),
    'a100': Chip('GPU', 40 * GB, 312e12, ('NVIDIA A100-SXM4-40GB', 'NVIDIA A100-PCIE-40GB')),
    'a100_80gb': Chip('GPU', 80 * GB, 312e12, ('NVIDIA A100-SXM4-80GB', 'NVIDIA A100 80GB PCIe')),
    'h100': Chip('GPU', 80 * GB, 989e12, ('NVIDIA H100 80GB HBM3',)),
    'h200': Chip('GPU', 141 * GB, 989e12, ('NVIDIA H200',)),
    'b200': Chip('GPU', 180 * GB, 2250e12, ('NVIDIA B200',)),
}


def peak_flops(device_kind: str) -> float | None:
    """Returns the peak bfloat16 FLOP/s of a JAX device; None for a CPU or an unknown chip."""
    for chip in CHIPS.values():
        if device_kind in chip.device_kinds:
            return chip.flops / chip.devices
    return None


def tokens_per_step(config: Config) -> int:
    """Returns the number of tokens of one step, summed over trials."""
    num_trials = len(config.trials.trials())
    return num_trials * config.train.batch_size * config.model.context


def flops_per_step(config: Config) -> float:
    """Returns the model FLOPs of one step, summed over trials, without rematerialization."""
    # A backward pass takes twice the FLOPs of a forward pass.
    return 3 * cost.flops_per_token(config.model) * tokens_per_step(config)

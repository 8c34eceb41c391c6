"""Accelerators, and how many FLOPs a step of a run takes on them."""

import dataclasses
from typing import Literal

from qkattn.config import Config
from qkattn.model import cost

# Bytes, as sellers of GPUs count them and as sellers of TPUs do.
GB = 10**9
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """An accelerator."""

    kind: Literal['TPU', 'GPU']
    # Bytes of its memory.
    hbm: int
    # Peak rate of dense bfloat16 products, in FLOP/s.
    flops: float
    # `device_kind` of its devices in JAX. GPUs of one name with another peak rate, such as the
    # H100 PCIe, are not among them.
    device_kinds: tuple[str, ...]
    # Numbers in the shape of a pod: sides of a slice of TPUs, or hosts and GPUs of a host.
    sides: int = 2
    # Devices of JAX per chip.
    devices: int = 1


# Figures from docs.cloud.google.com/tpu/docs/NAME, nvidia.com/en-us/data-center/NAME; names of TPUs
# as in jax/_src/pallas/mosaic/tpu_info.py, of GPUs as CUDA reports them.
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
    """Peak rate of one device of JAX, in bfloat16 FLOP/s; None of a CPU or an unknown chip."""
    for chip in CHIPS.values():
        if device_kind in chip.device_kinds:
            return chip.flops / chip.devices
    return None


def tokens_per_step(config: Config) -> int:
    """The tokens of one step, summed over trials."""
    num_trials = len(config.trials.trials())
    return num_trials * config.train.batch_size * config.model.context


def flops_per_step(config: Config) -> float:
    """The model FLOPs of one step, summed over trials.

    They are those of a forward pass, and of a backward pass of twice its cost. What
    model.remat computes again does not count.
    """
    return 3 * cost.flops_per_token(config.model) * tokens_per_step(config)

"""What one attention is to compute: the arguments that all kernels share."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from qkattn.attention.mask import Mask
from qkattn.attention.normalizers import Normalizer

# distance_TS -> b_NTS, what is added to the scaled and capped logits at distances t - s.
Bias = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """The arguments of `attend`; `dropout` is 0 without a key."""

    q_BTNH: jax.Array
    k_BSKH: jax.Array
    v_BSKH: jax.Array
    mask: Mask
    scale: float | jax.Array
    bias: Bias | None
    logit_cap: float | None
    normalizer: Normalizer
    dropout: float
    dropout_key: jax.Array | None

    @property
    def lengths(self) -> tuple[int, int]:
        """T and S."""
        return self.q_BTNH.shape[1], self.k_BSKH.shape[1]


class Target(NamedTuple):
    """Where a call is computed.

    Attributes:
      platform: as JAX names it; None where it is not known yet, and nothing is computed.
      mesh: of the devices that share it; None is one device.
      capability: compute capability of CUDA devices; 0 of other GPUs.
      rows, heads: axes of the mesh that split B, and N and K.
    """

    platform: str | None
    mesh: Mesh | AbstractMesh | None = None
    capability: float = 8.0
    rows: tuple[str, ...] = ('data', 'fsdp')
    heads: str = 'tensor'

    @classmethod
    def of(cls, mesh: Mesh | AbstractMesh | None) -> 'Target':
        """The devices of a mesh; JAX's first device without one, or with an abstract one."""
        device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else jax.devices()[0]
        capability = str(getattr(device, 'compute_capability', 8.0))
        numeric = capability.replace('.', '', 1).isdigit()
        return cls(device.platform, mesh, float(capability) if numeric else 0.0)

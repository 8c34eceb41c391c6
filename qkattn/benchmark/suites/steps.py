"""Training steps: qkattn beside its peers, on one core and on all."""

import dataclasses
from typing import Any

from qkattn.benchmark.race import Contestant
from qkattn.benchmark.session import Session
from qkattn.benchmark.shape import Shape


def run(session: Session) -> None:
    for shape in session.scale.shapes:
        for cores in session.cores:
            contestants = peers_and_own(shape, cores, session.options.peers)
            session.race(f'{shape}, {cores} cores', contestants, reference='qkattn')


# Name of a row by the name of its peer: the work and its settings beside the shape.
PEERS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    'torch': {'torch.compile': ('torch', {})},
    'functional': {
        'functional JAX': ('functional', {}),
        'functional JAX, 1 step a dispatch': ('functional', {'steps_per_dispatch': 1}),
    },
    'flax': {'Flax MultiHeadDotProductAttention': ('functional', {'attention': 'flax'})},
    'dot_product': {
        'jax.nn.dot_product_attention': ('functional', {'attention': 'dot_product'}),
    },
}
# The package that a peer needs and qkattn does not, and the extra that installs it.
NEEDS = {'torch': ('torch', 'benchmark')}


def peers_and_own(shape: Shape, cores: int, peers: tuple[str, ...]) -> list[Contestant]:
    """A contestant for each row: qkattn with 10 steps and with 1 step a dispatch, and the peers."""
    sizes = dataclasses.asdict(shape)
    rows: dict[str, tuple[str, dict[str, Any]]] = {
        'qkattn': ('qkattn', {'config': shape.config()}),
        'qkattn, 1 step a dispatch': ('qkattn', {'config': shape.config(steps_per_dispatch=1)}),
    }
    for peer in peers:
        for name, (work, settings) in PEERS[peer].items():
            rows[name] = (work, {'shape': sizes, **settings})
    return [
        Contestant(
            name=name, work=work, settings=settings, cores=cores, extra={'tokens': shape.tokens}
        )
        for name, (work, settings) in rows.items()
    ]

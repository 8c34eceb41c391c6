"""Training steps: beside the peers, of every variant, by context and dtype, and part by part."""

import dataclasses
import itertools
import logging
from collections.abc import Iterator
from typing import Any

from qkattn.benchmark.measurement import Group
from qkattn.benchmark.peers.parts import PARTS
from qkattn.benchmark.race import Contestant
from qkattn.benchmark.session import Session
from qkattn.benchmark.shape import Shape
from qkattn.config import Config, from_json
from qkattn.config.calls import split_variant
from qkattn.errors import ConfigError
from qkattn.model.sites import validate
from qkattn.study.catalogue import documented_variants

log = logging.getLogger(__name__)

# Of each peer, by the name of its row: the work and its settings beside the shape.
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
# Rows on more than one core, and on a GPU, whose memory holds no more processes at once.
MAIN = ('qkattn', 'torch.compile', 'functional JAX', 'jax.nn.dot_product_attention')

# Sizes of the square product and of the copy, in rows and MiB, by scale.
CEILINGS = {'cpu': (2048, 256), 'gpu': (8192, 2048), 'smoke': (64, 1)}


def run(session: Session) -> None:
    most = {cores: ceilings(session, cores) for cores in session.cores}
    for shape in session.scale.shapes:
        for cores in session.cores:
            beside_peers(session, shape, cores, most[cores])
    first = session.cores[0]
    for shape in session.scale.shapes:
        parts(session, shape, first, most[first])
    by_size(session, first, most[first])
    for shape in variant_shapes(session):
        variants(session, shape, first, most[first])


def ceilings(session: Session, cores: int) -> Group:
    """The largest product rate of each dtype, by jax and torch, and the memory bandwidth."""
    size, megabytes = CEILINGS[session.scale.name]
    rows = []
    for library in ('jax', 'torch') if 'torch' in session.options.peers else ('jax',):
        for dtype in session.scale.dtypes:
            rows.append(
                Contestant(
                    name=f'{library} product {size}, {dtype}',
                    work=f'{library}_product',
                    settings={'size': size, 'dtype': dtype},
                    cores=cores,
                    process=library,
                )
            )
    rows.append(
        Contestant(
            name=f'{megabytes} MiB negated in place',
            work='jax_copy',
            settings={'megabytes': megabytes},
            cores=cores,
            process='jax',
        )
    )
    return session.race(f'ceilings, {_cores(cores)}', rows, rounds=_fewer(session))


def limits(shape: Shape, most: Group) -> dict[str, float]:
    """Facts for a row of this shape: what it computes, and the least time that this takes."""
    rates = [
        row.per_second('flops') or 0.0
        for row in most.rows
        if row.settings.get('dtype') == shape.dtype
    ]
    facts: dict[str, float] = {'tokens': shape.tokens, 'flops': shape.flops}
    peak, bandwidth = max(rates, default=0.0), most.rows[-1].per_second('bytes')
    if peak:
        facts['peak_flops'] = peak
        moving = shape.least_bytes / bandwidth if bandwidth else 0.0
        facts['floor_seconds'] = max(shape.flops / peak, moving)
    return facts


def beside_peers(session: Session, shape: Shape, cores: int, most: Group) -> None:
    """qkattn with several steps and with 1 step a dispatch, and the peers."""
    sizes = dataclasses.asdict(shape)
    rows: dict[str, tuple[str, dict[str, Any]]] = {
        'qkattn': ('qkattn', {'config': shape.config()}),
        'qkattn, 1 step a dispatch': ('qkattn', {'config': shape.config(steps_per_dispatch=1)}),
    }
    for peer in session.options.peers:
        for name, (work, settings) in PEERS[peer].items():
            rows[name] = (work, {'shape': sizes, **settings})
    contestants = [
        Contestant(name=name, work=work, settings=settings, cores=cores, extra=limits(shape, most))
        for name, (work, settings) in rows.items()
        if cores == 1 or name in MAIN
    ]
    session.race(f'{shape}, {_cores(cores)}', contestants, reference='qkattn')


def parts(session: Session, shape: Shape, cores: int, most: Group) -> None:
    """The step and its parts; ratios are shares of the step."""
    own: dict[str, Any] = {'cores': cores, 'process': 'parts'}
    config, facts = shape.config(), limits(shape, most)
    whole = Contestant(
        name='whole step', work='qkattn', settings={'config': config}, extra=facts, **own
    )
    rows = [whole]
    for name in PARTS:
        extra = {'peak_flops': facts.get('peak_flops'), 'flops': shape.flops_by_part.get(name)}
        settings = {'config': config, 'name': name}
        rows.append(Contestant(name=name, work='part', settings=settings, extra=extra, **own))
    title = f'parts of a step, {shape}, {_cores(cores)}'
    session.race(title, rows, reference='whole step', rounds=_fewer(session))


def by_size(session: Session, cores: int, most: Group) -> None:
    """The standard variant by context and dtype at about as many tokens a step, beside torch."""
    base, rows = session.scale.variants, []
    for context, dtype in itertools.product(session.scale.contexts, session.scale.dtypes):
        batch = max(1, base.tokens // context)
        shape = dataclasses.replace(base, context=context, batch=batch, dtype=dtype)
        lines: dict[str, dict[str, Any]] = {
            'qkattn': {
                'work': 'qkattn',
                'settings': {'config': shape.config(steps_per_dispatch=4)},
                'process': 'sizes',
            }
        }
        if 'torch' in session.options.peers and dtype == session.scale.dtypes[0]:
            settings = {'shape': dataclasses.asdict(shape)}
            lines['torch.compile'] = {'work': 'torch', 'settings': settings, 'process': 'torch'}
        for name, own in lines.items():
            facts = {'line': f'{name}, {dtype}', 'context': context, **limits(shape, most)}
            title = f'{name}, context {context}, {dtype}'
            rows.append(Contestant(name=title, cores=cores, extra=facts, **own))
    title = f'contexts and dtypes, {base}, {_cores(cores)}'
    if rows:
        session.race(title, rows, x='context', rounds=_fewer(session))


def variant_shapes(session: Session) -> Iterator[Shape]:
    """The shapes at which all variants are compared."""
    scale = session.scale
    contexts = scale.contexts if scale.grid else (scale.variants.context,)
    dtypes = scale.dtypes if scale.grid else (scale.variants.dtype,)
    for width, context, dtype in itertools.product(scale.widths, contexts, dtypes):
        yield dataclasses.replace(
            scale.variants,
            width=width,
            heads=max(1, width // scale.variants.head_size),
            context=context,
            batch=max(1, scale.variants.tokens // context),
            dtype=dtype,
        )


def variants(session: Session, shape: Shape, cores: int, most: Group) -> None:
    """Every score and every value; ratios beside those of their FLOPs."""
    known = [f'{score}/{value}' for score, value in documented_variants()]
    rows: list[Contestant] = []
    for name in session.scale.only or known:
        score, value = split_variant(name)
        config = shape.config(steps_per_dispatch=4, score=score, value=value)
        try:
            validate(from_json(Config, config))
        except ConfigError as error:
            log.info('  %s is left out: %s', name, error)
            continue
        rows.append(
            Contestant(
                name=name,
                work='qkattn',
                settings={'config': config},
                cores=cores,
                process=f'variants {len(rows) % 2}',  # built two at a time
                extra=limits(shape, most),
            )
        )
    title = f'variants, {shape}, {_cores(cores)}'
    session.race(title, rows, reference='qk/vo', rounds=_fewer(session), seconds=0)


def _fewer(session: Session) -> int:
    """Rounds of groups that are not about a few percent."""
    return min(5, session.scale.rounds)


def _cores(count: int) -> str:
    return '1 core' if count == 1 else f'{count} cores'

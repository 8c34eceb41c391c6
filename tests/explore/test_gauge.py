"""Gauges: what is solved at one size, and that it holds, with exact fractions, at others."""

import numpy as np
import pytest

from qkattn.explore.bench import Bench, exact
from qkattn.explore.gauge import Gauge, gauges
from qkattn.explore.structure import point

sympy = pytest.importorskip('sympy', reason="pip install -e '.[explore]'")

QK = Gauge('W_Q', {'W_K': 'W_K G^-T'}, 'invertible')
VO = Gauge('W_V', {'W_O': 'G^-1 W_O'}, 'invertible')
FOUND = {
    'qk/vo': [QK, VO],
    'merged/merged_vo': [],
    'neither/no_vo': [],
    'shared_qk/o_is_v': [Gauge('W_Q', {}, 'orthogonal'), Gauge('W_V', {}, 'orthogonal')],
    'symmetric/no_v': [Gauge('W_Q', {'g_sign': 'g_sign G^-2'}, 'diagonal')],
    'pairwise/no_v': [Gauge('W_Q', {'W_form': 'G^-1 W_form G^-T'}, 'invertible')],
    'collaborative/no_v': [
        Gauge('W_Q', {'W_K': 'W_K G^-T'}, 'diagonal'),
        Gauge('W_mixing', {'W_Q': 'W_Q G^-T'}, 'diagonal'),
    ],
    'qk/k_is_v': [Gauge('W_Q', {'W_K': 'W_K G^-T', 'W_O': 'G^T W_O'}, 'invertible')],
    'qk/o_is_k': [Gauge('W_Q', {'W_K': 'W_K G^-T', 'W_V': 'W_V G'}, 'invertible')],
    'qk/subspace': [Gauge('W_Q', {'W_K': 'W_K G^-T'}, 'orthogonal')],
    'qk/v_is_k_transposed': [Gauge('W_Q', {'W_K': 'W_K G^-T', 'W_O': None}, 'invertible')],
    'gauge_fixed/no_o': [],
}


@pytest.mark.parametrize('variant', FOUND)
def test_solutions(variant):
    assert gauges(Bench(variant)) == FOUND[variant]


@pytest.mark.parametrize(
    ('variant', 'dims', 'heads', 'found'),
    [
        ('collaborative(size=3)/no_v', 2, 1, FOUND['collaborative/no_v']),
        ('shared_qk/no_v', 3, 1, [Gauge('W_Q', {}, 'orthogonal')]),
        ('low_rank(rank=3)/vo', 4, 1, FOUND['qk/vo']),
        ('symmetric/gauge_fixed', 4, 2, FOUND['symmetric/no_v']),
    ],
)
def test_solutions_at_sizes_that_options_take(variant, dims, heads, found):
    assert gauges(Bench(variant, 2, dims, heads)) == found


@pytest.mark.parametrize('dims', (3, 4))
@pytest.mark.parametrize(
    'variant', [v for v, found in FOUND.items() if found and v != 'qk/v_is_k_transposed']
)
def test_they_hold_at_other_sizes(variant, dims):
    bench = Bench(variant, 2, dims, 1)
    for gauge in FOUND[variant]:
        G = _group_element(gauge.group, dims)
        at = point(*(parameter.symbols for parameter in bench.parameters))
        before, after = [], []
        for parameter in bench.parameters:
            array = np.array([at[s] for s in parameter.symbols.flat]).reshape(
                parameter.initial.shape
            )
            before.append(array.astype(object))
            after.append(_changed(parameter, before[-1], gauge, G))
        for old, new in zip(
            bench.matrices(before, exact), bench.matrices(after, exact), strict=True
        ):
            assert (old == new).all()


def _group_element(group, size):
    rng = np.random.default_rng(0)
    if group == 'diagonal':
        return sympy.diag(*[sympy.Rational(int(n), 7) for n in rng.integers(1, 20, size)])
    free = sympy.Matrix(size, size, [int(n) for n in rng.integers(-9, 9, size * size)])
    if group == 'invertible':
        return free
    skew, one = free - free.T, sympy.eye(size)
    return (one - skew) * (one + skew).inv()  # Cayley


POWERS = {
    'G': lambda G: G,
    'G^T': lambda G: G.T,
    'G^-1': lambda G: G.inv(),
    'G^-T': lambda G: G.inv().T,
    'G^-2': lambda G: G.inv() ** 2,
}


def _changed(parameter, array, gauge, G):
    """The parameter times what its words say, from the left and from the right."""
    words = {gauge.first: f'{gauge.first} G', **gauge.changes}.get(parameter.name)
    if words is None:
        return array
    left, _, right = (word.strip() for word in words.partition(parameter.name))
    (places,) = parameter.by_head
    matrix = sympy.Matrix(array.ravel()[places].tolist())
    matrix = POWERS[left](G) * matrix if left else matrix
    matrix = matrix * POWERS[right](G) if right else matrix
    changed = array.ravel().copy()
    changed[places] = np.array(matrix.tolist(), object)
    return changed.reshape(array.shape)

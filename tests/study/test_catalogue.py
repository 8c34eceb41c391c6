"""The catalogue is read off the classes, and says what the real arrays say."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from qkattn.attention import SCORES, VALUES, AttentionSpec, Score
from qkattn.attention.parameters import weight
from qkattn.model import cost
from qkattn.model.sites import attention_spec
from qkattn.study import catalogue

SPEC = AttentionSpec(d_model=32, num_heads=4, num_kv_heads=2, head_size=8)


class Mislabelled(Score):
    def __init__(self, spec, *, key):
        self.w_q_DNH = weight(key, 'w_q_DNH', (spec.d_model, spec.num_heads, 5), 1.0)


def test_letters_are_sizes_and_contradictions_are_errors():
    score = SCORES['low_rank'](SPEC, key=jax.random.key(0), rank=3)
    letters = catalogue.letters(score, SPEC)
    assert letters == {'D': 32, 'E': 32, 'N': 4, 'K': 2, 'H': 8, 'R': 3}
    with pytest.raises(ValueError, match='w_q_DNH: H is 5 here and 8 elsewhere'):
        catalogue.letters(Mislabelled(SPEC, key=jax.random.key(0)), SPEC)


def test_every_circuit_is_described():
    entries = catalogue.entries()
    assert [e.name for e in entries] == [*SCORES, *VALUES]
    for entry in entries:
        assert entry.equation and entry.source and entry.flops > 0


@pytest.mark.parametrize('name', [*SCORES])
def test_the_cache_in_letters_is_the_cache_in_floats(name):
    score, value = catalogue.partner(name, SCORES[name])
    model = dataclasses.replace(catalogue.REFERENCE, score=score, value=value)
    (entry,) = [e for e in catalogue.entries() if e.name == name and e.rope is not None]
    layer = jax.eval_shape(
        lambda: catalogue.Attention(attention_spec(model), key=jax.random.key(0))
    )
    letters = catalogue.letters(layer.score, attention_spec(model))
    shown = eval(entry.cache, letters) if entry.cache != '0' else 0
    y_BSD = jax.ShapeDtypeStruct((1, 1, model.d_model), jnp.float32)
    held = jax.eval_shape(lambda layer, y: layer.score.cached(y), layer, y_BSD)
    assert shown == sum(a.size for a in held.values())
    # beside no_vo, which reads the stream, a Score that remembers the stream adds nothing
    both = cost.cache_floats_per_token(dataclasses.replace(model, value='no_vo'))
    assert both == (shown if 'x_BSD' in held else shown + model.d_model)


def test_exact_conversions_are_measured():
    measured = catalogue.conversions('shared_qk', 'vo')
    exact = catalogue.exact(measured)
    assert {'to_standard', 'merge', 'to_symmetric'} <= set(exact)
    assert 'truncate' not in exact and measured['truncate'] > 1e-2
    assert 'double' in measured['fold_double']  # the sentence with which it is refused

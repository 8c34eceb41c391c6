"""The stored catalogue repeats the declarations of the classes, and caches what they cache."""

import dataclasses
import json

import jax
import jax.numpy as jnp

from qkattn.attention import SCORES, VALUES, Attention
from qkattn.model import cost
from qkattn.study import catalogue, variant_tables
from tests.attention import layers

STORED = variant_tables.stored()


def test_the_catalogue_is_stored_and_every_variant_documented():
    assert json.loads(json.dumps(catalogue.measured())) == STORED
    documented = catalogue.documented_variants()
    assert len(documented) == len(set(documented))
    scores, values = map(set, zip(*documented, strict=True))
    assert scores >= {*SCORES} and values >= {*VALUES}


def test_letters_of_a_cache_count_its_arrays():
    for name, entry in STORED['Score'].items():
        model = dataclasses.replace(catalogue.REFERENCE, score=name, value='vo')
        spec = catalogue.reference_spec(name, 'vo')
        layer = jax.eval_shape(lambda spec=spec: Attention(spec, key=jax.random.key(0)))
        y_BSD = jax.ShapeDtypeStruct((1, 1, model.d_model), jnp.float32)
        held = jax.eval_shape(lambda layer, y: layer.score.cached(y), layer, y_BSD)
        shown = eval(entry['cache'], layers.letters(layer.score, spec))
        assert shown == sum(a.size for a in held.values()), name
        # no_vo caches the stream: beside it, a Score that caches the stream adds nothing.
        both = cost.cache_floats_per_token(dataclasses.replace(model, value='no_vo'))
        assert both == (shown if 'x_BSD' in held else shown + model.d_model), name

"""Names of Scores, Values and Normalizers, and how a pair of circuits is checked and built.

A name is `qk`, carries options as in `low_rank(rank=8)`, or is the import path of a class outside
the package, `my_package.my_module:MyScore`. A variant is `score/value`.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp

from qkattn.attention.normalizers import NORMALIZERS, Normalizer
from qkattn.attention.parameters import initialization
from qkattn.attention.scores import identity, key_latents, qk, symmetric
from qkattn.attention.scores.score import Circuit, Score
from qkattn.attention.spec import AttentionSpec
from qkattn.attention.values import slices, tied, value_latents, vo
from qkattn.attention.values.value import Value
from qkattn.config.calls import resolve
from qkattn.config.variant import Variant
from qkattn.errors import SpecError

SCORES: dict[str, type[Score]] = {
    'qk': qk.QK,
    'merged': qk.Merged,
    'shared_qk': symmetric.SharedQK,
    'symmetric': symmetric.Symmetric,
    'pairwise': symmetric.Pairwise,
    'symmetric_skew': symmetric.SymmetricSkew,
    'query_free': identity.QueryFree,
    'key_free': identity.KeyFree,
    'neither': identity.Neither,
    'query_free_full': identity.QueryFreeFull,
    'neither_full': identity.NeitherFull,
    'low_rank': qk.LowRank,
    'full_size': qk.FullSize,
    'gauge_fixed': qk.GaugeFixed,
    'frozen': qk.Frozen,
    'double': qk.Double,
    'collaborative': qk.Collaborative,
    'nonlinear_query': identity.NonlinearQuery,
    'latent': key_latents.Latent,
}

VALUES: dict[str, type[Value]] = {
    'vo': vo.VO,
    'no_v': slices.NoV,
    'no_o': slices.NoO,
    'no_vo': slices.NoVO,
    'merged_vo': vo.MergedVO,
    'low_rank': vo.LowRank,
    'gauge_fixed': vo.GaugeFixed,
    'double': vo.Double,
    'hadamard': slices.Hadamard,
    'k_is_v': tied.KIsV,
    'q_is_v': tied.QIsV,
    'v_is_k_transposed': tied.VIsKTransposed,
    'o_is_v': tied.OIsV,
    'o_is_k': tied.OIsK,
    'o_is_q': tied.OIsQ,
    'subspace': tied.Subspace,
    'latent': value_latents.Latent,
}


def find_score(text: str) -> tuple[type[Score], dict[str, Any]]:
    """The class and the options that `text` names; SpecError, with the known ones, for others."""
    return _find(text, SCORES, Score)


def find_value(text: str) -> tuple[type[Value], dict[str, Any]]:
    """As `find_score`, for Values."""
    return _find(text, VALUES, Value)


def find_normalizer(text: str) -> Normalizer:
    """The Normalizer that `text` names, e.g. 'sigmoid(bias=-6.0)'; SpecError as in `find_score`."""
    cls, options = _find(text, NORMALIZERS, Normalizer)
    return cls(**options)


def parse_variant(text: str) -> Variant:
    """The variant of 'score/value'; SpecError where one of them is unknown."""
    variant = Variant.parse(text)
    find_score(variant.score)
    find_value(variant.value)
    return variant


def build(spec: AttentionSpec, *, key: jax.Array) -> tuple[Score, Value]:
    """The checked and initialized circuits of one layer; SpecError as in `check`."""
    check(spec)
    score_class, score_options = find_score(spec.score)
    value_class, value_options = find_value(spec.value)
    with initialization(spec.init, spec.init_qk):
        score = score_class(spec, key=key, **score_options)
    with initialization(spec.init, spec.init_vo):
        value = value_class(spec, score, key=key, **value_options)
    for circuit in (score, value):
        if circuit.uses_layer:
            circuit.layer = 0
    return score, value


def check(spec: AttentionSpec) -> None:
    """Raises SpecError, in one sentence, where the variant of `spec` cannot be built."""
    score, score_options = find_score(spec.score)
    value, value_options = find_value(spec.value)
    find_normalizer(spec.normalizer)
    _check_circuit(spec, spec.score, score, score_options)
    _check_sharing(spec, score, score_options, value)
    _check_circuit(spec, spec.value, value, value_options)
    if spec.num_kv_heads < spec.num_heads and not (score.uses_kv_heads or value.uses_kv_heads):
        raise SpecError(
            f'num_kv_heads={spec.num_kv_heads} changes nothing in {spec.variant}, '
            f'which has no key or value heads to share; leave it at num_heads={spec.num_heads}'
        )
    if spec.positions == 'rope' and not score.supports_rope:
        raise SpecError(
            f'{spec.score} has no rotary form, so positions=rope cannot be used with it; '
            'use none, learned, sinusoidal or alibi'
        )
    if spec.positions == 'rope':
        _check_rotated(spec, score, score_options)


def _check_rotated(spec: AttentionSpec, score: type[Score], options: dict[str, Any]) -> None:
    """Raises SpecError where the channels that are rotated are not pairs."""

    def queries() -> jax.Array:
        made = score(spec, key=jax.random.key(0), **options)
        q_BTNH = made.queries(jnp.zeros((1, 1, spec.d_model)))
        return q_BTNH[..., -(made.rope_size or q_BTNH.shape[-1]) :]

    if (size := jax.eval_shape(queries).shape[-1]) % 2:
        raise SpecError(
            f'{spec.score} with d_model={spec.d_model} and head_size={spec.head_size} rotates '
            f'{size} channels of a head, which must be an even number for positions=rope'
        )


def _check_circuit(
    spec: AttentionSpec, text: str, circuit: type[Circuit], options: dict[str, Any]
) -> None:
    name = text.partition('(')[0]
    if circuit.uses_slices and spec.num_heads * spec.head_size != spec.d_model:
        raise SpecError(
            f'{name} uses slices of the stream as heads, so num_heads * head_size must equal '
            f'd_model={spec.d_model}, not {spec.num_heads} * {spec.head_size}'
        )
    for option, value in options.items():
        if option in circuit.options:
            circuit.options[option](spec, name, option, value)
    circuit.check(spec, **options)


def _check_sharing(
    spec: AttentionSpec, score: type[Score], options: dict[str, Any], value: type[Value]
) -> None:
    """Raises SpecError where the Value shares a projection that the Score does not have."""
    if not value.shares:
        return
    for which in set(value.shares) - set(score.shareable):
        able = [name for name, known in SCORES.items() if which in known.shareable]
        raise SpecError(
            f'the value {spec.value} uses the {which} projection of its score, and {spec.score} '
            f'has none to share; scores that have one are {", ".join(able)}'
        )
    if value.shares == ('query',) and score.shareable['query'] == score.shareable.get('key'):
        raise SpecError(
            f'in {spec.score} the query matrix is the key matrix: write '
            f'{spec.value.replace("q", "k", 1)} in place of {spec.value}'
        )
    abstract = jax.eval_shape(lambda: score(spec, key=jax.random.key(0), **options))
    if not abstract.bilinear:
        raise SpecError(
            f'the value {spec.value} shares a projection of its score, so it cannot be used with '
            f'{spec.score}, which is not bilinear'
        )


def _find(text: str, known: dict[str, type], base: type) -> tuple[type, dict[str, Any]]:
    return resolve(
        text,
        known,
        base.__name__.lower(),
        needs=f'a subclass of qkattn.attention.{base.__name__}',
        fits=lambda member: inspect.isclass(member) and issubclass(member, base),
        error=SpecError,
    )

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
from qkattn.config.setting import PASSED
from qkattn.config.variant import Variant
from qkattn.errors import SpecError

# The scores of the package, by name.
SCORES: dict[str, type[Score]] = {
    'qk': qk.QK,
    'merged': qk.Merged,
    'shared_qk': symmetric.SharedQK,
    'symmetric': symmetric.Symmetric,
    'pairwise': symmetric.Pairwise,
    'query_free': identity.QueryFree,
    'key_free': identity.KeyFree,
    'neither': identity.Neither,
    'query_free_full': identity.QueryFreeFull,
    'neither_full': identity.NeitherFull,
    'low_rank': qk.LowRank,
    'full_size': qk.FullSize,
    'double': qk.Double,
    'nonlinear_query': identity.NonlinearQuery,
    'latent': key_latents.Latent,
}

# The values of the package, by name.
VALUES: dict[str, type[Value]] = {
    'vo': vo.VO,
    'no_v': slices.NoV,
    'no_o': slices.NoO,
    'no_vo': slices.NoVO,
    'merged_vo': vo.MergedVO,
    'low_rank': vo.LowRank,
    'double': vo.Double,
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
    """Returns the Score and the options in `text`: 'low_rank(rank=8)' -> (LowRank, {'rank': 8}).

    Raises SpecError for an unknown name or option; the message lists the registered ones.
    """
    return _find(text, SCORES, Score)


def find_value(text: str) -> tuple[type[Value], dict[str, Any]]:
    """Does for Values what `find_score` does for Scores."""
    return _find(text, VALUES, Value)


def find_normalizer(text: str) -> Normalizer:
    """Returns the Normalizer of e.g. 'sigmoid(bias=-6.0)'; raises SpecError like `find_score`."""
    cls, options = _find(text, NORMALIZERS, Normalizer)
    return cls(**options)


def _find(text: str, registered: dict[str, type], base: type) -> tuple[type, dict[str, Any]]:
    """Returns the class that `text` names, and its options.

    For example, 'low_rank(rank=8)' gives (LowRank, {'rank': 8}). The class is one of `registered`,
    or a subclass of `base` if `text` is an import path. Raises SpecError if it is neither.
    """

    def is_subclass(imported: Any) -> bool:
        return inspect.isclass(imported) and issubclass(imported, base)

    setting = base.__name__.lower()  # 'score', 'value' or 'normalizer', for errors
    return resolve(
        text,
        registered,
        setting,
        needs=f'a subclass of qkattn.attention.{base.__name__}',
        is_valid=is_subclass,
        error=SpecError,
    )


def parse_variant(text: str) -> Variant:
    """Parses 'score/value'; raises SpecError if the Score or the Value is unknown."""
    variant = Variant.parse(text)
    find_score(variant.score)
    find_value(variant.value)
    return variant


def build(spec: AttentionSpec, *, key: jax.Array) -> tuple[Score, Value]:
    """Checks the spec of one layer, and returns its Score and Value at initialization.

    The Score computes the logits of attention, and the Value its outputs. Raises SpecError as
    `check` does.
    """
    check(spec)
    score_class, score_options = find_score(spec.score)
    value_class, value_options = find_value(spec.value)
    with initialization(spec.init, spec.init_qk):
        score = score_class(spec, key=key, **score_options)
    with initialization(spec.init, spec.init_vo):
        value = value_class(spec, score, key=key, **value_options)
    # Some variants depend on the index of their layer in the model. It is 0 here; `Attention.at`
    # sets another one.
    for circuit in (score, value):
        if circuit.uses_layer:
            circuit.layer = 0
    return score, value


def check(spec: AttentionSpec) -> None:
    """Raises SpecError if the Score or the Value of `spec` is unknown, or cannot be built with it.

    A spec that passes gets the attribute PASSED, and is not checked again.
    """
    if PASSED in vars(spec):
        return
    score, score_options = find_score(spec.score)
    value, value_options = find_value(spec.value)
    find_normalizer(spec.normalizer)

    # The Score by itself, then what the Value uses of it, then the Value by itself.
    _check_circuit(spec, spec.score, score, score_options)
    _check_sharing(spec, score, score_options, value)
    _check_circuit(spec, spec.value, value, value_options)

    shares_heads = spec.num_kv_heads < spec.num_heads
    has_kv_heads = score.uses_kv_heads or value.uses_kv_heads
    if shares_heads and not has_kv_heads:
        raise SpecError(
            f'num_kv_heads={spec.num_kv_heads} changes nothing in {spec.variant}, '
            f'which has no key or value heads to share; leave it at num_heads={spec.num_heads}'
        )

    if spec.positions == 'rope':
        _check_rotation(spec, score, score_options)
    vars(spec)[PASSED] = True  # The dataclass is frozen, so setattr would raise.


def _check_circuit(
    spec: AttentionSpec, text: str, circuit: type[Circuit], options: dict[str, Any]
) -> None:
    """Raises SpecError if a Score or Value does not fit the sizes, or an option is not valid.

    The Score of a layer computes the logits of attention, and the Value its outputs.

    Args:
      spec: the spec of the layer.
      text: the Score or Value as the spec names it, e.g. 'low_rank(rank=8)'.
      circuit: its class.
      options: its options, e.g. {'rank': 8}.
    """
    name = text.partition('(')[0]  # 'low_rank(rank=8)' -> 'low_rank'
    # With `uses_slices`, the heads are slices of the stream, e.g. in place of x W_Q.
    width_of_heads = spec.num_heads * spec.head_size
    if circuit.uses_slices and width_of_heads != spec.d_model:
        raise SpecError(
            f'{name} uses slices of the stream as heads, so num_heads * head_size must equal '
            f'd_model={spec.d_model}, not {spec.num_heads} * {spec.head_size}'
        )
    # `circuit.options` checks one option at a time. `circuit.check` checks conditions that involve
    # several, and options without a check of their own.
    for option, value in options.items():
        if option in circuit.options:
            check_option = circuit.options[option]
            check_option(spec, name, option, value)
    circuit.check(spec, **options)


def _check_sharing(
    spec: AttentionSpec, score: type[Score], options: dict[str, Any], value: type[Value]
) -> None:
    """Raises SpecError if the Value uses a projection of the Score, and must not.

    For example, the value `k_is_v` takes W_K of its Score as W_V. Its `shares` is ('key',), and the
    `shareable` of the Score has to contain 'key'. There are three errors:

    - The Score has no such projection: `key_free` has no W_K.
    - The Score has one matrix for queries and keys, so `q_is_v` is `k_is_v` by another name.
    - The Score is not bilinear.
    """
    if not value.shares:
        return

    for projection in value.shares:
        if projection in score.shareable:
            continue
        names = [name for name, cls in SCORES.items() if projection in cls.shareable]
        raise SpecError(
            f'the value {spec.value} uses the {projection} projection of its score, and '
            f'{spec.score} has none to share; scores that have one are {", ".join(names)}'
        )

    has_one_matrix = score.shareable.get('query') == score.shareable.get('key')
    if value.shares == ('query',) and has_one_matrix:
        same_value = spec.value.replace('q', 'k', 1)  # 'q_is_v' -> 'k_is_v'
        raise SpecError(
            f'in {spec.score} the query matrix is the key matrix: write '
            f'{same_value} in place of {spec.value}'
        )

    # Whether a Score is bilinear may depend on its options, so it has to be built. Building it
    # inside eval_shape draws no parameters.
    abstract_score = jax.eval_shape(lambda: score(spec, key=jax.random.key(0), **options))
    if not abstract_score.bilinear:
        raise SpecError(
            f'the value {spec.value} shares a projection of its score, so it cannot be used with '
            f'{spec.score}, which is not bilinear'
        )


def _check_rotation(spec: AttentionSpec, score: type[Score], options: dict[str, Any]) -> None:
    """Raises SpecError if a Score has no rotary form, or rotates an odd number of channels."""
    if not score.supports_rope:
        raise SpecError(
            f'{spec.score} has no rotary form, so positions=rope cannot be used with it; '
            'use none, learned, sinusoidal or alibi'
        )

    def rotated_channels() -> jax.Array:
        """Returns the channels of the queries that are rotated."""
        initialized = score(spec, key=jax.random.key(0), **options)
        q_BTNH = initialized.queries(jnp.zeros((1, 1, spec.d_model)))
        if initialized.rope_size is None:  # all channels
            return q_BTNH
        return q_BTNH[..., -initialized.rope_size :]

    # Only the number of channels matters, so eval_shape computes no array.
    size = jax.eval_shape(rotated_channels).shape[-1]
    if size % 2:
        raise SpecError(
            f'{spec.score} with d_model={spec.d_model} and head_size={spec.head_size} rotates '
            f'{size} channels of a head, which must be an even number for positions=rope'
        )

"""The registry of Scores, Values and Normalizers.

A class is named by `qk`, with options by `low_rank(rank=8)`, or by an import path such as
`my_package.my_module:MyScore`. A variant is `score/value`.
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

# The built-in Scores.
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

# The built-in Values.
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
    """Returns the class and the options of a Score.

    For example, 'low_rank(rank=8)' gives (LowRank, {'rank': 8}).

    Raises:
        SpecError: The name or an option is unknown.
    """
    return _find(text, SCORES, Score)


def find_value(text: str) -> tuple[type[Value], dict[str, Any]]:
    """Returns the class and the options of a Value; see `find_score`."""
    return _find(text, VALUES, Value)


def find_normalizer(text: str) -> Normalizer:
    """Returns the Normalizer that `text` names, e.g. 'sigmoid(bias=-6.0)'; see `find_score`."""
    cls, options = _find(text, NORMALIZERS, Normalizer)
    return cls(**options)


def _find(text: str, registered: dict[str, type], base: type) -> tuple[type, dict[str, Any]]:
    """Returns the class that `text` names, and its options.

    Args:
        text: A name or an import path, with options as in 'low_rank(rank=8)'.
        registered: The built-in classes.
        base: The base class of imported classes.

    Raises:
        SpecError: The class or an option is unknown.
    """

    def is_subclass(imported: Any) -> bool:
        return inspect.isclass(imported) and issubclass(imported, base)

    setting = base.__name__.lower()  # 'score', 'value' or 'normalizer', for messages
    return resolve(
        text,
        registered,
        setting,
        needs=f'a subclass of qkattn.attention.{base.__name__}',
        is_valid=is_subclass,
        error=SpecError,
    )


def parse_variant(text: str) -> Variant:
    """Parses 'score/value'.

    Raises:
        SpecError: The Score or the Value is unknown.
    """
    variant = Variant.parse(text)
    find_score(variant.score)
    find_value(variant.value)
    return variant


def build(spec: AttentionSpec, *, key: jax.Array) -> tuple[Score, Value]:
    """Initializes the Score and the Value of a layer.

    Raises:
        SpecError: The Score or the Value is unknown, or cannot be built with `spec`.
    """
    check(spec)
    score_class, score_options = find_score(spec.score)
    value_class, value_options = find_value(spec.value)
    # Every matrix is drawn from `key` and its own name, so the Score and the Value share `key`.
    # `initialization` sets the standard deviation of the matrices that are drawn in its block.
    with initialization(spec.init, spec.init_qk):
        score = score_class(spec, key=key, **score_options)
    with initialization(spec.init, spec.init_vo):
        value = value_class(spec, score, key=key, **value_options)
    for score_or_value in (score, value):
        if score_or_value.uses_layer:
            score_or_value.layer = 0  # the layer index, until `Attention.at` sets another
    return score, value


def check(spec: AttentionSpec) -> None:
    """Checks the Score, the Value and the normalizer of a spec.

    Raises:
        SpecError: One of them is unknown or does not fit the spec.
    """
    if PASSED in vars(spec):  # the mark that this function sets at its end
        return
    score_class, score_options = find_score(spec.score)
    value_class, value_options = find_value(spec.value)
    find_normalizer(spec.normalizer)

    _check_circuit(spec, spec.score, score_class, score_options)
    _check_sharing(spec, score_class, score_options, value_class)
    _check_circuit(spec, spec.value, value_class, value_options)

    has_grouped_heads = spec.num_kv_heads < spec.num_heads
    uses_kv_heads = score_class.uses_kv_heads or value_class.uses_kv_heads
    if has_grouped_heads and not uses_kv_heads:
        raise SpecError(
            f'num_kv_heads={spec.num_kv_heads} changes nothing in {spec.variant}, '
            f'which has no key or value heads to share; leave it at num_heads={spec.num_heads}'
        )

    if spec.positions == 'rope':
        _check_rotation(spec, score_class, score_options)
    vars(spec)[PASSED] = True  # setattr would raise, because the dataclass is frozen


def _check_circuit(
    spec: AttentionSpec, text: str, circuit: type[Circuit], options: dict[str, Any]
) -> None:
    """Checks the sizes and options of a Score or Value.

    Args:
        spec: The spec of the layer.
        text: The name with options, e.g. 'low_rank(rank=8)'.
        circuit: The class of the Score or Value.
        options: The options, e.g. {'rank': 8}.

    Raises:
        SpecError: The circuit does not fit the sizes of the layer, or an option is invalid.
    """
    name, _, _ = text.partition('(')  # 'low_rank(rank=8)' -> 'low_rank'
    total_head_size = spec.num_heads * spec.head_size
    if circuit.uses_slices and total_head_size != spec.d_model:
        raise SpecError(
            f'{name} uses slices of the stream as heads, so num_heads * head_size must equal '
            f'd_model={spec.d_model}, not {spec.num_heads} * {spec.head_size}'
        )
    for option, value in options.items():
        if option in circuit.options:
            check_option = circuit.options[option]
            check_option(spec, name, option, value)
    circuit.check(spec, **options)  # all options together


def _check_sharing(
    spec: AttentionSpec, score: type[Score], options: dict[str, Any], value: type[Value]
) -> None:
    """Raises SpecError if the Value shares projections that the Score does not offer.

    For example, `value.shares` is ('key',) if the Value uses W_K as W_V. Then `score.shareable` has
    to contain 'key'.
    """
    if not value.shares:
        return

    offered = set(score.shareable)
    for built_in in SCORES.values():
        offered.update(built_in.shareable)
    if not isinstance(value.shares, tuple) or not offered.issuperset(value.shares):
        raise SpecError(
            f'shares={value.shares!r} of the value {spec.value} must be a tuple of projections '
            f'that scores share: {", ".join(sorted(offered))}'
        )

    for projection in value.shares:
        if projection not in score.shareable:
            names = [name for name, cls in SCORES.items() if projection in cls.shareable]
            raise SpecError(
                f'the value {spec.value} uses the {projection} projection of its score, and '
                f'{spec.score} has none to share; scores that have one are {", ".join(names)}'
            )

    # If W_Q is W_K, sharing W_Q and sharing W_K are the same variant. Refuse its second name.
    # `shareable` has parameter names, as in {'key': ('w_k_DKH', 'b_k_KH')}.
    query_is_key = score.shareable.get('query') == score.shareable.get('key')
    if value.shares == ('query',) and query_is_key:
        same_value = spec.value.replace('q', 'k', 1)  # 'q_is_v' -> 'k_is_v'
        if same_value not in VALUES:  # a class from outside the package
            same_value = "a value that shares 'key'"
        raise SpecError(
            f'in {spec.score} the query matrix is the key matrix: write '
            f'{same_value} in place of {spec.value}'
        )

    # Options may decide whether a Score is bilinear. Build one without drawing parameters.
    abstract_score = jax.eval_shape(lambda: score(spec, key=jax.random.key(0), **options))
    if not abstract_score.bilinear:
        raise SpecError(
            f'the value {spec.value} shares a projection of its score, so it cannot be used with '
            f'{spec.score}, which is not bilinear'
        )


def _check_rotation(spec: AttentionSpec, score: type[Score], options: dict[str, Any]) -> None:
    """Raises SpecError if a Score does not support RoPE, or would rotate an odd head size."""
    if not score.supports_rope:
        raise SpecError(
            f'{spec.score} has no rotary form, so positions=rope cannot be used with it; '
            'use none, learned, sinusoidal or alibi'
        )

    def rotated_channels() -> jax.Array:
        """Returns the rotated channels of queries."""
        initialized = score(spec, key=jax.random.key(0), **options)
        q_BTNH = initialized.queries(jnp.zeros((1, 1, spec.d_model)))
        if initialized.rope_size is None:  # all channels
            return q_BTNH
        return q_BTNH[..., -initialized.rope_size :]

    # `eval_shape` neither draws parameters nor computes queries.
    size = jax.eval_shape(rotated_channels).shape[-1]
    is_odd = size % 2 != 0
    if is_odd:
        raise SpecError(
            f'{spec.score} with d_model={spec.d_model} and head_size={spec.head_size} rotates '
            f'{size} channels of a head, which must be an even number for positions=rope'
        )

"""Names of Scores and Values, and how a name with options becomes a class.

A name is `qk`, or carries options as in `low_rank(rank=8)`, or points to a class of your own by
import path, `my_package.my_module:MyScore`. A cell is `score/value`.
"""

import difflib
import importlib
import inspect
from typing import Any

from qkattn.attention.scores import (
    identity,
    key_latents,
    nonlinear,
    qk,
    rank,
    shared_projections,
    symmetric,
)
from qkattn.attention.scores.score import Score
from qkattn.attention.spec import AttentionSpec
from qkattn.attention.values import factored, hadamard, slices, tied, value_latents, vo
from qkattn.attention.values.value import Value
from qkattn.config.calls import parse_call, split_variant
from qkattn.errors import SpecError

SCORES: dict[str, type[Score]] = {
    'qk': qk.QK,
    'merged': qk.Merged,
    'shared_qk': symmetric.FairSharedQK,
    'symmetric': symmetric.Symmetric,
    'pairwise': symmetric.Pairwise,
    'symmetric_skew': symmetric.SymmetricSkew,
    'query_free': identity.QueryFree,
    'key_free': identity.KeyFree,
    'neither': identity.Neither,
    'query_free_full': identity.QueryFreeFull,
    'neither_full': identity.NeitherFull,
    'low_rank': rank.LowRank,
    'full_size': rank.FullSize,
    'gauge_fixed': rank.GaugeFixed,
    'frozen': rank.Frozen,
    'double': shared_projections.Double,
    'collaborative': shared_projections.Collaborative,
    'nonlinear_query': nonlinear.NonlinearQuery,
    'latent': key_latents.Latent,
}

VALUES: dict[str, type[Value]] = {
    'vo': vo.VO,
    'no_v': slices.NoV,
    'no_o': slices.NoO,
    'no_vo': slices.NoVO,
    'merged_vo': vo.MergedVO,
    'low_rank': factored.LowRank,
    'gauge_fixed': factored.GaugeFixed,
    'double': factored.Double,
    'hadamard': hadamard.Hadamard,
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
    """The class and options that `text` names; SpecError lists the known names otherwise."""
    return _find(text, SCORES, Score)


def find_value(text: str) -> tuple[type[Value], dict[str, Any]]:
    """The class and options that `text` names; SpecError lists the known names otherwise."""
    return _find(text, VALUES, Value)


def parse_variant(text: str) -> tuple[str, str]:
    """'score/value' -> (score, value), both checked to exist."""
    score, value = split_variant(text)
    find_score(score)
    find_value(value)
    return score, value


def check(spec: AttentionSpec) -> None:
    """Raises SpecError, in one sentence, where the cell of `spec` cannot be built."""
    score, score_options = find_score(spec.score)
    value, value_options = find_value(spec.value)
    score.check(spec, **score_options)
    value.check(spec, **value_options)
    if spec.num_kv_heads < spec.num_heads and not (score.uses_kv_heads or value.uses_kv_heads):
        raise SpecError(
            f'num_kv_heads={spec.num_kv_heads} changes nothing in {spec.score}/{spec.value}, '
            f'which has no key or value heads to share; leave it at num_heads={spec.num_heads}'
        )
    if spec.positions == 'rope' and not score.supports_rope:
        raise SpecError(
            f'{spec.score} has no rotary form, so positions=rope cannot be used with it; '
            'use none, learned, sinusoidal or alibi'
        )
    if spec.positions == 'rope' and spec.head_size % 2:
        raise SpecError(f'head_size={spec.head_size} must be even for positions=rope')


def _find(text: str, known: dict[str, type], base: type) -> tuple[type, dict[str, Any]]:
    kind = base.__name__
    name, options = parse_call(text, kind)
    if ':' in name:
        found = _import(name, kind)
        if not (inspect.isclass(found) and issubclass(found, base)):
            raise SpecError(f'{name!r} is not a subclass of qkattn.attention.{kind}')
    elif name in known:
        found = known[name]
    else:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f', did you mean {near[0]!r}?' if near else ';'
        raise SpecError(
            f'unknown {kind.lower()} {name!r}{hint} known are {", ".join(known)}, '
            'or an import path package.module:Class'
        )
    accepted = [p for p in inspect.signature(found.__init__).parameters][2:]
    accepted = [p for p in accepted if p != 'key']
    for option in options:
        if option not in accepted:
            raise SpecError(
                f'{name} has no option {option!r}; it takes {", ".join(accepted) or "none"}'
            )
    return found, options


def _import(path: str, kind: str) -> Any:
    module, _, name = path.partition(':')
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise SpecError(f'{kind.lower()} {path!r}: no module named {error.name!r}') from error
    except AttributeError as error:
        raise SpecError(f'{kind.lower()} {path!r}: {module} has no {name!r}') from error

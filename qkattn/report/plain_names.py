"""What a variant changes in attention, in plain words: 'no W_Q' for `query_free/vo`."""

from qkattn.config.calls import parse_call
from qkattn.config.variant import Variant
from qkattn.errors import SpecError

STANDARD = 'all of W_Q, W_K, W_V and W_O'

# What each score changes in W_Q and W_K; '' for the standard score.
SCORES = {
    'qk': '',
    'merged': 'W_Q and W_K merged',
    'shared_qk': 'W_Q = W_K',
    'symmetric': 'W_Q = W_K, signed',
    'pairwise': 'W_Q = W_K F',
    'query_free': 'no W_Q',
    'key_free': 'no W_K',
    'neither': 'no W_Q, no W_K',
    'query_free_full': 'no W_Q, W_K of D x D',
    'neither_full': 'no W_Q, no W_K, whole stream',
    'low_rank': 'W_Q W_K^T of low rank',
    'full_size': 'W_Q and W_K of D x D',
    'double': 'W_Q and W_K as products of two',
    'nonlinear_query': 'nonlinear W_Q',
    'latent': 'W_K of a latent',
}
# What each value changes in W_V and W_O; '' for the standard value.
VALUES = {
    'vo': '',
    'no_v': 'no W_V',
    'no_o': 'no W_O',
    'no_vo': 'no W_V, no W_O',
    'merged_vo': 'W_V and W_O merged',
    'low_rank': 'W_V W_O of low rank',
    'double': 'W_V as a product of two',
    'k_is_v': 'W_V = W_K',
    'q_is_v': 'W_V = W_Q',
    'v_is_k_transposed': 'W_V = W_K^T',
    'o_is_v': 'W_O = W_V^T',
    'o_is_k': 'W_O = W_K^T',
    'o_is_q': 'W_O = W_Q^T',
    'subspace': 'W_V = W_K, W_O = W_K^T',
    'latent': 'W_V of a latent',
}
# Model fields that variants set most often.
FIELDS = {
    'num_kv_heads': 'key/value heads',
    'num_heads': 'heads',
    'head_size': 'head size',
}


def plain_name(variant: str) -> str | None:
    """Describes how a variant differs from standard attention.

    For example, 'shared_qk(key_norm=True)/no_v?num_heads=4' gives 'W_Q = W_K (key norm), no W_V,
    heads: 4'. Standard attention gives STANDARD.

    Returns None if the score or the value has no plain name.
    """
    score_and_value, _, settings = variant.partition('?')
    try:
        score, value = Variant.parse(score_and_value)
        score_difference = _plain_circuit(score, SCORES)
        value_difference = _plain_circuit(value, VALUES)
    except (SpecError, KeyError):
        return None
    differences = [score_difference, value_difference]
    if settings:
        for setting in settings.split('&'):
            field, _, field_value = setting.partition('=')
            field_name = FIELDS.get(field, field.replace('_', ' '))
            differences.append(f'{field_name}: {field_value}')

    # A standard score or value has the difference ''.
    text = ', '.join(difference for difference in differences if difference)
    return text or STANDARD


def _plain_circuit(circuit: str, names: dict[str, str]) -> str:
    """Describes a score or a value with its options; '' for a standard one without options.

    For example, 'low_rank(rank=8)' gives 'W_Q W_K^T of low rank (rank 8)'. `names` is SCORES or
    VALUES.

    Raises:
        KeyError: The circuit has no plain name.
    """
    name, options = parse_call(circuit, field='variant', error=SpecError)
    description = names[name]
    if not options:
        return description

    option_texts = []
    for option, value in options.items():
        option_name = option.replace('_', ' ')
        option_texts.append(option_name if value is True else f'{option_name} {value}')
    # The description of a standard score or value is ''.
    return f'{description or name} ({", ".join(option_texts)})'

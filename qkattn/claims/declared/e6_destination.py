"""E6: where saved parameters go."""

from qkattn.claims.claim import Claim, Expectation

CLAIM = Claim(
    name='E6',
    title='it matters where savings go',
    statement='Where the saved parameters go (d_model, d_ff, heads, depth) changes the answer.',
    source='Shazeer 2019, arXiv 1911.02150, against equal-width comparisons; this project.',
    rule='Holds if, at equal parameter count, each other destination differs from d_model, for '
    'each variant.',
    expectations=tuple(
        Expectation(
            'destination',
            f'{variant} [{destination}]',
            'different',
            versus=f'{variant} [d_model]',
            context={'variant': name, 'destination': f'{destination}, not d_model'},
            curve=name,
        )
        for variant, name in (
            ('shared_qk(key_norm=True,self_mask=True)/vo', 'Q = K as in Reformer'),
            ('qk/k_is_v', 'K = V'),
        )
        for destination in ('d_ff', 'num_heads', 'num_layers')
    ),
)

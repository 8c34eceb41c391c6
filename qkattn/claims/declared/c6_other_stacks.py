"""C6: the conclusions of C2 to C5 in an encoder alone and in a decoder alone."""

from qkattn.claims.claim import Claim, Expectation

CLAIM = Claim(
    name='C6',
    title='the same in encoder-only and decoder-only models',
    statement='The conclusions do not differ for encoder-only and decoder-only models.',
    source='A thread that asks why attention does not use Q Q^T: "I don\'t think the conclusions '
    'differ".',
    rule='Holds if, in both, one matrix for queries and keys, and no W_V, are worse at the '
    "baseline's shape, and these and no W_O are not better by more than the margin at equal "
    'parameter count.',
    expectations=tuple(
        Expectation(study, variant, relation, at=at, context={'conclusion': name})
        for variant, relation, at, name, studies in (
            ('shared_qk/vo', 'worse', 'removed', 'of C2', ('masked', 'decoder')),
            ('shared_qk/vo', 'not_better', 'matched', 'of C3', ('masked', 'lm_stdlib')),
            ('qk/no_v', 'worse', 'removed', 'of C4', ('masked', 'decoder')),
            ('qk/no_v', 'not_better', 'matched', 'of C4', ('masked', 'decoder')),
            ('qk/no_o', 'not_better', 'matched', 'of C5', ('masked', 'lm_stdlib')),
        )
        for study in studies
    ),
)

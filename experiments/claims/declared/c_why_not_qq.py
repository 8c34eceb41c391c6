"""Group C: why not Q Q^T?"""

from experiments.claims.checks import counts, rewrites
from experiments.claims.claim import Claim, Expectation, Kind
from experiments.claims.declared import threads

EXPERIMENT = f'{threads.SYMMETRIC}, the experiments of the answer'
# Translation models whose encoder has one matrix for queries and keys, no W_V, or no W_O.
TIED = 'qk/vo?encoder_variant=shared_qk/vo'
WITHOUT_V = 'qk/vo?encoder_variant=qk/no_v'
WITHOUT_O = 'qk/vo?encoder_variant=qk/no_o'

C1 = Claim(
    name='C1',
    title='Q Q^T is symmetric, with half the information',
    statement='Q Q^T is symmetric, carries half the information of Q K^T, and its diagonal '
    'dominates.',
    source=f'{threads.SYMMETRIC}, the answer',
    rule='Each part is a context. Half the information means a share of 0.4 to 0.6 of the free '
    'parameters of A, or of the pattern of T tokens. Three parts say that the diagonal dominates, '
    'at initialization with T = 64: it is the largest entry in more than half of the rows; it '
    'always has the largest score of all; it is always above the sum of the absolute values of the '
    'rest of its row.',
    checks=(
        counts.symmetry,
        counts.half_the_numbers,
        counts.half_the_pattern,
        counts.dominant_diagonal,
    ),
    conditions={
        'part: symmetry; half of A; half of the pattern, T > D; half of the pattern, T > D, '
        'causal mask; diagonal the largest of its row, H > 2 ln T; diagonal has the largest score '
        'of all': (
            'T > D, for half of the information, and H > 2 ln T, for a diagonal entry that is the '
            'largest of its row; at H = 64 and T = 64 it is never above the sum of the rest of its '
            'row'
        ),
    },
    meanings={
        'holds': (
            'one matrix for queries and keys ties the scores of each pair of tokens, halves what '
            'they can express, and makes tokens attend to themselves at initialization'
        ),
        'part: symmetry; half of A; half of the pattern, T > D; half of the pattern, T > D, '
        'causal mask; diagonal the largest of its row, H > 2 ln T; diagonal has the largest score '
        'of all': (
            'one matrix for queries and keys ties the scores of each pair of tokens, halves what '
            'they can express in sequences longer than D, and makes tokens attend to themselves '
            'at initialization if heads are wide'
        ),
        'fails': 'one matrix for queries and keys restricts the scores in none of these ways',
    },
)

C2 = Claim(
    name='C2',
    title="Q Q^T makes a translator's encoder worse",
    statement='Q Q^T in the encoder of a translation model works, saves parameters and performs '
    'worse.',
    source=EXPERIMENT,
    rule="Holds if one matrix for queries and keys is worse at the baseline's shape, at every "
    'width.',
    reported='d_model from 128 to 2048: works, saves parameters, performs worse',
    expectations=(Expectation('translation', TIED, 'worse', at=Kind.SAME_SHAPE),),
    meanings={
        'holds': (
            'one matrix for queries and keys in the encoder of a translator costs more than the '
            'margin at the same shape'
        ),
        'holds only if': (
            'one matrix for queries and keys in the encoder of a translator costs more than the '
            'margin at some widths only'
        ),
        'fails': (
            'one matrix for queries and keys in the encoder of a translator does not cost more '
            'than the margin, even at the same shape'
        ),
        'undecided': (
            'not known whether one matrix for queries and keys in the encoder of a translator '
            'costs more than the margin'
        ),
    },
)

C3 = Claim(
    name='C3',
    title='Q Q^T in an encoder is not better with its savings reinvested',
    statement='With d_model adjusted to about the same number of parameters, Q Q^T in the encoder '
    'still does not become better.',
    source=EXPERIMENT,
    rule='Holds if one matrix for queries and keys is not better by more than the margin at equal '
    'parameter count, at every width.',
    expectations=(Expectation('translation', TIED, 'not_better'),),
    meanings={
        'holds': (
            'one matrix for queries and keys in the encoder of a translator does not pay: with '
            'its savings reinvested, the loss is not lower by more than the margin'
        ),
        'holds only if': (
            'one matrix for queries and keys in the encoder of a translator pays at some widths '
            'only, with its savings reinvested'
        ),
        'fails': (
            'one matrix for queries and keys in the encoder of a translator pays: with its '
            'savings reinvested, the loss is lower by more than the margin'
        ),
        'undecided': (
            'not known whether one matrix for queries and keys in the encoder of a translator '
            'pays, with its savings reinvested'
        ),
    },
)

C4 = Claim(
    name='C4',
    title='without W_V an encoder is worse, and not better at equal count',
    statement='Replacing V does the same: the encoder is worse at the same shape, and not better '
    'at equal parameter count.',
    source=EXPERIMENT,
    rule="Holds if the encoder without W_V is worse at the baseline's shape, and at equal "
    'parameter count not better by more than the margin, at every width.',
    expectations=(
        Expectation(
            'translation', WITHOUT_V, 'worse', at=Kind.SAME_SHAPE, context={'shape': 'equal'}
        ),
        Expectation('translation', WITHOUT_V, 'not_better', context={'shape': 'matched'}),
    ),
    meanings={
        'holds': (
            'dropping W_V from the encoder of a translator costs more than the margin at the same '
            'shape, and does not pay at equal parameter count'
        ),
        'holds only if': (
            'what dropping W_V from the encoder of a translator costs depends on the width, or on '
            'where its savings go'
        ),
        'fails': (
            'dropping W_V from the encoder of a translator costs no more than the margin at the '
            'same shape, and pays at equal parameter count'
        ),
        'undecided': 'not known what dropping W_V from the encoder of a translator costs',
    },
)

C5 = Claim(
    name='C5',
    title='without W_O an encoder is not better at equal parameter count',
    statement='Dropping W_O in the encoder is never better than about break-even at equal '
    'parameter count.',
    source=EXPERIMENT,
    rule='Holds if the encoder without W_O is not better by more than the margin at equal '
    'parameter count, at every width.',
    expectations=(Expectation('translation', WITHOUT_O, 'not_better'),),
    meanings={
        'holds': (
            'dropping W_O from the encoder of a translator does not pay: at equal parameter '
            'count, the loss is not lower by more than the margin'
        ),
        'holds only if': 'dropping W_O from the encoder of a translator pays at some widths only',
        'fails': (
            'dropping W_O from the encoder of a translator pays: at equal parameter count, the '
            'loss is lower by more than the margin'
        ),
        'undecided': (
            'not known whether dropping W_O from the encoder of a translator pays at equal '
            'parameter count'
        ),
    },
)

C6 = Claim(
    name='C6',
    title='C2 to C5 also hold for encoder-only and decoder-only models',
    statement='The conclusions of C2 to C5 do not differ for encoder-only and decoder-only models.',
    source=f'{threads.SYMMETRIC}: the answer expects the same conclusions',
    rule='Holds if the following is true in both kinds of model. Q = K, and attention without '
    "W_V, are worse at the baseline's shape. These two, and attention without W_O, are not better "
    'by more than the margin at equal parameter count.',
    expectations=tuple(
        Expectation(study, variant, relation, at=at, context={'conclusion': name})
        for variant, relation, at, name, studies in (
            ('shared_qk/vo', 'worse', Kind.SAME_SHAPE, 'as in C2', ('masked_lm', 'lm_sharing')),
            ('shared_qk/vo', 'not_better', 'matched', 'as in C3', ('masked_lm', 'lm_sharing')),
            ('qk/no_v', 'worse', Kind.SAME_SHAPE, 'as in C4', ('masked_lm', 'lm_dropped')),
            ('qk/no_v', 'not_better', 'matched', 'as in C4', ('masked_lm', 'lm_dropped')),
            ('qk/no_o', 'not_better', 'matched', 'as in C5', ('masked_lm', 'lm_dropped')),
        )
        for study in studies
    ),
    conditions={
        'conclusion: as in C2; as in C3': 'it is about Q = K, not W_O; W_V is left open',
    },
    meanings={
        'holds': (
            'what Q = K, no W_V and no W_O cost the encoder of a translator, they also cost '
            'encoder-only and decoder-only models'
        ),
        'holds only if': (
            'some conclusions on the encoder of a translator carry over to encoder-only and '
            'decoder-only models, and some do not'
        ),
        'conclusion: as in C2; as in C3': (
            'in encoder-only and decoder-only models, Q = K costs more than the margin at the same '
            'shape and does not pay at equal parameter count; without W_V or W_O, they do not all '
            'lose as translators do'
        ),
        'fails': (
            'no conclusion on the encoder of a translator carries over to encoder-only or '
            'decoder-only models'
        ),
        'undecided': (
            'not known whether conclusions on the encoder of a translator carry over to '
            'encoder-only and decoder-only models'
        ),
    },
)

C7 = Claim(
    name='C7',
    title='W_Q and W_K choose where to attend, W_V and W_O what to move',
    statement='2 x 2 matrices show three things. W_Q and W_K act only through A = W_Q W_K^T, and '
    'choose where to attend. W_V and W_O act only through B = W_V W_O, and choose what to move. '
    'Q Q^T ties A and its transpose.',
    source=f'{threads.SYMMETRIC}: intuition from 2 x 2 matrices',
    rule='Holds if a layer has the A and B worked out by hand; if the output is the same with '
    'W_Q M and W_K M^-T, or with W_V M and M^-1 W_O; if another W_V and W_O leave the pattern '
    'unchanged; and if Q Q^T ties each pair of scores.',
    checks=(rewrites.worked_by_hand, rewrites.where_and_what, rewrites.gauge),
    meanings={
        'holds': (
            'only the products W_Q W_K^T and W_V W_O matter: the first decides where a head '
            'attends, the second what it moves, and each can be rewritten without the other'
        ),
        'fails': (
            'the two pairs of matrices do more than their products say, so rewriting one changes '
            'the layer'
        ),
    },
)

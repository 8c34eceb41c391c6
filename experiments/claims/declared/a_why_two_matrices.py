"""Group A: why two matrices, W_Q and W_K?"""

from experiments.claims.checks import counts, rewrites
from experiments.claims.claim import Claim, Expectation
from experiments.claims.declared import threads

A1 = Claim(
    name='A1',
    title='one W_QK can replace W_Q and W_K',
    statement='softmax(X W_Q W_K^T X^T) can be written with one D x D matrix W_QK, whose rank '
    'is at most H.',
    source=threads.TWO_MATRICES,
    rule='Holds where one matrix gives the same softmax input and output in float64 and has rank '
    'H; what acts between W_Q and W_K is a context.',
    checks=(rewrites.one_matrix, rewrites.what_stands_between),
    conditions={
        'between W_Q and W_K: nothing': 'nothing acts between W_Q and W_K, as RoPE or QK-norm would'
    },
    meanings={
        'holds': (
            'one W_QK per head can replace W_Q and W_K without changing the function, whatever '
            'acts between them'
        ),
        'between W_Q and W_K: nothing': (
            'one W_QK per head can replace W_Q and W_K without changing the function, but not '
            'with RoPE or QK-norm'
        ),
        'fails': 'one W_QK per head cannot replace W_Q and W_K without changing the function',
    },
)

A2 = Claim(
    name='A2',
    title='merging W_Q and W_K adds parameters if D > 2 H',
    statement='One matrix per head has D^2 parameters, and two have 2 D H. So merging adds '
    'parameters if and only if D > 2 H.',
    source=threads.TWO_MATRICES,
    rule='Holds if the parameters counted on layers are N D^2 and 2 N D H at every D and H, '
    'and merging adds parameters exactly where D > 2 H.',
    checks=(counts.merged_against_factored,),
    meanings={
        'holds': (
            'merging W_Q and W_K costs parameters, unless a head is at least half as wide as the '
            'model'
        ),
        'fails': (
            'count the parameters of your layer: D > 2 H does not say whether merging adds any'
        ),
    },
)

A3 = Claim(
    name='A3',
    title='merging W_Q and W_K adds multiply-adds if D >= 2 H',
    statement='Per head, the scores of T tokens take 2 T D H + T^2 H multiply-adds with two '
    'matrices and T D^2 + T^2 D with one. One matrix never takes fewer if D >= 2 H, takes fewer '
    'below T = D (2 H - D) / (D - H) if H < D < 2 H, and always takes fewer if H >= D.',
    source=threads.TWO_MATRICES,
    rule='Holds if the compiled programs have these counts, and the counts cross at this T.',
    checks=(counts.multiply_adds, counts.where_they_cross),
    meanings={
        'holds': (
            'merging W_Q and W_K never saves multiply-adds if a head is at most half as wide as '
            'the model'
        ),
        'fails': (
            'measure your layer: these formulas do not give the multiply-adds of its compiled '
            'program'
        ),
    },
)

A4 = Claim(
    name='A4',
    title='Linear(D, D) holds the matrices of all heads',
    statement='A square Linear(D, D) holds N rectangular D x H matrices side by side: equal '
    'function, equal parameter count.',
    source=threads.EVERY_HEAD,
    rule='Holds if both compute the same output in float64 and have equally many parameters.',
    checks=(rewrites.side_by_side,),
    meanings={
        'holds': (
            'one square projection and a narrow one per head are the same layer, so either can '
            'be used'
        ),
        'fails': 'one square projection and a narrow one per head are different layers',
    },
)

A5 = Claim(
    name='A5',
    title='N heads cost as much as one, and give N patterns',
    statement='With H = D / N a head has 2 D^2 / N parameters in W_Q and W_K. N heads together '
    'have 2 D^2, and give N attention patterns.',
    source=threads.EVERY_HEAD,
    rule='Holds if these are the counts at every N, and the patterns of N heads are linearly '
    'independent.',
    checks=(counts.heads_of_a_fixed_width,),
    meanings={
        'holds': (
            'dividing D among more heads gives more attention patterns at no cost in parameters'
        ),
        'fails': 'dividing D among more heads adds parameters, or gives no more attention patterns',
    },
)

A6 = Claim(
    name='A6',
    title='W_Q and W_K of full size in every head lower the loss',
    statement='W_Q and W_K of full size (D x D) in every head give a lower loss at equal '
    'parameter count.',
    source=f'{threads.TWO_MATRICES}, about papers that define heads this way',
    rule='Holds if both ways to write scores of rank D, as two full matrices and as one, are '
    'better than heads of size D/N, each at its own learning rate.',
    expectations=(
        Expectation('lm_added', 'full_size/vo', 'better', context={'scores': 'W_Q W_K^T'}),
        Expectation('lm_dropped', 'merged/vo', 'better', context={'scores': 'W_QK'}),
    ),
    meanings={
        'holds': (
            'scores of rank D in every head lower the loss by more than the margin, as two full '
            'matrices and as one W_QK'
        ),
        'holds only if': (
            'whether scores of rank D in every head lower the loss by more than the margin '
            'depends on how they are written, or on the setting'
        ),
        'fails': (
            'scores of rank D in every head do not pay: the loss is not lower by more than the '
            'margin, with two full matrices or with one W_QK'
        ),
        'undecided': (
            'not known whether scores of rank D in every head lower the loss by more than the '
            'margin'
        ),
    },
)

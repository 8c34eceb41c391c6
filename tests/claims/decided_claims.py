"""Claims with every verdict and every kind of row, as `experiments.claims` decides them."""

import math

from qkattn.claims.decided import ClaimResult, ClaimVerdict, Kind, Row, Speaks, stored

SIZES = ('d_model=64', 'd_model=128')
CORPORA = ('stdlib', 'multi30k')
RAN = {
    'command': 'python -m experiments.claims --scale=cpu --claims={}',
    'commit': '0123456789ab',
    'hardware': '1 x cpu (2 cores)',
    'seconds': 5025.0,
}
EXACT = {'kind': Kind.EXACT, 'context': {}, 'speaks': Speaks.FOR}
HOSTILE = '<b>x</b> & $y$ | `z`'


def of_claim(name, statement, verdict, rows=(), **more):
    """A claim whose command names it, with the digits of claims.json; the first row decides."""
    about = {
        'source': 'a forum thread',
        'reported': None,
        'rule': 'Each check agrees with the expected number within its tolerance.',
        'decisive': 0 if rows else None,
    }
    ran = RAN | {'command': RAN['command'].format(name)}
    values = about | ran | more
    values |= {'name': name, 'title': f'in short, {name}', 'statement': statement}
    return ClaimResult(scale='cpu', verdict=verdict, rows=tuple(map(stored, rows)), **values)


def parts(what, arm, context, removed, reinvested, speaks=Speaks.FOR, half=0.004, **more):
    """Removed, reinvested and their sum of one arm in one context."""
    word = {Speaks.FOR: 'worse', Speaks.AGAINST: 'better'}.get(speaks, 'undecided')
    values = {Kind.REMOVED: removed, Kind.REINVESTED: reinvested}
    values[Kind.MATCHED] = removed + reinvested
    about = {'what': what, 'arm': arm, 'context': context, 'unit': 'nats/token'} | more
    return [
        Row(
            kind=kind,
            value=value,
            low=value - half,
            high=value + 1.3 * half,
            speaks=speaks if kind == Kind.MATCHED else Speaks.BESIDE,
            word=word if kind == Kind.MATCHED else None,
            relation='not_better' if kind == Kind.MATCHED else None,
            **about,
        )
        for kind, value in values.items()
    ]


def single_head():
    """One arm in four contexts, with the decisive row last."""
    rows = []
    for i, size in enumerate(SIZES):
        for j, corpus in enumerate(CORPORA):
            context = {'model': 'decoder', 'size': size, 'corpus': corpus, 'steps': '500'}
            values = 0.0102 + 0.003 * i, -0.0124 - 0.002 * j
            rows += parts('query_free/vo', 'query_free/vo', context, *values, Speaks.OPEN)
    return rows


def sharing():
    """Several arms in one context, at equal width and at equal parameter count."""
    context = {'model': 'decoder', 'size': SIZES[0], 'corpus': CORPORA[0]}
    arms = {
        'qk/vo?num_kv_heads=1': (0.0078, -0.0101, Speaks.OPEN),
        'qk/vo?num_kv_heads=2': (0.0049, -0.0061, Speaks.AGAINST),
        'qk/k_is_v': (0.0743, -0.0164, Speaks.FOR),
        'shared_qk/vo': (0.2429, -0.0057, Speaks.FOR),
        'shared_qk/k_is_v': (0.2829, -0.0157, Speaks.FOR),
    }
    return [row for arm, of in arms.items() for row in parts(arm, arm, context, *of)]


def drift():
    """Lines of points without intervals, on a logarithmic scale."""
    about = {'kind': Kind.MEASURED, 'x_label': 'training step', 'unit': 'relative difference'}
    return [
        Row(
            what=precision,
            context={'precision': precision},
            x=float(step),
            value=scale * math.sqrt(1 + step),
            speaks=Speaks.FOR,
            **about,
        )
        for precision, scale in {'fp64': 2e-16, 'fp32': 1e-7, 'bf16': 4e-3}.items()
        for step in range(0, 501, 100)
    ]


def ranks():
    about = {'kind': Kind.MEASURED, 'x_label': 'rank r', 'unit': 'nats/token'}
    return [
        Row(
            what='difference to full rank',
            arm='merged/vo',
            context={'size': size},
            x=float(rank),
            value=0.3 / rank - 0.003 * i,
            low=0.3 / rank - 0.003 * i - 0.01,
            high=0.3 / rank - 0.003 * i + 0.008,
            speaks=Speaks.FOR if rank > 16 else Speaks.AGAINST,
            **about,
        )
        for i, size in enumerate(SIZES)
        for rank in (1, 2, 4, 8, 16, 32, 64)
    ]


def claims():
    """One claim of each sort, in the order of their names."""
    rank = Row(what='rank of W_Q W_K^T', value=16.0, expected=16.0, tolerance=0.0, **EXACT)
    fold = Row(
        what='scores, merged against factored',
        value=3.1e-16,
        expected=0.0,
        tolerance=1e-12,
        unit='relative difference',
        **EXACT,
    )
    bad = Row(
        what=HOSTILE,
        value=0.75,
        expected=0.5,
        tolerance=1e-9,
        **EXACT | {'speaks': Speaks.AGAINST},
    )
    encoder = {'model': 'encoder-decoder', 'size': SIZES[0], 'corpus': 'CLDR'}
    return (
        of_claim(
            'A1',
            'softmax(X W_Q W_K^T X^T) can be written with one W_QK of rank at most H.',
            ClaimVerdict.HOLDS,
            [rank, fold],
        ),
        of_claim(
            'B2',
            'Dropping W_Q in a single head changes the training loss by 0.01.',
            ClaimVerdict.UNDECIDED,
            single_head(),
            source='a forum thread with an experiment, https://example.org/thread',
            reported='training loss differs by 0.01',
            rule='The arm at equal parameter count is equivalent to the baseline in every context.',
            lacking='needs 48 seeds',
            needed='48 seeds in place of 12, to find 0.005 nats/token at d_model=64',
            decisive=2,
            studies=('single_head',),
        ),
        of_claim(
            'B3',
            'The difference of B2 is a numerical effect of one product against two.',
            ClaimVerdict.FAILS,
            drift(),
            rule='The drift after training stays within rounding in every precision.',
            studies=('single_head',),
            decisive=11,
        ),
        of_claim(
            'B7',
            'W_Q and W_K allow a low-rank W.',
            ClaimVerdict.HOLDS_ONLY_IF,
            ranks(),
            condition='r is above 16',
            rule='The loss at rank r is equivalent to that at full rank.',
            studies=('rank',),
        ),
        of_claim(
            'C1',
            'Q Q^T carries half the information of Q K^T.',
            ClaimVerdict.FAILS,
            [bad],
            source=HOSTILE,
        ),
        of_claim(
            'C2',
            'With Q = K an encoder works, saves parameters and performs worse.',
            ClaimVerdict.HOLDS,
            parts('shared_qk/vo', 'shared_qk/vo', encoder, 0.0312, -0.0021),
            studies=('encoder_side',),
            decisive=2,
            rule='The arm is worse than the baseline in every context.',
        ),
        of_claim(
            'D2',
            'The over-parameterised form trains differently.',
            ClaimVerdict.UNDECIDED,
            needed='--scale=cpu: overparameterised with 12 seeds of 2,000,000 tokens at d_model=64',
            missing=(
                'overparameterised/study.json does not exist; get it with python -m '
                'experiments.claims --claims=D2 --scale=cpu.',
            ),
            command=None,
            commit=None,
            hardware=None,
            seconds=None,
        ),
        of_claim(
            'E4',
            'K = V, Q = K and Q = K = V order in a causal LM.',
            ClaimVerdict.HOLDS,
            sharing(),
            studies=('sharing',),
            decisive=8,
            rule='The arms are ordered by their loss at equal parameter count.',
        ),
    )

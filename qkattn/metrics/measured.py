"""Metrics that one of `train.measurements.MEASUREMENTS` computes when a run ends."""

from qkattn.metrics.metric import Metric

INDUCTION_GAIN = Metric(
    name='induction_gain',
    label='induction gain',
    unit='nats/token',
    direction='higher',
    description='How much lower the loss is on the second copy of random tokens than on the first.',
    role='probe',
    decimals=3,
    prefixes=('val',),
)
INDUCTION_ACCURACY = Metric(
    name='induction_accuracy',
    label='induction accuracy',
    unit='%',
    direction='higher',
    description='Accuracy on the second copy of random tokens.',
    role='probe',
    scale=100.0,
    decimals=1,
    prefixes=('val',),
)
BLEU = Metric(
    name='bleu',
    label='BLEU',
    direction='higher',
    description='Corpus BLEU of the translations, in percent (sacrebleu).',
    role='score',
    decimals=2,
    details={'num_sentences': int, 'bleu_signature': str},
)
CHRF = Metric(
    name='chrf',
    label='chrF',
    direction='higher',
    description='Corpus chrF2 of the translations, in percent (sacrebleu).',
    role='score',
    decimals=2,
    details={'chrf_signature': str},
)
EXACT_MATCH = Metric(
    name='exact_match',
    label='exact match',
    unit='%',
    direction='higher',
    description='Fraction of the translations that are their reference, character by character.',
    role='score',
    scale=100.0,
    decimals=2,
)

"""Scores of translations against references."""

import importlib
from collections.abc import Sequence


def translation_scores(
    hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False
) -> dict[str, float | int | str]:
    """Scores of a whole test set of detokenized text, with one reference per sentence.

    `bleu` and `chrf` are corpus BLEU (Papineni et al. 2002) and chrF2 (Popović 2015) in percent, as
    computed by sacrebleu (Post 2018), comparable where their signatures agree; `exact_match` is the
    fraction of the hypotheses that equal their reference. With `lowercase` all scores ignore case.
    """
    metrics = importlib.import_module('sacrebleu.metrics')  # slow, and seldom needed
    bleu = metrics.BLEU(lowercase=lowercase)
    chrf = metrics.CHRF(lowercase=lowercase)
    # Before the signatures, which name the number of references that a score was computed from.
    bleu_score = bleu.corpus_score(hypotheses, [references]).score
    chrf_score = chrf.corpus_score(hypotheses, [references]).score
    num_equal = 0
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        if lowercase:
            hypothesis = hypothesis.lower()
            reference = reference.lower()
        if hypothesis == reference:
            num_equal += 1
    return {
        'bleu': bleu_score,
        'chrf': chrf_score,
        'bleu_signature': str(bleu.get_signature()),
        'chrf_signature': str(chrf.get_signature()),
        'exact_match': num_equal / len(hypotheses),
        'num_sentences': len(hypotheses),
    }

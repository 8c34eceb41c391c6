"""Scores of translations against references."""

import importlib
from collections.abc import Sequence


def translation_scores(
    hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False
) -> dict[str, float | int | str]:
    """Scores the translations of a whole test set.

    Args:
      hypotheses: the translations, as detokenized text.
      references: one reference translation of each.
      lowercase: whether the scores ignore case.

    Returns:
      'bleu' and 'chrf': corpus BLEU (Papineni et al. 2002) and chrF2 (Popović 2015) in percent,
        computed by sacrebleu (Post 2018).
      'bleu_signature' and 'chrf_signature': how sacrebleu computed them. Scores are comparable if
        their signatures are equal.
      'exact_match': the fraction of hypotheses that equal their reference.
      'num_sentences': the number of hypotheses.
    """
    metrics = importlib.import_module('sacrebleu.metrics')  # slow to import, and rarely needed
    bleu = metrics.BLEU(lowercase=lowercase)
    chrf = metrics.CHRF(lowercase=lowercase)
    # The signatures below are complete only after a score was computed: they name the number of
    # references.
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

"""Scores of translations against references."""

import importlib
from collections.abc import Sequence


def translation_scores(
    hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False
) -> dict[str, float | int | str]:
    """Scores translations against references.

    Args:
        hypotheses: The translations, as detokenized text.
        references: One reference for each translation.
        lowercase: Whether the scores ignore case.

    Returns:
        'bleu', 'chrf': corpus BLEU (Papineni et al. 2002) and chrF2 (Popović 2015) in percent,
        computed by sacrebleu (Post 2018). 'bleu_signature', 'chrf_signature': the settings of
        sacrebleu. Scores are comparable if their signatures are equal. 'exact_match': the fraction
        of translations that equal their reference. 'num_sentences': the number of translations.
    """
    metrics = importlib.import_module('sacrebleu.metrics')  # slow to import
    bleu = metrics.BLEU(lowercase=lowercase)
    chrf = metrics.CHRF(lowercase=lowercase)
    # sacrebleu completes the signatures when it computes scores.
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

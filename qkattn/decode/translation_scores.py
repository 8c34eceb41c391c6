"""BLEU and chrF of translations, computed by sacrebleu."""

import importlib
from collections.abc import Sequence

from qkattn.errors import ConfigError

# The other tokenizers of sacrebleu download models or require further packages.
TOKENIZERS = ('13a', 'intl', 'char', 'zh', 'none')


def translation_scores(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    lowercase: bool = False,
    tokenize: str = '13a',
) -> dict[str, float | int | str]:
    """Scores of a whole test set, with one reference per sentence.

    Args:
      hypotheses: detokenized text.
      references: detokenized text, one per hypothesis, in the same order.
      lowercase: whether all scores ignore case.
      tokenize: the tokenizer of BLEU, one of TOKENIZERS; chrF needs none.

    Returns:
      bleu: corpus BLEU in percent (Papineni et al. 2002), as computed by sacrebleu (Post 2018).
      chrf: corpus chrF2 in percent (Popović 2015), as computed by sacrebleu.
      bleu_signature, chrf_signature: sacrebleu's settings; scores are comparable where they agree.
      exact_match: fraction of the hypotheses that equal their reference, character by character.
      num_sentences: number of sentences.

    Raises:
      ConfigError: no sentences, a reference missing or too many, or an unknown tokenizer.
    """
    if tokenize not in TOKENIZERS:
        raise ConfigError(f'tokenize={tokenize!r} must be one of {", ".join(TOKENIZERS)}')
    if len(hypotheses) != len(references):
        raise ConfigError(
            f'{len(hypotheses)} hypotheses cannot be scored against {len(references)} references; '
            'there must be one for each'
        )
    if not len(hypotheses):
        raise ConfigError('hypotheses must hold at least one sentence')
    metrics = importlib.import_module('sacrebleu.metrics')  # slow, and seldom needed
    bleu = metrics.BLEU(lowercase=lowercase, tokenize=tokenize)
    chrf = metrics.CHRF(lowercase=lowercase)
    scores = {
        'bleu': bleu.corpus_score(hypotheses, [references]).score,
        'chrf': chrf.corpus_score(hypotheses, [references]).score,
    }
    same = [
        hypothesis.lower() == reference.lower() if lowercase else hypothesis == reference
        for hypothesis, reference in zip(hypotheses, references, strict=True)
    ]
    return scores | {
        'bleu_signature': str(bleu.get_signature()),
        'chrf_signature': str(chrf.get_signature()),
        'exact_match': sum(same) / len(same),
        'num_sentences': len(same),
    }

"""Metrics against arithmetic by hand."""

import math
import re
import subprocess
import sys

import pytest

from qkattn.decode import translation_scores
from qkattn.errors import ConfigError


def test_bleu_is_the_geometric_mean_of_clipped_precisions_and_the_brevity_penalty():
    # Pooled over both sentences. Matches of n = 1: the cat sat on (the second 'the' is clipped),
    # a; n = 2: 'the cat', 'cat sat', 'sat on'; n = 3: 'the cat sat', 'cat sat on'; n = 4: one.
    hypotheses = ['the cat sat on the', 'a b']
    references = ['the cat sat on a mat', 'a c']
    precisions = [5 / 7, 3 / 5, 2 / 3, 1 / 2]
    brevity = math.exp(1 - 8 / 7)
    want = 100 * brevity * math.prod(precisions) ** (1 / 4)
    got = translation_scores.translation_scores(hypotheses, references)
    assert got['bleu'] == pytest.approx(want, rel=1e-6)
    assert got['num_sentences'] == 2 and got['exact_match'] == 0.0


def test_chrf_is_f2_of_mean_precision_and_recall_of_character_n_grams():
    # 'ab' against 'abc': n = 1: 2 of 2, 2 of 3; n = 2: 1 of 1, 1 of 2; longer n are in neither.
    def f2(precision, recall):
        return 5 * precision * recall / (4 * precision + recall)

    got = translation_scores.translation_scores(['ab'], ['abc'])
    precision, recall = 1.0, (2 / 3 + 1 / 2) / 2
    assert got['chrf'] == pytest.approx(100 * f2(precision, recall), rel=1e-6)


def test_a_perfect_and_a_useless_translation():
    text = ['Ein Hund läuft über die Wiese .', 'Zwei Männer stehen am Herd .']
    best = translation_scores.translation_scores(text, text)
    assert best['bleu'] == pytest.approx(100) and best['chrf'] == pytest.approx(100)
    assert best['exact_match'] == 1.0
    worst = translation_scores.translation_scores(['', ''], text)
    assert (worst['bleu'], worst['chrf'], worst['exact_match']) == (0, 0, 0)


def test_case_counts_unless_asked_not_to():
    hypotheses, references = ['EIN HUND LÄUFT HIER', 'ja'], ['Ein Hund läuft hier', 'nein']
    cased = translation_scores.translation_scores(hypotheses, references)
    uncased = translation_scores.translation_scores(hypotheses, references, lowercase=True)
    assert cased['exact_match'] == 0.0 and uncased['exact_match'] == 0.5
    assert cased['bleu'] < uncased['bleu'] and cased['chrf'] < uncased['chrf']
    assert '|case:mixed|' in cased['bleu_signature'] and '|case:lc|' in uncased['bleu_signature']
    assert '|case:mixed|' in cased['chrf_signature'] and '|case:lc|' in uncased['chrf_signature']


@pytest.mark.parametrize('tokenize', translation_scores.TOKENIZERS)
def test_the_signature_names_the_tokenizer(tokenize):
    got = translation_scores.translation_scores(['ja, gut!'], ['ja, gut!'], tokenize=tokenize)
    assert f'|tok:{tokenize}|' in got['bleu_signature']
    assert re.search(r'\|version:\d+\.\d+\.\d+$', got['bleu_signature'])
    assert got['chrf_signature'].startswith('nrefs:1|')


def test_punctuation_is_split_off():
    # 'gut !' against 'gut .': of the 6 tokens all but the last match.
    split = translation_scores.translation_scores(['ja, das ist gut!'], ['ja, das ist gut.'])
    whole = translation_scores.translation_scores(
        ['ja, das ist gut!'], ['ja, das ist gut.'], tokenize='none'
    )
    precisions = [5 / 6, 4 / 5, 3 / 4, 2 / 3]
    assert split['bleu'] == pytest.approx(100 * math.prod(precisions) ** (1 / 4), rel=1e-6)
    assert whole['bleu'] < split['bleu']


@pytest.mark.parametrize(
    ('hypotheses', 'references', 'options', 'said'),
    [
        ([], [], {}, 'at least one sentence'),
        (['a'], ['a', 'b'], {}, '1 hypotheses cannot be scored against 2 references'),
        (['a'], ['a'], {'tokenize': 'spm'}, "tokenize='spm' must be one of 13a, intl"),
    ],
)
def test_bad_input_is_one_sentence(hypotheses, references, options, said):
    with pytest.raises(ConfigError, match=said):
        translation_scores.translation_scores(hypotheses, references, **options)


def test_no_network_is_used_and_sacrebleu_is_loaded_only_to_score():
    program = """
import socket, sys
from qkattn import evaluate
assert 'sacrebleu' not in sys.modules
def refuse(*arguments):
    raise AssertionError(f'connects to {arguments}')
socket.socket.connect = socket.getaddrinfo = refuse
for tokenize in translation_scores.TOKENIZERS:
    translation_scores.translation_scores(['a b c d'], ['a b c d'], tokenize=tokenize)
assert 'sacrebleu' in sys.modules
"""
    subprocess.run([sys.executable, '-c', program], check=True)

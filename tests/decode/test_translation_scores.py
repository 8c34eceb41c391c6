"""BLEU and chrF against arithmetic by hand."""

import math
import re
import socket

import pytest

from qkattn.decode.translation_scores import TOKENIZERS, translation_scores
from qkattn.errors import ConfigError


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*arguments):
        raise AssertionError(f'connects to {arguments}')

    monkeypatch.setattr(socket.socket, 'connect', refuse)
    monkeypatch.setattr(socket, 'getaddrinfo', refuse)


def test_bleu_is_the_geometric_mean_of_clipped_precisions_and_the_brevity_penalty():
    # Pooled over both sentences. Matches of n = 1: the cat sat on (the second 'the' is clipped),
    # a; n = 2: 'the cat', 'cat sat', 'sat on'; n = 3: 'the cat sat', 'cat sat on'; n = 4: one.
    hypotheses = ['the cat sat on the', 'a b']
    references = ['the cat sat on a mat', 'a c']
    precisions = [5 / 7, 3 / 5, 2 / 3, 1 / 2]
    brevity = math.exp(1 - 8 / 7)
    scores = translation_scores(hypotheses, references)
    assert scores['bleu'] == pytest.approx(100 * brevity * math.prod(precisions) ** (1 / 4))
    assert scores['num_sentences'] == 2 and scores['exact_match'] == 0.0


def test_chrf_is_f2_of_mean_precision_and_recall_of_character_n_grams():
    # 'ab' against 'abc': n = 1: 2 of 2, 2 of 3; n = 2: 1 of 1, 1 of 2; longer n are in neither.
    precision, recall = 1.0, (2 / 3 + 1 / 2) / 2
    f2 = 5 * precision * recall / (4 * precision + recall)
    assert translation_scores(['ab'], ['abc'])['chrf'] == pytest.approx(100 * f2)


@pytest.mark.parametrize('tokenize', TOKENIZERS)
def test_a_perfect_and_a_useless_translation(tokenize):
    text = ['Ein Hund läuft über die Wiese .', 'Zwei Männer stehen am Herd .']
    for hypotheses, percent in ((text, 100), (['', ''], 0)):
        scores = translation_scores(hypotheses, text, tokenize=tokenize)
        assert scores['bleu'] == pytest.approx(percent) and scores['chrf'] == pytest.approx(percent)
        assert scores['exact_match'] == percent / 100
        assert f'|tok:{tokenize}|' in scores['bleu_signature']
        assert re.search(r'\|version:\d+\.\d+\.\d+$', scores['bleu_signature'])
        assert scores['chrf_signature'].startswith('nrefs:1|')


def test_case_counts_unless_lowercase():
    hypotheses, references = ['EIN HUND LÄUFT HIER', 'ja'], ['Ein Hund läuft hier', 'nein']
    cased = translation_scores(hypotheses, references)
    uncased = translation_scores(hypotheses, references, lowercase=True)
    assert cased['exact_match'] == 0.0 and uncased['exact_match'] == 0.5
    for name in ('bleu', 'chrf'):
        assert cased[name] < uncased[name]
        assert '|case:mixed|' in cased[f'{name}_signature']
        assert '|case:lc|' in uncased[f'{name}_signature']


def test_punctuation_is_split_off():
    # 'gut !' against 'gut .': of the 6 tokens all but the last match.
    texts = ['ja, das ist gut!'], ['ja, das ist gut.']
    split, whole = translation_scores(*texts), translation_scores(*texts, tokenize='none')
    precisions = [5 / 6, 4 / 5, 3 / 4, 2 / 3]
    assert split['bleu'] == pytest.approx(100 * math.prod(precisions) ** (1 / 4))
    assert whole['bleu'] < split['bleu']


@pytest.mark.parametrize(
    ('hypotheses', 'references', 'options', 'message'),
    [
        ([], [], {}, 'at least one sentence'),
        (['a'], ['a', 'b'], {}, '1 hypotheses cannot be scored against 2 references'),
        (['a'], ['a'], {'tokenize': 'spm'}, "tokenize='spm' must be one of 13a, intl"),
    ],
)
def test_bad_input_is_one_sentence(hypotheses, references, options, message):
    with pytest.raises(ConfigError, match=message):
        translation_scores(hypotheses, references, **options)

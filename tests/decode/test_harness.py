"""What the harness is answered, against the model on one text at a time, without padding."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx, traverse_util
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models, pre_tokenizers

from qkattn.config import ModelConfig
from qkattn.data.tokenizers.subwords import FileTokenizer
from qkattn.data.tokenizers.tokenizer import ByteTokenizer, CharacterTokenizer
from qkattn.decode import harness
from qkattn.decode.harness import TextModel, windows
from qkattn.model import build
from tests.refusals import refused

CHARACTERS = CharacterTokenizer(' abcdefgh.\n')
# More ids than the tokenizer has: nothing generates or scores the others.
CONFIG = ModelConfig(
    d_model=16, num_layers=2, num_heads=2, context=40, vocab_size=16, init_embedding=3.0
)


@dataclasses.dataclass
class Request:
    """Stands for an Instance of the harness."""

    args: tuple[Any, ...]


def requests_of(*args):
    return [Request(arg) for arg in args]


@pytest.fixture(scope='module')
def decoder():
    return build(CONFIG, key=jax.random.key(3))


@pytest.fixture(scope='module')
def text_model(decoder):
    return TextModel(decoder, CHARACTERS, batch_size=2)


class NumpyDecoder:
    """The decoder in float64 numpy, on one text at a time, without padding and without a cache."""

    def __init__(self, decoder):
        params = nnx.to_pure_dict(nnx.state(decoder))
        self.p = traverse_util.flatten_dict(jax.tree.map(np.float64, params), sep='/')

    def log_probabilities(self, tokens):
        """log p_TV of the token behind each of `tokens`, over the ids of the tokenizer."""
        p = self.p
        T = len(tokens)
        x_TD = p['w_embedding_VD'][tokens] + p['w_position_TD'][:T]
        for layer in range(CONFIG.num_layers):
            block = {
                name.rpartition('/')[2]: array[layer]
                for name, array in p.items()
                if name.startswith('blocks/') and '_norm' not in name
            }
            y_TD = self.norm(x_TD) * p['blocks/attention_norm/g_D'][layer]
            q_TNH = np.einsum('td,dnh->tnh', y_TD, block['w_q_DNH'])
            k_SNH = np.einsum('td,dnh->tnh', y_TD, block['w_k_DKH'])
            v_SNH = np.einsum('td,dnh->tnh', y_TD, block['w_v_DKH'])
            logits_NTS = np.einsum('tnh,snh->nts', q_TNH, k_SNH) / np.sqrt(q_TNH.shape[-1])
            p_NTS = np.exp(logits_NTS) * np.tri(T)
            p_NTS /= p_NTS.sum(-1, keepdims=True)
            x_TD = x_TD + np.einsum('nts,snh,nhd->td', p_NTS, v_SNH, block['w_o_NHD'])
            h_TF = self.norm(x_TD) * p['blocks/mlp_norm/g_D'][layer] @ block['w_in_DF']
            tanh_TF = np.tanh(np.sqrt(2 / np.pi) * (h_TF + 0.044715 * h_TF**3))
            x_TD = x_TD + 0.5 * h_TF * (1 + tanh_TF) @ block['w_out_FD']
        logits_TV = self.norm(x_TD) * p['final_norm/g_D'] @ p['w_embedding_VD'].T
        logits_TV = logits_TV[:, : CHARACTERS.vocab_size]
        return logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True))

    def norm(self, x_TD):
        centered_TD = x_TD - x_TD.mean(-1, keepdims=True)
        return centered_TD / np.sqrt((centered_TD**2).mean(-1, keepdims=True) + 1e-5)

    def score(self, context, continuation):
        """log p of a continuation, and whether each of its tokens is the most probable one."""
        tokens = [*context, *continuation]
        log_p_TV = self.log_probabilities(tokens[:-1])[-len(continuation) :]
        nats = sum(log_p_TV[t, token] for t, token in enumerate(continuation))
        return nats, log_p_TV.argmax(-1).tolist() == continuation

    def continuation(self, prompt, num_tokens):
        """The most probable tokens, one after another, before a separator."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            token = int(self.log_probabilities(tokens)[-1].argmax())
            if token == CHARACTERS.separator:
                break
            tokens.append(token)
        return tokens[len(prompt) :]


@pytest.fixture(scope='module')
def plain(decoder):
    return NumpyDecoder(decoder)


def ids(text):
    return CHARACTERS.encode(text).tolist()


def test_continuations_are_scored_after_their_contexts(plain, text_model):
    pairs = [('abc', ' def.'), ('a', 'b'), ('hg fe\ndc ba', 'abcdefgh'), ('gg.', 'h' * 20)]
    scores = text_model.loglikelihood(requests_of(*pairs))
    for (context, continuation), (nats, is_greedy) in zip(pairs, scores, strict=True):
        expected = plain.score(ids(context), ids(continuation))
        assert (nats, is_greedy) == (pytest.approx(expected[0], rel=1e-5), expected[1])


def test_a_text_without_context_follows_the_separator(plain, text_model):
    ((nats, _),) = text_model.loglikelihood(requests_of(('', 'abc')))
    expected, _ = plain.score([CHARACTERS.separator], ids('abc'))
    assert nats == pytest.approx(expected, rel=1e-5)


def test_spaces_at_the_end_of_a_context_are_scored(plain, text_model):
    ((nats, _),) = text_model.loglikelihood(requests_of(('ab ', 'cd')))
    expected, _ = plain.score(ids('ab'), ids(' cd'))
    assert nats == pytest.approx(expected, rel=1e-5)


def test_a_greedy_continuation_is_told_from_another(plain, text_model):
    tokens = plain.continuation(ids('abc'), 5)
    assert len(tokens) == 5
    assert CHARACTERS.unknown not in tokens
    # The same but for the last token.
    other = [(tokens[-1] + 1) % 9]
    texts = [CHARACTERS.decode(tokens), CHARACTERS.decode(tokens[:-1] + other)]
    scores = text_model.loglikelihood(requests_of(*(('abc', text) for text in texts)))
    assert [is_greedy for _, is_greedy in scores] == [True, False]


def test_a_long_context_loses_its_beginning(plain, text_model, caplog):
    context = 'abcdefgh' * 10
    ((nats, _),) = text_model.loglikelihood(requests_of((context, 'abc')))
    kept = ids(context)[-(CONFIG.context + 1 - 3) :]
    expected, _ = plain.score(kept, ids('abc'))
    assert nats == pytest.approx(expected, rel=1e-5)
    assert 'the beginnings of 1 of 1 contexts are left out' in caplog.text


@pytest.mark.parametrize('length', [1, 39, 40, 41, 95])
def test_a_text_of_any_length_is_scored_in_windows(plain, text_model, length):
    text = ('abcdefgh. ' * 10)[:length]
    (nats,) = text_model.loglikelihood_rolling(requests_of((text,)))
    tokens = [CHARACTERS.separator, *ids(text)]
    expected = 0.0
    for begin in range(0, length, CONFIG.context):
        end = min(begin + CONFIG.context, length)
        # The last window reaches back into the one before it, to fill the context.
        first = max(0, end - CONFIG.context)
        window_nats, _ = plain.score(tokens[first : begin + 1], tokens[begin + 1 : end + 1])
        expected += window_nats
    assert nats == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize('length', range(0, 14))
def test_windows_are_those_of_the_harness(length):
    utils = pytest.importorskip('lm_eval.utils', reason="pip install -e '.[evaluate]'")
    tokens = list(range(1, length + 1))
    expected = utils.get_rolling_token_windows(
        token_list=tokens, prefix_token=0, max_seq_len=4, context_len=1
    )
    pairs = []
    for row in windows(tokens, 0, 4):
        pairs.append((row.tokens[: -row.num_scored], row.tokens[-row.num_scored :]))
    assert pairs == list(map(utils.make_disjoint_window, expected))


def test_windows_score_each_token_once():
    rows = list(windows(range(6), 9, 4))
    assert [(row.tokens, row.num_scored) for row in rows] == [
        ([9, 0, 1, 2, 3], 4),
        ([1, 2, 3, 4, 5], 2),
    ]


def test_prompts_of_different_lengths_are_continued_as_each_alone(plain, text_model):
    prompts = ['a', 'hgfedcba', 'ab' * 17, 'bad. fed\nace' * 2 + 'gggggggggg']
    options = {'until': [], 'max_gen_toks': 6}
    texts = text_model.generate_until(requests_of(*((prompt, options) for prompt in prompts)))
    for prompt, text in zip(prompts, texts, strict=True):
        assert text == CHARACTERS.decode(plain.continuation(ids(prompt), 6))


def test_a_continuation_ends_before_a_stop_text(text_model):
    ((whole,), (cut,)) = (
        text_model.generate_until(requests_of(('abc', {'until': stops, 'max_gen_toks': 9})))
        for stops in ([], ['no', 'stop'])
    )
    assert cut == whole
    assert len(whole) > 3
    # Of two stop texts, the one that comes first ends it.
    (cut,) = text_model.generate_until(
        requests_of(('abc', {'until': [whole[5:], whole[2:4]], 'max_gen_toks': 9}))
    )
    assert cut == whole[: whole.index(whole[2:4])]


def test_a_prompt_leaves_room_for_its_continuation(plain, text_model):
    prompt = 'abcdefgh' * 8
    options = {'until': [], 'max_gen_toks': 12}
    (text,) = text_model.generate_until(requests_of((prompt, options)))
    kept = ids(prompt)[-(CONFIG.context + 1 - 12) :]
    assert text == CHARACTERS.decode(plain.continuation(kept, 12))


def test_no_requests_have_no_answers(text_model):
    for method in ('loglikelihood', 'loglikelihood_rolling', 'generate_until'):
        assert getattr(text_model, method)([]) == []
    assert text_model.loglikelihood_rolling(requests_of(('',))) == [0.0]


def test_few_programs_are_compiled(text_model):
    before = harness.token_scores._cache_size()
    text_model.loglikelihood(requests_of(*(('a' * n, 'bc') for n in range(1, 38))))
    assert harness.token_scores._cache_size() - before <= 2


def test_a_word_that_a_tokenizer_file_lacks_is_refused(decoder):
    library = LibraryTokenizer(models.WordLevel({'[UNK]': 0, 'the': 1, 'cat': 2}, '[UNK]'))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    text_model = TextModel(decoder, FileTokenizer(library.to_str().encode()))
    assert text_model.encode('the cat') == [1, 2]
    with refused("the text 'the dog' has a part, which the tokenizer file-.* lacks"):
        text_model.encode('the dog')


@pytest.mark.parametrize(
    ('options', 'samples'),
    [
        ({}, False),
        ({'do_sample': False, 'temperature': 0.7}, False),
        ({'do_sample': True, 'temperature': 0.0}, False),
        ({'temperature': 0.7}, True),
        ({'do_sample': True}, True),
    ],
)
def test_a_task_whose_options_sample_is_refused(text_model, options, samples):
    if not samples:
        assert text_model.num_tokens_of(options) == 20
        return
    with refused('the task samples'):
        text_model.num_tokens_of(options)


def test_a_request_that_cannot_be_answered_is_refused_in_one_sentence(decoder, text_model):
    with refused("the text 'abxyz' has 'x', which the tokenizer characters-.* lacks; use tasks"):
        text_model.loglikelihood(requests_of(('abxyz', 'a')))
    with refused("the continuation 'aaa.* has 41 tokens, which do not fit into model.context=40"):
        text_model.loglikelihood(requests_of(('a', 'a' * 41)))
    with refused('max_gen_toks=41 of the task must be from 1 to model.context=40'):
        text_model.generate_until(requests_of(('a', {'max_gen_toks': 41})))
    with refused('the task samples .*temperature.*0.8'):
        text_model.generate_until(requests_of(('a', {'do_sample': True, 'temperature': 0.8})))
    with refused(r"the text 'a\\x00' cannot be encoded: text holds byte 0 at byte 1"):
        TextModel(decoder, ByteTokenizer()).loglikelihood_rolling(requests_of(('a\0',)))

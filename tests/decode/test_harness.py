"""Answers to the harness, compared with a numpy model that reads one text without padding."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx, traverse_util
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models, normalizers, pre_tokenizers

from qkattn.config import ModelConfig
from qkattn.data.tokenizers.subwords import BPETokenizer, FileTokenizer
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
    """Replaces the class Instance of the harness."""

    args: tuple[Any, ...]


def requests_of(*tuples_of_args):
    return [Request(args) for args in tuples_of_args]


@pytest.fixture(scope='module')
def decoder():
    return build(CONFIG, key=jax.random.key(3))


@pytest.fixture(scope='module')
def text_model(decoder):
    return TextModel(decoder, CHARACTERS, batch_size=2)


def layer_norm(x_TD):
    centered_TD = x_TD - x_TD.mean(-1, keepdims=True)
    return centered_TD / np.sqrt((centered_TD**2).mean(-1, keepdims=True) + 1e-5)


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


class NumpyDecoder:
    """The decoder in float64 numpy, on one text at a time, without padding and without a cache."""

    def __init__(self, decoder):
        params = nnx.to_pure_dict(nnx.state(decoder))
        self.p = traverse_util.flatten_dict(jax.tree.map(np.float64, params), sep='/')

    def log_probabilities(self, tokens):
        """Log-probabilities [T, V] of the next token after each of T tokens.

        V is the number of ids of the tokenizer. The model has further ids, which are left out.
        """
        p = self.p  # in parameters of blocks, the first axis is the layer
        T = len(tokens)
        x_TD = p['w_embedding_VD'][tokens] + p['w_position_TD'][:T]

        # In each block, attention and MLP read the normalized stream, and add to the stream.
        for layer in range(CONFIG.num_layers):
            attention_gain_D = p['blocks/attention_norm/g_D'][layer]
            x_TD = x_TD + self.attention(layer_norm(x_TD) * attention_gain_D, layer)

            mlp_gain_D = p['blocks/mlp_norm/g_D'][layer]
            w_in_DF = p['blocks/mlp/w_in_DF'][layer]
            w_out_FD = p['blocks/mlp/w_out_FD'][layer]
            hidden_TF = gelu_tanh(layer_norm(x_TD) * mlp_gain_D @ w_in_DF)
            x_TD = x_TD + hidden_TF @ w_out_FD

        # The output matrix is the transposed embedding.
        normalized_TD = layer_norm(x_TD) * p['final_norm/g_D']
        logits_of_all_ids = normalized_TD @ p['w_embedding_VD'].T
        logits_TV = logits_of_all_ids[:, : CHARACTERS.vocab_size]

        # The logarithm of the softmax over the ids of the tokenizer.
        log_sum_T1 = np.log(np.exp(logits_TV).sum(-1, keepdims=True))
        return logits_TV - log_sum_T1

    def attention(self, x_TD, layer):
        """Causal attention of one layer with N heads of size H."""
        T = len(x_TD)
        H = CONFIG.d_model // CONFIG.num_heads
        p = self.p
        q_TNH = np.einsum('td,dnh->tnh', x_TD, p['blocks/attention/score/w_q_DNH'][layer])
        k_SNH = np.einsum('sd,dnh->snh', x_TD, p['blocks/attention/score/w_k_DKH'][layer])
        v_SNH = np.einsum('sd,dnh->snh', x_TD, p['blocks/attention/value/w_v_DKH'][layer])
        logits_NTS = np.einsum('tnh,snh->nts', q_TNH, k_SNH) / np.sqrt(H)
        p_NTS = np.exp(logits_NTS) * np.tri(T)
        p_NTS /= p_NTS.sum(-1, keepdims=True)
        w_o_NHD = p['blocks/attention/value/w_o_NHD'][layer]
        return np.einsum('nts,snh,nhd->td', p_NTS, v_SNH, w_o_NHD)

    def score(self, context, continuation):
        """The log-probability of a continuation, and whether greedy decoding would give it."""
        tokens = [*context, *continuation]
        num_scored = len(continuation)
        log_p_TV = self.log_probabilities(tokens[:-1])[-num_scored:]
        nats = sum(log_p_TV[t, token] for t, token in enumerate(continuation))
        is_greedy = log_p_TV.argmax(-1).tolist() == continuation
        return nats, is_greedy

    def continuation(self, prompt, num_tokens):
        """The greedy continuation of a prompt, up to a separator."""
        new_tokens = []
        for _ in range(num_tokens):
            log_p_TV = self.log_probabilities([*prompt, *new_tokens])
            token = int(log_p_TV[-1].argmax())
            if token == CHARACTERS.separator:
                break
            new_tokens.append(token)
        return new_tokens


@pytest.fixture(scope='module')
def numpy_decoder(decoder):
    return NumpyDecoder(decoder)


def ids(text):
    return CHARACTERS.encode(text).tolist()


def loglikelihood(text_model, context, continuation):
    """The answer to one request: the log-probability, and whether greedy decoding gives it."""
    answers = text_model.loglikelihood(requests_of((context, continuation)))
    assert len(answers) == 1
    return answers[0]


def generate(text_model, prompt, *, num_tokens, until=()):
    """The answer to one request: the continuation of a prompt."""
    options = {'until': list(until), 'max_gen_toks': num_tokens}
    answers = text_model.generate_until(requests_of((prompt, options)))
    assert len(answers) == 1
    return answers[0]


def test_continuations_are_scored_after_their_contexts(numpy_decoder, text_model):
    pairs = [('abc', ' def.'), ('a', 'b'), ('hg fe\ndc ba', 'abcdefgh'), ('gg.', 'h' * 20)]

    answers = text_model.loglikelihood(requests_of(*pairs))

    for (context, continuation), (nats, is_greedy) in zip(pairs, answers, strict=True):
        expected_nats, expected_is_greedy = numpy_decoder.score(ids(context), ids(continuation))
        assert nats == pytest.approx(expected_nats, rel=1e-5)
        assert is_greedy == expected_is_greedy


def test_a_text_without_context_follows_the_separator(numpy_decoder, text_model):
    nats, _ = loglikelihood(text_model, '', 'abc')

    expected_nats, _ = numpy_decoder.score([CHARACTERS.separator], ids('abc'))
    assert nats == pytest.approx(expected_nats, rel=1e-5)


def test_spaces_at_the_end_of_a_context_are_scored(numpy_decoder, text_model):
    nats, _ = loglikelihood(text_model, 'ab ', 'cd')

    expected_nats, _ = numpy_decoder.score(ids('ab'), ids(' cd'))
    assert nats == pytest.approx(expected_nats, rel=1e-5)


def test_a_greedy_continuation_is_told_from_another(numpy_decoder, text_model):
    """`loglikelihood` tells whether greedy decoding would give the continuation of a context."""
    greedy_tokens = numpy_decoder.continuation(ids('abc'), num_tokens=5)
    assert len(greedy_tokens) == 5
    assert CHARACTERS.unknown not in greedy_tokens
    # The other continuation has another last token. Ids 0 to 8 are characters.
    other_last_token = (greedy_tokens[-1] + 1) % 9
    other_tokens = [*greedy_tokens[:-1], other_last_token]
    greedy_text = CHARACTERS.decode(greedy_tokens)
    other_text = CHARACTERS.decode(other_tokens)

    _, greedy_text_is_greedy = loglikelihood(text_model, 'abc', greedy_text)
    _, other_text_is_greedy = loglikelihood(text_model, 'abc', other_text)

    assert greedy_text_is_greedy is True
    assert other_text_is_greedy is False


def test_a_long_context_loses_its_beginning(numpy_decoder, text_model, caplog):
    context = 'abcdefgh' * 10
    continuation = 'abc'

    nats, _ = loglikelihood(text_model, context, continuation)

    room = CONFIG.context + 1 - len(continuation)  # the model does not read the last token
    expected_nats, _ = numpy_decoder.score(ids(context)[-room:], ids(continuation))
    assert nats == pytest.approx(expected_nats, rel=1e-5)
    assert 'the beginnings of 1 of 1 contexts are left out' in caplog.text


@pytest.mark.parametrize('length', [1, 39, 40, 41, 95])
def test_a_text_of_any_length_is_scored_in_windows(numpy_decoder, text_model, length):
    """The log-probability of a long text is the sum over windows of 40 tokens, the context."""
    text = ('abcdefgh. ' * 10)[:length]

    answers = text_model.loglikelihood_rolling(requests_of((text,)))

    # The text follows a separator, so tokens[i] is predicted from inputs[: i + 1].
    tokens = ids(text)
    inputs = [CHARACTERS.separator, *tokens]
    expected_nats = 0.0
    for start in range(0, length, CONFIG.context):
        end = min(start + CONFIG.context, length)
        # The last window also reads tokens of the previous window, to fill the context.
        # Only the tokens from `start` on are scored.
        context_start = max(0, end - CONFIG.context)
        context = inputs[context_start : start + 1]
        window_nats, _ = numpy_decoder.score(context, tokens[start:end])
        expected_nats += window_nats
    assert answers == [pytest.approx(expected_nats, rel=1e-5)]


@pytest.mark.parametrize('length', range(0, 14))
def test_windows_are_those_of_the_harness(length):
    """`windows` splits a text like lm-evaluation-harness, the package lm_eval."""
    utils = pytest.importorskip('lm_eval.utils', reason="pip install -e '.[evaluate]'")
    tokens = list(range(1, length + 1))

    rows = windows(tokens, separator=0, context=4)

    harness_windows = utils.get_rolling_token_windows(
        token_list=tokens, prefix_token=0, max_seq_len=4, context_len=1
    )
    for row, harness_window in zip(rows, harness_windows, strict=True):
        # A window of the harness has tokens that are only read, and tokens that are scored.
        context, scored = utils.make_disjoint_window(harness_window)
        assert row.tokens == context + scored
        assert row.num_scored == len(scored)


def test_windows_score_each_token_once():
    rows = windows([0, 1, 2, 3, 4, 5], 9, 4)  # separator 9, a context of 4

    first, second = rows
    assert first.tokens == [9, 0, 1, 2, 3]
    assert first.num_scored == 4
    # The second window also reads 1, 2 and 3. Only the new tokens 4 and 5 are scored.
    assert second.tokens == [1, 2, 3, 4, 5]
    assert second.num_scored == 2


def test_prompts_of_different_lengths_are_continued_as_each_alone(numpy_decoder, text_model):
    prompts = ['a', 'hgfedcba', 'ab' * 17, 'bad. fed\nace' * 2 + 'gggggggggg']
    options = {'until': [], 'max_gen_toks': 6}
    requests = [Request((prompt, options)) for prompt in prompts]

    texts = text_model.generate_until(requests)

    for prompt, text in zip(prompts, texts, strict=True):
        expected_tokens = numpy_decoder.continuation(ids(prompt), num_tokens=6)
        assert text == CHARACTERS.decode(expected_tokens)


def test_a_stop_text_that_does_not_occur_changes_nothing(text_model):
    text = generate(text_model, 'abc', num_tokens=9)
    same_text = generate(text_model, 'abc', num_tokens=9, until=['no', 'stop'])

    assert same_text == text


def test_the_first_stop_text_ends_a_continuation(text_model):
    whole = generate(text_model, 'abc', num_tokens=9)
    assert len(whole) > 3
    later_stop = whole[5:]
    earlier_stop = whole[2:4]

    cut = generate(text_model, 'abc', num_tokens=9, until=[later_stop, earlier_stop])

    assert cut == whole[: whole.index(earlier_stop)]


def test_a_prompt_leaves_room_for_its_continuation(numpy_decoder, text_model):
    prompt = 'abcdefgh' * 8
    num_tokens = 12

    text = generate(text_model, prompt, num_tokens=num_tokens)

    room = CONFIG.context + 1 - num_tokens  # the model does not read the last token
    expected_tokens = numpy_decoder.continuation(ids(prompt)[-room:], num_tokens)
    assert text == CHARACTERS.decode(expected_tokens)


def test_no_requests_have_no_answers(text_model):
    assert text_model.loglikelihood([]) == []
    assert text_model.loglikelihood_rolling([]) == []
    assert text_model.generate_until([]) == []


def test_an_empty_text_has_log_probability_0(text_model):
    assert text_model.loglikelihood_rolling(requests_of(('',))) == [0.0]


@pytest.mark.parametrize('context', ['', 'a'])
def test_an_empty_continuation_has_log_probability_0(text_model, context):
    nats, is_greedy = loglikelihood(text_model, context, '')

    # The row has one token, the context, and no token is scored.
    assert nats == 0.0
    assert is_greedy is True


def test_few_programs_are_compiled(text_model):
    requests = [Request(('a' * length, 'bc')) for length in range(1, 38)]
    programs_before = harness.token_scores._cache_size()

    text_model.loglikelihood(requests)

    assert harness.token_scores._cache_size() - programs_before <= 2


def test_a_word_that_a_tokenizer_file_lacks_is_refused(decoder):
    library = LibraryTokenizer(models.WordLevel({'[UNK]': 0, 'the': 1, 'cat': 2}, '[UNK]'))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    text_model = TextModel(decoder, FileTokenizer(library.to_str().encode()))

    assert text_model.encode('the cat') == [1, 2]
    with refused("the text 'the dog' has a part, which the tokenizer file-.* lacks"):
        text_model.encode('the dog')


@pytest.mark.parametrize(
    'options',
    [
        {},
        {'temperature': None},
        {'do_sample': False, 'temperature': 0.7},
        {'do_sample': True, 'temperature': 0.0},
    ],
    ids=str,
)
def test_a_greedy_task_generates_half_the_context_by_default(text_model, options):
    assert text_model.num_tokens_of(options) == CONFIG.context / 2


@pytest.mark.parametrize('options', [{'temperature': 0.7}, {'do_sample': True}], ids=str)
def test_a_task_that_samples_is_refused(text_model, options):
    with refused('the task samples'):
        text_model.num_tokens_of(options)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'max_gen_toks': 41}, 'max_gen_toks=41 of the task must be from 1 to model.context=40'),
        ({'do_sample': True, 'temperature': 0.8}, 'the task samples .*temperature.*0.8'),
    ],
)
def test_a_request_with_wrong_options_is_refused(text_model, options, message):
    with refused(message):
        text_model.generate_until(requests_of(('a', options)))


def test_a_character_that_the_tokenizer_lacks_is_refused(text_model):
    with refused("the text 'abxyz' has 'x', which the tokenizer characters-.* lacks; use tasks"):
        loglikelihood(text_model, 'abxyz', 'a')


def test_a_continuation_longer_than_the_context_is_refused(text_model):
    with refused("the continuation 'aaa.* has 41 tokens, which do not fit into model.context=40"):
        loglikelihood(text_model, 'a', 'a' * 41)


def test_a_continuation_without_a_token_of_its_own_is_refused(decoder):
    # 257 ids are the separator and the bytes. The last id is the only pair of the text, '()'.
    text_model = TextModel(decoder, BPETokenizer.train([b'()'], 258))

    # 'f(' has the tokens 'f' and '(', and 'f()' has as many, 'f' and '()'. So no token is left to
    # score, and the continuation would have probability 1.
    with refused(r"the continuation '\)' has no token of its own after 'f\(' with .* byte-bpe258-"):
        loglikelihood(text_model, 'f(', ')')


def test_a_context_without_tokens_is_as_an_empty_one(decoder):
    library = LibraryTokenizer(models.WordLevel({'[UNK]': 0, 'the': 1, 'cat': 2}, '[UNK]'))
    library.normalizer = normalizers.Replace('#', '')
    text_model = TextModel(decoder, FileTokenizer(library.to_str().encode()))

    # The tokenizer leaves out '#', and the first token of a row cannot be scored.
    separator = text_model.tokenizer.separator
    assert text_model.encode_pair('#', 'cat') == ([separator], [2])


def test_a_text_that_cannot_be_encoded_is_refused(decoder):
    text_model = TextModel(decoder, ByteTokenizer())

    with refused(r"the text 'a\\x00' cannot be encoded: text holds byte 0 at byte 1"):
        text_model.loglikelihood_rolling(requests_of(('a\0',)))

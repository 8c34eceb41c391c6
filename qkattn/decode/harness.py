"""Decoders as models of EleutherAI's lm-evaluation-harness: scores of texts, and continuations.

The harness sends requests, objects with texts in `args`, to a subclass of its class LM. `TextModel`
has the three methods that answer requests, and works without the harness. `for_harness` turns it
into such a subclass.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from qkattn.config.imports import load_extra
from qkattn.data.tokenizers.tokenizer import Tokenizer
from qkattn.decode.beam import Choice, decode
from qkattn.decode.kv_cache import KVCache, init_cache, prefill
from qkattn.errors import ConfigError
from qkattn.model import Decoder
from qkattn.model.transformer import cross_entropy

# Rows are padded to a multiple of this length, so that few programs are compiled.
WIDTH_STEP = 32
# How many tokens to generate for a task that does not say, as in the harness.
DEFAULT_NUM_TOKENS = 256
# The options of tasks that say how many tokens to generate.
NUM_TOKENS_OPTIONS = ('max_gen_toks', 'max_new_tokens', 'max_tokens', 'max_completion_tokens')

log = logging.getLogger('qkattn.evaluate')


class Request(Protocol):
    """A request of the harness: `args` holds texts, and for `generate_until` also options."""

    args: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class ScoredRow:
    """A row of tokens. Its last `num_scored` tokens are scored, and at least one precedes them."""

    tokens: list[int]
    num_scored: int


@functools.partial(jax.jit, static_argnames='vocab_size')
def token_scores(
    model: Decoder, tokens_BT: jax.Array, *, vocab_size: int
) -> tuple[jax.Array, jax.Array]:
    """Scores every token except the first, given the tokens before it.

    Padding may follow the tokens of a row, because no token attends to later ones. Ids from
    `vocab_size` on have probability 0.

    Returns:
      The log-probabilities, and whether each token is the argmax prediction. Both have one column
      less than tokens_BT, and their column t belongs to token t + 1.
    """
    targets_BT = tokens_BT[:, 1:]
    logits_BTV = model(tokens_BT[:, :-1])[..., :vocab_size]
    nats_BT = cross_entropy(logits_BTV, targets_BT)
    return -nats_BT, logits_BTV.argmax(-1) == targets_BT


class _Rows(NamedTuple):
    """The rows of `continued`, while they are decoded."""

    tokens_BT: jax.Array
    is_done_B: jax.Array  # whether a row has reached its end or a separator


@functools.partial(jax.jit, static_argnames=('prefix', 'separator', 'vocab_size'))
def continued(
    model: Decoder,
    tokens_BT: jax.Array,
    lengths_B: jax.Array,
    ends_B: jax.Array,
    *,
    prefix: int,
    separator: int,
    vocab_size: int,
) -> jax.Array:
    """Continues prompts of different lengths greedily.

    In tokens_BT, row b begins with a prompt of lengths_B[b] tokens. The result holds its
    continuation up to position ends_B[b]. Decoding stops once every row has reached its end or a
    separator; later tokens of a row mean nothing.

    All rows share one cache, which has one length. So the model first reads `prefix` tokens of each
    prompt in one pass, at most as many as the shortest prompt has. Then it proceeds position by
    position: a row whose prompt is longer takes the next token of its prompt, and any other row
    takes the argmax prediction.
    """
    B, T = tokens_BT.shape
    cache = init_cache(model, B, T - 1)  # the model does not read the last token
    logits_BV, cache = prefill(model, tokens_BT[:, :prefix], cache)

    def step(
        tokens_B: jax.Array, rows_B: jax.Array | None, cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        return prefill(model, tokens_B[:, None], cache)

    def next_token(t: jax.Array, logits_BV: jax.Array, rows: _Rows) -> Choice:
        """Sets the token of every row at position `prefix` + t.

        In a row whose prompt reaches that far, it is the token of the prompt, and in any other row
        the argmax prediction.
        """
        position = prefix + t
        in_prompt_B = position < lengths_B
        prediction_B = logits_BV[:, :vocab_size].argmax(-1).astype(rows.tokens_BT.dtype)
        token_B = jnp.where(in_prompt_B, rows.tokens_BT[:, position], prediction_B)

        chose_separator_B = ~in_prompt_B & (token_B == separator)
        is_at_end_B = position + 1 >= ends_B
        rows = _Rows(
            tokens_BT=rows.tokens_BT.at[:, position].set(token_B),
            is_done_B=rows.is_done_B | chose_separator_B | is_at_end_B,
        )
        return Choice(rows, token_B, rows_M=None)

    def not_done(rows: _Rows) -> jax.Array:
        return ~rows.is_done_B.all()

    rows = _Rows(tokens_BT, jnp.zeros(B, bool))
    num_steps = ends_B.max() - prefix
    rows = decode(logits_BV, cache, step, next_token, rows, num_steps, not_done)
    return rows.tokens_BT


class TextModel:
    """A decoder and its tokenizer: log-probabilities of texts in nats, and greedy continuations.

    The methods take requests of the harness, and return one answer for each, in their order. They
    compute requests in batches of `batch_size` rows of similar length. A text without context
    follows the separator, as documents do in training.

    They raise ConfigError for a text that the tokenizer cannot encode, and for a request that does
    not fit into the context.
    """

    def __init__(self, model: Decoder, tokenizer: Tokenizer, *, batch_size: int = 32):
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.context = model.config.context

    def loglikelihood(
        self, requests: Sequence[Request], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Returns log p(continuation | context) for each request (context, continuation).

        The second entry of each answer says whether greedy decoding gives the continuation. A
        context that is too long loses its first tokens.
        """
        rows = []
        num_truncated = 0
        for request in requests:
            context, continuation = request.args
            context_tokens, scored_tokens = self.encode_pair(context, continuation)
            if len(scored_tokens) > self.context:
                raise ConfigError(
                    f'the continuation {continuation!r:.60} has {len(scored_tokens)} tokens, which '
                    f'do not fit into model.context={self.context}'
                )
            tokens = context_tokens + scored_tokens
            room = self.context + 1  # The model does not read the last token, only predicts it.
            if len(tokens) > room:
                num_truncated += 1
            rows.append(ScoredRow(tokens[-room:], len(scored_tokens)))
        self.warn_of_truncation(num_truncated, len(rows))
        return self.scores(rows)

    def loglikelihood_rolling(
        self, requests: Sequence[Request], disable_tqdm: bool = False
    ) -> list[float]:
        """Returns log p(text) for each request (text,), the sum over the `windows` of the text."""
        rows = []
        index_of_request = []  # for each row
        for index, request in enumerate(requests):
            (text,) = request.args
            for row in windows(self.encode(text), self.tokenizer.separator, self.context):
                rows.append(row)
                index_of_request.append(index)

        nats = [0.0] * len(requests)
        for index, (row_nats, _) in zip(index_of_request, self.scores(rows), strict=True):
            nats[index] += row_nats
        return nats

    def generate_until(self, requests: Sequence[Request], disable_tqdm: bool = False) -> list[str]:
        """Returns the greedy continuation for each request (prompt, options).

        A continuation ends before the first of the texts in the option `until`, before a separator,
        or after as many tokens as `num_tokens_of` returns. A prompt that is too long loses its
        first tokens. Raises ConfigError for options that ask for sampling.
        """
        prompts = []
        num_tokens = []
        num_truncated = 0
        for request in requests:
            prompt, options = request.args
            number = self.num_tokens_of(options)
            tokens = self.encode(prompt)
            if not tokens:
                tokens = [self.tokenizer.separator]
            # The tokens that a prompt may have. The model does not read the last new token.
            room = self.context + 1 - number
            if len(tokens) > room:
                num_truncated += 1
            prompts.append(tokens[-room:])
            num_tokens.append(number)
        self.warn_of_truncation(num_truncated, len(prompts))

        texts = []
        continuations = self.continuations(prompts, num_tokens)
        for request, tokens in zip(requests, continuations, strict=True):
            _, options = request.args
            texts.append(cut_at(self.tokenizer.decode(tokens), options.get('until')))
        return texts

    def num_tokens_of(self, options: Mapping[str, Any]) -> int:
        """Returns how many tokens the options of `generate_until` ask for.

        If no option gives the number, it is half the context, but at most DEFAULT_NUM_TOKENS.
        Raises ConfigError if the options ask for sampling, or for more tokens than the context.
        """
        # A task samples if do_sample says so. Without do_sample, it samples if it has a temperature
        # above 0. At temperature 0, sampling is greedy decoding.
        temperature = options.get('temperature', 0)
        samples = options.get('do_sample')
        if samples is None:
            samples = temperature > 0
        if 'temperature' in options and temperature == 0:
            samples = False
        if samples:
            raise ConfigError(
                f'the task samples (generation_kwargs: {dict(options)}); only greedy decoding is '
                'supported, with do_sample: false'
            )
        for option in NUM_TOKENS_OPTIONS:
            number = options.get(option)
            if number is None:
                continue
            if not 1 <= number <= self.context:
                raise ConfigError(
                    f'{option}={number} of the task must be from 1 to model.context={self.context}'
                )
            return number
        return max(1, min(DEFAULT_NUM_TOKENS, self.context // 2))

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text; raises ConfigError if the tokenizer lacks a part of it."""
        try:
            tokens = self.tokenizer.encode(text).tolist()
        except ValueError as error:
            raise ConfigError(f'the text {text!r:.60} cannot be encoded: {error}') from error
        unknown = getattr(self.tokenizer, 'unknown', None)
        if unknown is None or unknown not in tokens:
            return tokens

        part = 'a part'
        if len(tokens) == len(text):
            # Each token is one character, so the error can show the first one without an id.
            part = repr(text[tokens.index(unknown)])
        raise ConfigError(
            f'the text {text!r:.60} has {part}, which the tokenizer {self.tokenizer.name} lacks; '
            'use tasks of its characters, or a model of bytes or sub-words'
        )

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Returns the ids of the context, and those of the continuation after it.

        Both are encoded as one text, as in the harness. Tokens often begin with a space, so spaces
        at the end of the context move to the continuation: 'the cat ' and 'sat' are scored as
        'the cat' and ' sat'. A context that is then empty becomes the separator.
        """
        stripped = context.rstrip()
        spaces = context[len(stripped) :]
        continuation = spaces + continuation
        if not stripped:
            return [self.tokenizer.separator], self.encode(continuation)
        context_tokens = self.encode(stripped)
        all_tokens = self.encode(stripped + continuation)
        return context_tokens, all_tokens[len(context_tokens) :]

    def scores(self, rows: Sequence[ScoredRow]) -> list[tuple[float, bool]]:
        """Returns (log-probability, is_argmax) for each row.

        The log-probability is the sum over the scored tokens of the row. `is_argmax` says whether
        all of them are argmax predictions.
        """
        results: dict[int, tuple[float, bool]] = {}
        for batch in self.batches([len(row.tokens) for row in rows]):
            tokens_BT = self.padded([rows[i].tokens for i in batch], self.context + 1)
            scores = token_scores(self.model, tokens_BT, vocab_size=self.tokenizer.vocab_size)
            nats_BT, is_argmax_BT = map(np.asarray, scores)
            for b, i in enumerate(batch):  # Row b of the batch is rows[i].
                # Column t scores token t + 1. If the last 2 of 5 tokens are scored, their columns
                # are 2 and 3.
                num_columns = len(rows[i].tokens) - 1
                scored = slice(num_columns - rows[i].num_scored, num_columns)
                nats = nats_BT[b, scored].sum(dtype=np.float64)
                all_argmax = is_argmax_BT[b, scored].all()
                results[i] = (float(nats), bool(all_argmax))
        return [results[i] for i in range(len(rows))]

    def continuations(
        self, prompts: Sequence[Sequence[int]], num_tokens: Sequence[int]
    ) -> list[list[int]]:
        """Continues prompts greedily; returns the new tokens of each.

        Prompt i gets up to num_tokens[i] tokens. The separator, which ends a text, ends them early.
        """
        results: dict[int, list[int]] = {}
        for batch in self.batches([len(prompt) for prompt in prompts]):
            continuations = self.continuations_of_batch(
                [prompts[i] for i in batch], [num_tokens[i] for i in batch]
            )
            results |= dict(zip(batch, continuations, strict=True))
        return [results[i] for i in range(len(prompts))]

    def continuations_of_batch(
        self, prompts: Sequence[Sequence[int]], num_tokens: Sequence[int]
    ) -> list[list[int]]:
        """Continues at most `batch_size` prompts of token ids by the most likely tokens.

        Prompt b gets num_tokens[b] tokens, or fewer: a continuation ends before a separator.
        """
        lengths_B = np.array([len(prompt) for prompt in prompts])
        ends_B = lengths_B + np.array(num_tokens)

        # Each row is a prompt and free places, up to the end of the longest continuation. With the
        # prompts [5, 6] and [7], and 2 new tokens for each, the rows are [5, 6, 0, 0] and
        # [7, 0, 0, 0].
        width = int(ends_B.max())
        rows = []
        for prompt in prompts:
            free_places = [0] * (width - len(prompt))
            rows.append([*prompt, *free_places])

        # The model reads the first `prefix` tokens of all prompts in one pass, and later tokens one
        # by one. `prefix` could be the length of the shortest prompt. But every value compiles
        # another program, so the length is rounded down to a multiple of WIDTH_STEP. One token has
        # to be read at least.
        shortest = int(lengths_B.min())
        num_steps = shortest // WIDTH_STEP
        prefix = max(1, num_steps * WIDTH_STEP)

        # The model reads batches of `batch_size` rows. If there are fewer prompts, `padded` repeats
        # the rows, and np.resize repeats their lengths and ends in the same order. `padded` also
        # widens the rows, to at most `context` + 1 tokens: the last token is not read.
        separator = self.tokenizer.separator
        tokens_BT = continued(
            self.model,
            self.padded(rows, self.context + 1),
            np.resize(lengths_B, self.batch_size),
            np.resize(ends_B, self.batch_size),
            prefix=prefix,
            separator=separator,
            vocab_size=self.tokenizer.vocab_size,
        )

        continuations = []
        continued_rows = np.asarray(tokens_BT)  # the rows with their free places filled
        for b in range(len(prompts)):
            tokens = continued_rows[b, lengths_B[b] : ends_B[b]].tolist()
            if separator in tokens:
                tokens = tokens[: tokens.index(separator)]
            continuations.append(tokens)
        return continuations

    def batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yields the indices of `lengths` in batches of similar length, the longest first."""
        longest_first = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
        for begin in range(0, len(lengths), self.batch_size):
            yield longest_first[begin : begin + self.batch_size]

    def padded(self, rows: Sequence[Sequence[int]], most: int) -> np.ndarray:
        """Returns the rows as an array tokens_BT with `batch_size` rows.

        Rows are padded with id 0. The width is one more than a multiple of WIDTH_STEP, because the
        model reads all tokens but the last. It is at most `most`. If there are fewer rows than
        `batch_size`, they are repeated.
        """
        longest = max(len(row) for row in rows)
        num_steps = math.ceil((longest - 1) / WIDTH_STEP)
        width = min(num_steps * WIDTH_STEP + 1, most)
        tokens_BT = np.zeros((self.batch_size, width), np.int32)
        for b in range(self.batch_size):
            row = rows[b % len(rows)]
            tokens_BT[b, : len(row)] = row
        return tokens_BT

    def warn_of_truncation(self, num_truncated: int, num_requests: int) -> None:
        if num_truncated:
            log.warning(
                'the beginnings of %d of %d contexts are left out: they do not fit into '
                'model.context=%d',
                num_truncated,
                num_requests,
                self.context,
            )


def windows(tokens: Sequence[int], separator: int, context: int) -> Iterator[ScoredRow]:
    """Yields rows that together score each token of a text once.

    A row has up to `context` + 1 tokens, because the model reads all but the last. The text follows
    the separator S, as documents do in training. For example, with a context of 4 the text
    0 1 2 3 4 5 has two rows:

        S 0 1 2 3    0 1 2 3 are scored
        1 2 3 4 5    4 5 are scored, given as many tokens as fit

    The harness has the same rule (`lm_eval.utils.get_rolling_token_windows` with context_len=1).
    """
    text = [separator, *tokens]
    for first_scored in range(1, len(text), context):
        end = min(first_scored + context, len(text))
        row_begin = max(0, end - (context + 1))
        yield ScoredRow(text[row_begin:end], num_scored=end - first_scored)


def cut_at(text: str, stops: str | Sequence[str] | None) -> str:
    """Returns the part of a text before the first stop text in it."""
    if isinstance(stops, str):
        stops = [stops]
    for stop in stops or ():
        if stop:
            text = text.partition(stop)[0]
    return text


def for_harness(model: Decoder, tokenizer: Tokenizer, *, batch_size: int) -> Any:
    """Returns a `TextModel` that `lm_eval.simple_evaluate` takes.

    Raises ConfigError if the harness is not installed.
    """
    base: Any = load_extra('lm_eval.api.model', 'evaluate').LM

    class HarnessModel(TextModel, base):
        """A TextModel that is an LM of the harness."""

    return HarnessModel(model, tokenizer, batch_size=batch_size)

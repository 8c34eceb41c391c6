"""Decoders as models of EleutherAI's lm-evaluation-harness.

`TextModel` has the methods of the harness's class LM, and works without the harness. `for_harness`
returns a `TextModel` that is also a subclass of LM.
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
# The default number of tokens to generate, as in the harness.
DEFAULT_NUM_TOKENS = 256
# The task options for the number of tokens to generate.
NUM_TOKENS_OPTIONS = ('max_gen_toks', 'max_new_tokens', 'max_tokens', 'max_completion_tokens')

log = logging.getLogger('qkattn.evaluate')


class Request(Protocol):
    """A request of the harness, whose `args` are texts, and options for `generate_until`."""

    args: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class ScoredRow:
    """A row of tokens, whose last `num_scored` tokens are scored; the first token never is."""

    tokens: list[int]
    num_scored: int


@functools.partial(jax.jit, static_argnames='vocab_size')
def token_scores(
    model: Decoder, tokens_BT: jax.Array, *, vocab_size: int
) -> tuple[jax.Array, jax.Array]:
    """Scores all tokens but the first, given the tokens before.

    Args:
        model: A decoder.
        tokens_BT: Rows of tokens; padding may follow the tokens of a row.
        vocab_size: Ids from here on have probability 0.

    Returns:
        The log-probabilities, and whether each token is the argmax prediction. Both have shape [B,
        T - 1], and column t belongs to token t + 1.
    """
    targets_BT = tokens_BT[:, 1:]
    logits_BTV = model(tokens_BT[:, :-1])[..., :vocab_size]
    nats_BT = cross_entropy(logits_BTV, targets_BT)
    log_probabilities_BT = -nats_BT
    is_argmax_BT = logits_BTV.argmax(-1) == targets_BT
    return log_probabilities_BT, is_argmax_BT


class _Rows(NamedTuple):
    """The state of `continued`."""

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
    """Continues prompts of different lengths by greedy decoding.

    The model reads `prefix` tokens of all prompts in one pass. Then all rows proceed one position
    at a time. A row takes the next token of its prompt, or after the prompt the argmax prediction.

    Args:
        model: A decoder.
        tokens_BT: Row b begins with a prompt of lengths_B[b] tokens.
        lengths_B: The lengths of the prompts.
        ends_B: The lengths of the prompts with their continuations.
        prefix: At most the length of the shortest prompt.
        separator: The id that ends a continuation.
        vocab_size: Ids from here on are never chosen.

    Returns:
        The prompts with their continuations. Tokens of row b after a separator, or from ends_B[b]
        on, are meaningless.
    """
    B, T = tokens_BT.shape
    cache = init_cache(model, B, T - 1)  # the model does not read the last token
    logits_BV, cache = prefill(model, tokens_BT[:, :prefix], cache)

    def step(
        tokens_B: jax.Array, rows_B: jax.Array | None, cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        """Appends a token to each row; returns the next logits_BV and the cache."""
        return prefill(model, tokens_B[:, None], cache)

    def next_token(t: jax.Array, logits_BV: jax.Array, rows: _Rows) -> Choice:
        """Sets the token at position `prefix` + t of every row."""
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
        return Choice(state=rows, tokens_M=token_B, rows_M=None)

    def not_done(rows: _Rows) -> jax.Array:
        return ~rows.is_done_B.all()

    rows = _Rows(tokens_BT, is_done_B=jnp.zeros(B, bool))
    num_steps = ends_B.max() - prefix
    rows = decode(
        logits_BV,
        cache,
        step,
        choose=next_token,
        state=rows,
        num_tokens=num_steps,
        not_done=not_done,
    )
    return rows.tokens_BT


class TextModel:
    """A decoder and its tokenizer: log-probabilities of texts in nats, and greedy continuations.

    The methods of the harness take a list of requests, and return one answer for each. They compute
    batches of `batch_size` rows of similar length. A text without context follows the separator, as
    documents do in training.

    The methods raise ConfigError for a text that the tokenizer cannot encode, and for a request
    that does not fit into the context.
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

        A context that is too long loses its first tokens.

        Args:
            requests: Requests of the harness.
            disable_tqdm: Unused.

        Returns:
            Pairs of the log-probability, and whether greedy decoding gives the continuation.
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
            room = self.context + 1  # the model does not read the last token
            if len(tokens) > room:
                num_truncated += 1
            rows.append(ScoredRow(tokens[-room:], len(scored_tokens)))
        self.warn_of_truncation(num_truncated, len(rows))
        return self.scores(rows)

    def loglikelihood_rolling(
        self, requests: Sequence[Request], disable_tqdm: bool = False
    ) -> list[float]:
        """Returns log p(text) for each request (text,), as a sum over the `windows` of the text."""
        rows = []
        request_of_row = []  # indices of requests
        for index, request in enumerate(requests):
            (text,) = request.args
            for row in windows(self.encode(text), self.tokenizer.separator, self.context):
                rows.append(row)
                request_of_row.append(index)

        nats = [0.0] * len(requests)
        for index, (row_nats, _) in zip(request_of_row, self.scores(rows), strict=True):
            nats[index] += row_nats
        return nats

    def generate_until(self, requests: Sequence[Request], disable_tqdm: bool = False) -> list[str]:
        """Returns the greedy continuation for each request (prompt, options).

        A continuation ends before a separator, before the first text of the option `until`, or
        after `num_tokens_of(options)` tokens. A prompt that is too long loses its first tokens.
        Raises ConfigError for options that ask for sampling.
        """
        prompts = []
        num_tokens = []
        num_truncated = 0
        for request in requests:
            prompt, options = request.args
            num_new_tokens = self.num_tokens_of(options)
            tokens = self.encode(prompt)
            if not tokens:
                tokens = [self.tokenizer.separator]
            room = self.context + 1 - num_new_tokens  # the model does not read the last token
            if len(tokens) > room:
                num_truncated += 1
            prompts.append(tokens[-room:])
            num_tokens.append(num_new_tokens)
        self.warn_of_truncation(num_truncated, len(prompts))

        texts = []
        continuations = self.continuations(prompts, num_tokens)
        for request, tokens in zip(requests, continuations, strict=True):
            _, options = request.args
            text = self.tokenizer.decode(tokens)
            texts.append(cut_at(text, options.get('until')))
        return texts

    def num_tokens_of(self, options: Mapping[str, Any]) -> int:
        """Returns the number of tokens to generate, from the options of `generate_until`.

        The default is half the context, but at most DEFAULT_NUM_TOKENS. Raises ConfigError if the
        options ask for sampling, or for more tokens than the context.
        """
        temperature = options.get('temperature')  # None if absent, or null in the task's file
        samples = options.get('do_sample')
        if samples is None:
            samples = temperature is not None and temperature > 0
        is_greedy_anyway = temperature == 0
        if samples and not is_greedy_anyway:
            raise ConfigError(
                f'the task samples (generation_kwargs: {dict(options)}); only greedy decoding is '
                'supported, with do_sample: false'
            )
        for option in NUM_TOKENS_OPTIONS:
            num_tokens = options.get(option)
            if num_tokens is None:
                continue
            if not 1 <= num_tokens <= self.context:
                raise ConfigError(
                    f'{option}={num_tokens} of the task must be from 1 to '
                    f'model.context={self.context}'
                )
            return num_tokens
        return max(1, min(DEFAULT_NUM_TOKENS, self.context // 2))

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text; raises ConfigError if the tokenizer cannot encode it."""
        try:
            tokens = self.tokenizer.encode(text).tolist()
        except ValueError as error:
            raise ConfigError(f'the text {text!r:.60} cannot be encoded: {error}') from error
        unknown_id = getattr(self.tokenizer, 'unknown', None)
        if unknown_id is None or unknown_id not in tokens:
            return tokens

        part = 'a part'
        has_token_per_character = len(tokens) == len(text)
        if has_token_per_character:
            part = repr(text[tokens.index(unknown_id)])
        raise ConfigError(
            f'the text {text!r:.60} has {part}, which the tokenizer {self.tokenizer.name} lacks; '
            'use tasks of its characters, or a model of bytes or sub-words'
        )

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Returns the ids of a context, and the ids of its continuation.

        As in the harness, both are encoded as one text, and spaces at the end of the context move
        to the continuation: 'the cat ' and 'sat' become 'the cat' and ' sat'. A context without
        tokens becomes the separator.

        Raises:
            ConfigError: The continuation has text, but is part of the last token of the context.
        """
        stripped_context = context.rstrip()
        spaces = context[len(stripped_context) :]
        continuation = spaces + continuation
        context_tokens = self.encode(stripped_context) if stripped_context else []
        all_tokens = self.encode(stripped_context + continuation)
        scored_tokens = all_tokens[len(context_tokens) :]
        # An empty text follows with probability 1. Any other one needs a token that is scored.
        if continuation and not scored_tokens:
            raise ConfigError(
                f'the continuation {continuation!r:.60} has no token of its own after '
                f'{stripped_context[-30:]!r} with the tokenizer {self.tokenizer.name}; choose '
                'another target_delimiter or other texts in the task'
            )
        # A tokenizer may leave out all characters of a context.
        return context_tokens or [self.tokenizer.separator], scored_tokens

    def scores(self, rows: Sequence[ScoredRow]) -> list[tuple[float, bool]]:
        """Scores rows of tokens.

        Returns:
            For each row, the log-probability of its scored tokens, and whether all of them are
            argmax predictions.
        """
        results: dict[int, tuple[float, bool]] = {}
        for batch in self.batches([len(row.tokens) for row in rows]):
            tokens_BT = self.padded([rows[i].tokens for i in batch], self.context + 1)
            scores = token_scores(self.model, tokens_BT, vocab_size=self.tokenizer.vocab_size)
            nats_BT, is_argmax_BT = map(np.asarray, scores)
            for b, i in enumerate(batch):  # row b of the batch is rows[i]
                # Column t belongs to token t + 1, so 5 tokens have columns 0 to 3.
                num_columns = len(rows[i].tokens) - 1
                scored_columns = slice(num_columns - rows[i].num_scored, num_columns)
                nats = nats_BT[b, scored_columns].sum(dtype=np.float64)
                are_all_argmax = is_argmax_BT[b, scored_columns].all()
                results[i] = (float(nats), bool(are_all_argmax))
        return [results[i] for i in range(len(rows))]

    def continuations(
        self, prompts: Sequence[Sequence[int]], num_tokens: Sequence[int]
    ) -> list[list[int]]:
        """Returns the greedy continuation of each prompt, without the prompt.

        Prompt i gets num_tokens[i] tokens, or fewer before a separator.
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
        """Returns the greedy continuations of at most `batch_size` prompts, as `continuations`."""
        lengths_B = np.array([len(prompt) for prompt in prompts])
        ends_B = lengths_B + np.array(num_tokens)

        # Fill up all rows with zeros, to the end of the longest continuation.
        width = int(ends_B.max())
        rows = []
        for prompt in prompts:
            zeros = [0] * (width - len(prompt))
            rows.append([*prompt, *zeros])

        # Every value of `prefix` compiles another program, so it is a multiple of WIDTH_STEP. The
        # model has to read at least one token.
        shortest = int(lengths_B.min())
        num_steps = shortest // WIDTH_STEP
        prefix = max(1, num_steps * WIDTH_STEP)

        # If there are fewer prompts than `batch_size`, `padded` and np.resize both repeat them.
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
        continued_rows = np.asarray(tokens_BT)
        for b in range(len(prompts)):
            row = continued_rows[b]
            tokens = row[lengths_B[b] : ends_B[b]].tolist()
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
        """Returns the rows as an array tokens_BT, padded with id 0 to at most `most` tokens.

        The model reads all tokens but the last, so the width is a multiple of WIDTH_STEP plus 1. If
        there are fewer rows than `batch_size`, they are repeated.
        """
        longest = max(len(row) for row in rows)
        # Rows of one token have nothing to score, but the model has to read at least one token.
        num_steps = max(1, math.ceil((longest - 1) / WIDTH_STEP))
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
    """Splits a text into rows that together score each token once.

    The rows are those of `lm_eval.utils.get_rolling_token_windows` with context_len=1. The text
    follows the separator S. A row has at most `context` + 1 tokens, because the model does not read
    the last. For example, the text 0 1 2 3 4 5 with a context of 4 gives

        S 0 1 2 3    scores 0 1 2 3
        1 2 3 4 5    scores 4 5
    """
    text = [separator, *tokens]
    for first_scored in range(1, len(text), context):
        end = min(first_scored + context, len(text))
        row_begin = max(0, end - (context + 1))
        yield ScoredRow(text[row_begin:end], num_scored=end - first_scored)


def cut_at(text: str, stops: str | Sequence[str] | None) -> str:
    """Returns the part of a text before the first of its stop texts."""
    if isinstance(stops, str):
        stops = [stops]
    for stop in stops or ():
        if stop:
            text = text.partition(stop)[0]
    return text


def for_harness(model: Decoder, tokenizer: Tokenizer, *, batch_size: int) -> Any:
    """Returns a `TextModel` that `lm_eval.simple_evaluate` accepts.

    Raises ConfigError if the harness is not installed.
    """
    harness_class: Any = load_extra('lm_eval.api.model', 'evaluate').LM

    class HarnessModel(TextModel, harness_class):
        """A TextModel that is an LM of the harness."""

    return HarnessModel(model, tokenizer, batch_size=batch_size)

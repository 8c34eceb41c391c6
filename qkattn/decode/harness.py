"""Decoders as EleutherAI's lm-evaluation-harness asks them: scores of texts, and continuations.

The harness sends requests, objects whose `args` are texts, to a subclass of its class LM. A
`TextModel` has the three methods that answer them and needs no harness; `for_harness` makes it a
subclass.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from qkattn.config.imports import load_extra
from qkattn.data.tokenizers.tokenizer import Tokenizer
from qkattn.decode.beam import decode
from qkattn.decode.kv_cache import KVCache, init_cache, prefill
from qkattn.errors import ConfigError
from qkattn.model import Decoder
from qkattn.model.transformer import cross_entropy

# Rows are padded to a multiple of this length, so that few programs are compiled.
WIDTH_STEP = 32
# Tokens to generate where a task does not say how many, as in the harness.
DEFAULT_NUM_TOKENS = 256
# The names under which tasks say how many tokens to generate.
NUM_TOKENS_OPTIONS = ('max_gen_toks', 'max_new_tokens', 'max_tokens', 'max_completion_tokens')

log = logging.getLogger('qkattn.evaluate')


class Request(Protocol):
    """What the harness asks: `args` are the texts, and in `generate_until` options as well."""

    args: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class ScoredRow:
    """Tokens of which the last `num_scored` are scored; at least one token is before them."""

    tokens: list[int]
    num_scored: int


@functools.partial(jax.jit, static_argnames='vocab_size')
def token_scores(
    model: Decoder, tokens_BT: jax.Array, *, vocab_size: int
) -> tuple[jax.Array, jax.Array]:
    """The log-probability of every token but the first, and whether it is the argmax prediction.

    Both have one column less than tokens_BT; column t is of token t + 1, after the tokens before
    it. Padding may follow the tokens of a row, since no token attends to what is behind it. Ids
    from `vocab_size` on have no share of the probability.
    """
    targets_BT = tokens_BT[:, 1:]
    logits_BTV = model(tokens_BT[:, :-1])[..., :vocab_size]
    nats_BT = cross_entropy(logits_BTV, targets_BT)
    return -nats_BT, logits_BTV.argmax(-1) == targets_BT


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
    """tokens_BT where row b is a prompt of lengths_B[b] tokens, continued greedily to ends_B[b].

    Decoding stops once every row has reached its end or a separator; what a row has behind either
    is meaningless. Rows share the length of one cache: the first `prefix` tokens, which every
    prompt has, are read in one pass, and further tokens of longer prompts in the steps in which
    shorter ones are continued.
    """
    B, T = tokens_BT.shape
    cache = init_cache(model, B, T - 1)  # the last token needs no slot
    logits_BV, cache = prefill(model, tokens_BT[:, :prefix], cache)

    def step(
        tokens_B: jax.Array, rows_B: jax.Array | None, cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        return prefill(model, tokens_B[:, None], cache)

    def next_token(
        t: jax.Array, logits_BV: jax.Array, state: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array, None]:
        tokens_BT, is_done_B = state
        position = prefix + t
        in_prompt_B = position < lengths_B
        greedy_B = logits_BV[:, :vocab_size].argmax(-1).astype(tokens_BT.dtype)
        token_B = jnp.where(in_prompt_B, tokens_BT[:, position], greedy_B)
        is_separator_B = ~in_prompt_B & (token_B == separator)
        is_done_B = is_done_B | is_separator_B | (position + 1 >= ends_B)
        return (tokens_BT.at[:, position].set(token_B), is_done_B), token_B, None

    def not_done(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        _, is_done_B = state
        return ~is_done_B.all()

    state = (tokens_BT, jnp.zeros(B, bool))
    num_steps = ends_B.max() - prefix
    tokens_BT, _ = decode(logits_BV, cache, step, next_token, state, num_steps, not_done)
    return tokens_BT


class TextModel:
    """A decoder and its tokenizer: log-probabilities of texts in nats, and greedy continuations.

    Methods take requests of the harness and return one answer for each, in their order. A text
    without context follows the separator, as documents do in training. Requests are computed in
    batches of `batch_size` rows of similar length. ConfigError for a text that the tokenizer cannot
    encode and for a request that does not fit into the context.
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
        """log p(continuation | context) of each (context, continuation).

        With each, whether greedy decoding of the context gives the continuation. Only the last
        tokens of a context are used where not all of them fit.
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
            # The last token is predicted and needs no position.
            num_truncated += len(tokens) > self.context + 1
            rows.append(ScoredRow(tokens[-(self.context + 1) :], len(scored_tokens)))
        self.warn_of_truncation(num_truncated, len(rows))
        return self.scores(rows)

    def loglikelihood_rolling(
        self, requests: Sequence[Request], disable_tqdm: bool = False
    ) -> list[float]:
        """log p(text) of each (text,), of any length: the sum over its `windows`."""
        rows = []
        owners = []  # the request of each row
        for number, request in enumerate(requests):
            (text,) = request.args
            for row in windows(self.encode(text), self.tokenizer.separator, self.context):
                rows.append(row)
                owners.append(number)
        nats = [0.0] * len(requests)
        for number, (row_nats, _) in zip(owners, self.scores(rows), strict=True):
            nats[number] += row_nats
        return nats

    def generate_until(self, requests: Sequence[Request], disable_tqdm: bool = False) -> list[str]:
        """The greedy continuation of each (prompt, options), up to the first stop text.

        Options are `until`, the stop texts, and `max_gen_toks`, by default 256 or half the context,
        whichever is less. A separator stops as well. Only the last tokens of a prompt are used
        where not all of them fit. ConfigError for options that ask for sampling.
        """
        prompts = []
        num_tokens = []
        num_truncated = 0
        for request in requests:
            prompt, options = request.args
            number = self.num_tokens_of(options)
            room = self.context + 1 - number  # the last token needs no position
            tokens = self.encode(prompt) or [self.tokenizer.separator]
            num_truncated += len(tokens) > room
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
        """How many tokens the options of `generate_until` ask for; ConfigError as there."""
        temperature = options.get('temperature', 0)
        samples = options.get('do_sample')
        if samples is None:
            samples = temperature > 0
        if samples and options.get('temperature') != 0:
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
        """The ids of a text; ConfigError where the tokenizer has none for a part of it."""
        try:
            tokens = self.tokenizer.encode(text).tolist()
        except ValueError as error:
            raise ConfigError(f'the text {text!r:.60} cannot be encoded: {error}') from error
        unknown = getattr(self.tokenizer, 'unknown', None)
        if unknown is None or unknown not in tokens:
            return tokens
        part = 'a part'
        if len(tokens) == len(text):  # a token per character
            part = repr(text[tokens.index(unknown)])
        raise ConfigError(
            f'the text {text!r:.60} has {part}, which the tokenizer {self.tokenizer.name} lacks; '
            'use tasks of its characters, or a model of bytes or sub-words'
        )

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The ids of both, encoded together as the harness does: spaces between them are scored.

        The context is the separator where there is none.
        """
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        if not stripped:
            return [self.tokenizer.separator], self.encode(continuation)
        context_tokens = self.encode(stripped)
        return context_tokens, self.encode(stripped + continuation)[len(context_tokens) :]

    def scores(self, rows: Sequence[ScoredRow]) -> list[tuple[float, bool]]:
        """Of each row, the log-probability of its scored tokens, and whether all are the argmax."""
        results: dict[int, tuple[float, bool]] = {}
        for batch in self.batches([len(row.tokens) for row in rows]):
            tokens_BT = self.padded([rows[i].tokens for i in batch], self.context + 1)
            scores = token_scores(self.model, tokens_BT, vocab_size=self.tokenizer.vocab_size)
            nats_BT, is_argmax_BT = map(np.asarray, scores)
            for b, i in enumerate(batch):
                end = len(rows[i].tokens) - 1
                scored = slice(end - rows[i].num_scored, end)
                nats = nats_BT[b, scored].sum(dtype=np.float64)
                results[i] = (float(nats), bool(is_argmax_BT[b, scored].all()))
        return [results[i] for i in range(len(rows))]

    def continuations(
        self, prompts: Sequence[Sequence[int]], num_tokens: Sequence[int]
    ) -> list[list[int]]:
        """The greedy continuation of each prompt by up to num_tokens[i], without a separator."""
        separator = self.tokenizer.separator
        results: dict[int, list[int]] = {}
        for batch in self.batches([len(prompt) for prompt in prompts]):
            lengths_B = np.array([len(prompts[i]) for i in batch])
            ends_B = lengths_B + [num_tokens[i] for i in batch]
            width = int(ends_B.max())
            rows = []
            for i in batch:
                padding = [0] * (width - len(prompts[i]))
                rows.append([*prompts[i], *padding])
            shortest = int(lengths_B.min())
            tokens_BT = continued(
                self.model,
                self.padded(rows, self.context + 1),
                np.resize(lengths_B, self.batch_size),
                np.resize(ends_B, self.batch_size),
                prefix=max(1, shortest // WIDTH_STEP * WIDTH_STEP),
                separator=separator,
                vocab_size=self.tokenizer.vocab_size,
            )
            continued_rows = np.asarray(tokens_BT)
            for b, i in enumerate(batch):
                tokens = continued_rows[b, lengths_B[b] : ends_B[b]].tolist()
                if separator in tokens:
                    tokens = tokens[: tokens.index(separator)]
                results[i] = tokens
        return [results[i] for i in range(len(prompts))]

    def batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """The indices of `lengths` in batches of similar length, the longest first."""
        longest_first = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
        for begin in range(0, len(lengths), self.batch_size):
            yield longest_first[begin : begin + self.batch_size]

    def padded(self, rows: Sequence[Sequence[int]], most: int) -> np.ndarray:
        """The rows as tokens_BT of `batch_size` rows, up to `most` tokens wide.

        Rows are padded with id 0. A batch that is not full repeats its rows.
        """
        longest = max(len(row) for row in rows)
        width = min(math.ceil((longest - 1) / WIDTH_STEP) * WIDTH_STEP + 1, most)
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
    """The rows that score each token of a text once, behind up to `context` tokens before it.

    The text follows the separator S. With a context of 4, the text 0 1 2 3 4 5 has two rows:
    S 0 1 2 3, whose tokens behind S are scored, and 1 2 3 4 5, of which 4 and 5 are. The harness
    has the same rule (`lm_eval.utils.get_rolling_token_windows` with context_len=1).
    """
    text = [separator, *tokens]
    for begin in range(0, len(tokens), context):
        end = min(begin + context, len(tokens))
        yield ScoredRow(text[max(0, end - context) : end + 1], end - begin)


def cut_at(text: str, stops: str | Sequence[str] | None) -> str:
    """The text up to the first of the stop texts in it."""
    if isinstance(stops, str):
        stops = [stops]
    for stop in stops or ():
        if stop:
            text = text.partition(stop)[0]
    return text


def for_harness(model: Decoder, tokenizer: Tokenizer, *, batch_size: int) -> Any:
    """A `TextModel` that `lm_eval.simple_evaluate` takes; ConfigError without the extra."""
    base: Any = load_extra('lm_eval.api.model', 'evaluate').LM

    class HarnessModel(TextModel, base):
        """A TextModel that is an LM of the harness."""

    return HarnessModel(model, tokenizer, batch_size=batch_size)

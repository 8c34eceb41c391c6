"""Continues a text with a trained language model.

python -m experiments.generate runs/small
python -m experiments.generate runs/small --prompt='def main(' --num_tokens=100

The source is any that experiments.convert reads; of a run it is the newest checkpoint and the first
trial that has not diverged. The tokenizer is that of the run's data, or that of --data for a source
without data. With --beam the continuation is found by beam search instead of sampling.
"""

import logging

import jax
import numpy as np
from absl import flags

from qkattn.config import DataConfig
from qkattn.convert import loading
from qkattn.decode.generate import generate, search
from qkattn.errors import ConfigError
from qkattn.jobs import cli
from qkattn.model import Decoder, Encoder
from qkattn.train.program_cache import keep_programs

log = logging.getLogger('qkattn.generate')

SOURCE = flags.DEFINE_string(
    'source', None, 'Model that continues the text; also without --source=.'
)
DATA = flags.DEFINE_string(
    'data', DataConfig.name, 'Dataset of the tokenizer, for a source that is not a run.'
)
TRIAL = flags.DEFINE_integer(
    'trial', None, 'Index of the trial of a run; default: the first that has not diverged.'
)
PROMPT = flags.DEFINE_string('prompt', None, 'Text to continue; a new document without one.')
PROMPT_TOKENS = flags.DEFINE_string(
    'prompt_tokens', None, 'Token ids to continue, as in "12 7 301"; prints ids.'
)
PROMPT_FILE = flags.DEFINE_string('prompt_file', None, 'File with the text to continue.')
NUM_TOKENS = flags.DEFINE_integer(
    'num_tokens', None, 'Tokens to add; default: what fits into the context, at most 256.'
)
TEMPERATURE = flags.DEFINE_float('temperature', 0.8, 'Divides the logits; 0 is greedy decoding.')
TOP_K = flags.DEFINE_integer('top_k', None, 'Sample from the k most probable tokens only.')
TOP_P = flags.DEFINE_float(
    'top_p', None, 'Sample from the most probable tokens that sum to p only.'
)
SEED = flags.DEFINE_integer('seed', 0, 'Random seed of the sampling.')
BEAM = flags.DEFINE_integer('beam', None, 'Hypotheses of a beam search that ends at a separator.')
LENGTH_PENALTY = flags.DEFINE_float(
    'length_penalty', 1.0, 'a in score / length^a of the beam search.'
)


def main() -> None:
    keep_programs()
    if SOURCE.value is None:
        raise ConfigError(
            '--source=DIRECTORY is required, or the directory alone, as in generate runs/small'
        )
    source = loading.load(SOURCE.value)
    trial = source.check_trial(TRIAL.value)
    model = source.models[trial]
    if not isinstance(model, Decoder) or isinstance(model, Encoder):
        raise ConfigError(
            f'--source={SOURCE.value} is a model of kind {model.config.kind!r}; only a decoder '
            'continues text (experiments.translate runs an encoder_decoder)'
        )
    if source.config is not None:
        settings = ' '.join(f'{name}={value}' for name, value in source.trials[trial].items())
        where = f'step {source.step:,}, trial {trial} of {len(source.models)} ({settings})'
        state = '' if source.alive[trial] else ', which diverged'
        log.info(
            '%s: %s/%s, %s%s', source.path, model.config.score, model.config.value, where, state
        )
    if PROMPT_TOKENS.value is not None:
        if BEAM.value is not None:
            raise ConfigError('--beam requires a tokenizer, so it excludes --prompt_tokens')
        vocab_size = model.config.vocab_size
        print(' '.join(map(str, sampled(model, token_ids(vocab_size), vocab_size))))
        return
    tokenizer = loading.tokenizer_for(source, DATA.value, '--prompt_tokens')
    text = cli.text_of(PROMPT, PROMPT_FILE)
    try:
        ids = tokenizer.encode(text).tolist() or [tokenizer.separator]
    except ValueError as error:
        raise ConfigError(f'the prompt cannot be encoded: {error}') from error
    if BEAM.value is None:
        added = sampled(model, ids, tokenizer.vocab_size)
    else:
        added = searched(model, ids, tokenizer.separator, tokenizer.vocab_size)
    # Decoded together, since a character may start in the prompt and end after it.
    print(tokenizer.decode((ids if text else []) + added))


def sampled(model: Decoder, ids: list[int], vocab_size: int) -> list[int]:
    """Tokens sampled after `ids`, with the settings of the flags."""
    tokens_BT = generate(
        model,
        np.array([ids]),
        num_tokens(model, ids),
        key=jax.random.key(SEED.value),
        temperature=TEMPERATURE.value,
        top_k=TOP_K.value,
        top_p=TOP_P.value,
        vocab_size=vocab_size,
    )
    return tokens_BT[0].tolist()


def searched(model: Decoder, ids: list[int], separator: int, vocab_size: int) -> list[int]:
    """The best continuation of `ids` by beam search, up to the separator."""
    hypotheses = search(
        model,
        np.array([ids]),
        num_tokens(model, ids),
        separator=separator,
        beam=BEAM.value,
        length_penalty=LENGTH_PENALTY.value,
        vocab_size=vocab_size,
    )
    best_T = np.asarray(hypotheses.tokens_BKT[0, 0])
    return best_T[best_T != separator].tolist()


def num_tokens(model: Decoder, ids: list[int]) -> int:
    """--num_tokens, or what fits into the context: the last token needs no position."""
    if NUM_TOKENS.value is not None:
        return NUM_TOKENS.value
    return max(1, min(256, model.config.context - len(ids) + 1))


def token_ids(vocab_size: int) -> list[int]:
    """The ids in --prompt_tokens."""
    words = PROMPT_TOKENS.value.split()
    if not words or not all(word.isdecimal() and int(word) < vocab_size for word in words):
        raise ConfigError(
            f'--prompt_tokens={PROMPT_TOKENS.value!r} must be whole numbers from 0 to '
            f'{vocab_size - 1}'
        )
    return [int(word) for word in words]


if __name__ == '__main__':
    cli.run(main, positional=SOURCE)

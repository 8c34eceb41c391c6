"""Continues a text with a trained language model.

python -m experiments.generate runs/small
python -m experiments.generate runs/small --prompt='def main(' --temperature=0

The source is any that experiments.convert reads; of a run, the newest checkpoint and the first
trial that has not diverged are used. The tokenizer is that of the run's data, or that of --data for
a source without data. Without a prompt a new document begins.
"""

import logging

import jax
import numpy as np
from absl import flags

from qkattn.convert import loading
from qkattn.data.tokenizers.tokenizer import Tokenizer
from qkattn.decode.generate import generate
from qkattn.errors import ConfigError
from qkattn.jobs import cli
from qkattn.model import Decoder, Encoder
from qkattn.train.program_cache import keep_programs

log = logging.getLogger('qkattn.generate')

SOURCE = cli.define_path(
    'source', None, 'Model that continues the text; --source= may be left out.'
)
DATA = cli.define_data()
TRIAL = cli.define_trial()
IMPORTS = cli.define_imports()
PROMPT = flags.DEFINE_string('prompt', '', 'Text to continue; by default, a new document.')
PROMPT_TOKENS = flags.DEFINE_string(
    'prompt_tokens', None, 'Token ids to continue, as in "12 7 301"; prints ids.'
)
NUM_TOKENS = flags.DEFINE_integer(
    'num_tokens', None, 'Tokens to add; default: what fits into the context, at most 256.'
)
TEMPERATURE = flags.DEFINE_float('temperature', 0.8, 'Divides the logits; 0 is greedy decoding.')
SEED = flags.DEFINE_integer(
    'seed', 0, 'Random seed of the sampling.', lower_bound=0, upper_bound=2**31 - 1
)


def main() -> None:
    """Prints the continuation of a prompt by a decoder."""
    keep_programs()
    source = loading.load(cli.required(SOURCE), imports=IMPORTS.value)
    trial = source.check_trial(TRIAL.value)
    model = source.models[trial]
    if not isinstance(model, Decoder) or isinstance(model, Encoder):
        raise ConfigError(
            f'--source={SOURCE.value} is a model of kind {model.config.kind!r}; only a decoder '
            'continues text (experiments.translate runs an encoder_decoder)'
        )
    ids, tokenizer = prompt_of_flags(source)
    num_tokens = NUM_TOKENS.value
    if num_tokens is None:
        # What fits into the context, at most 256. The last token needs no position.
        room = model.config.context - len(ids) + 1
        num_tokens = max(1, min(256, room))
    if source.config is not None:
        log.info('%s', source.state(trial))
    tokens_BT = generate(
        model,
        np.array([ids]),
        num_tokens,
        key=jax.random.key(SEED.value),
        temperature=TEMPERATURE.value,
        vocab_size=model.config.vocab_size if tokenizer is None else tokenizer.vocab_size,
    )
    added = tokens_BT[0].tolist()
    if tokenizer is None:
        print(' '.join(map(str, added)))
    else:
        # Decode the prompt, too, because a character may begin in the prompt and end after it.
        prompt = ids if PROMPT.value else []
        print(tokenizer.decode(prompt + added))


def prompt_of_flags(source: loading.Loaded) -> tuple[list[int], Tokenizer | None]:
    """Returns the token ids of the prompt, and the tokenizer; None with --prompt_tokens.

    An empty prompt becomes the id that separates documents.
    """
    if PROMPT_TOKENS.value is not None:
        if PROMPT.value != PROMPT.default:
            raise ConfigError(f'--{PROMPT.name} and --{PROMPT_TOKENS.name} exclude each other')
        return cli.token_ids(PROMPT_TOKENS, source.model_config.vocab_size), None
    tokenizer = loading.tokenizer_for(source, DATA.value, '--prompt_tokens')
    try:
        ids = tokenizer.encode(PROMPT.value).tolist()
    except ValueError as error:
        raise ConfigError(f'the prompt cannot be encoded: {error}') from error
    if ids:
        return ids, tokenizer
    if tokenizer.separator is None:
        raise ConfigError(
            f'--{PROMPT.name} must not be empty, since no id separates documents of '
            f'{tokenizer.name}'
        )
    return [tokenizer.separator], tokenizer


if __name__ == '__main__':
    cli.run(main, positional=SOURCE)

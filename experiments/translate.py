"""Translates sentences with a trained encoder-decoder, or scores it on its own data.

python -m experiments.translate --source=runs/multi30k_tiny --text='a man rides a horse .'
python -m experiments.translate --source=runs/multi30k_tiny --file=input.en --out=output.de
python -m experiments.translate --source=runs/multi30k_tiny --score=test

One sentence a line, in and out. The newest checkpoint of the run is used, so a run may be scored
while it trains. The search is that of the run's settings unless flags say otherwise.
"""

import dataclasses
import json
from pathlib import Path

from absl import flags

from qkattn import pretrained
from qkattn.config import Config, DecodeConfig
from qkattn.config.validate import check_decode
from qkattn.data.load import load
from qkattn.decode.translate import score_split, translate
from qkattn.errors import ConfigError
from qkattn.run import cli
from qkattn.run.files import write_atomic

SOURCE = flags.DEFINE_string('source', None, 'A training run of an encoder-decoder.')
TRIAL = flags.DEFINE_integer('trial', 0, 'Which trial of the run, in the order of its results.')
TEXT = flags.DEFINE_string('text', None, 'Sentences to translate, one a line.')
FILE = flags.DEFINE_string('file', None, 'File of sentences to translate, one a line.')
OUT = flags.DEFINE_string('out', None, 'Where translations go; standard output without it.')
SCORE = flags.DEFINE_string('score', None, 'Split of the data to translate and score.')
BEAM = flags.DEFINE_integer('beam', None, 'Hypotheses of the beam search; 1 is greedy.')
LENGTH_PENALTY = flags.DEFINE_float('length_penalty', None, 'a in score / length^a.')
MAX_SOURCES = flags.DEFINE_integer('max_sources', None, 'Score that many sentences only.')


def main() -> None:
    if SOURCE.value is None:
        raise ConfigError('--source=DIRECTORY is required')
    config = pretrained.settings_of(SOURCE.value)
    if config is None:
        raise ConfigError(f'--source={SOURCE.value} is not the directory of a training run')
    if config.model.kind != 'encoder_decoder':
        raise ConfigError(
            f'--source={SOURCE.value} is a model of kind {config.model.kind!r}; only an '
            'encoder_decoder translates'
        )
    given = {'beam': BEAM.value, 'length_penalty': LENGTH_PENALTY.value}
    given['max_sources'] = MAX_SOURCES.value
    decode = dataclasses.replace(
        config.decode, **{name: value for name, value in given.items() if value is not None}
    )
    check_decode(decode)
    if SCORE.value is not None:
        for flag in (TEXT, FILE, OUT):
            if flag.value is not None:
                raise ConfigError(f'--score and --{flag.name} exclude each other')
        score(config, decode)
        return
    if MAX_SOURCES.value is not None:
        raise ConfigError('--max_sources is of --score; leave it out')
    # An empty line stays an empty line, so that output line i belongs to input line i.
    lines = cli.text_of(TEXT, FILE).split('\n')
    if lines[-1] == '':
        del lines[-1]
    if not lines:
        raise ConfigError('--text or --file must hold at least one sentence')
    if config.data.lowercase:
        lines = [line.lower() for line in lines]
    filled = [line for line in lines if line.strip()]
    if OUT.value is not None and Path(OUT.value).exists():
        raise ConfigError(f'--out={OUT.value} exists; name a file that does not')
    tokenizer = pretrained.tokenizer_of_run(SOURCE.value, config)
    model = pretrained.load_model(SOURCE.value, trial=TRIAL.value)
    found = iter(translate(model, tokenizer, filled, decode))
    text = ''.join(f'{next(found) if line.strip() else ""}\n' for line in lines)
    if OUT.value is None:
        print(text, end='')
    else:
        write_atomic(OUT.value, text)


def score(config: Config, decode: DecodeConfig) -> None:
    """Prints the scores of --score as JSON."""
    pairs = load(config.data)
    if SCORE.value not in pairs.splits:
        raise ConfigError(f'--score={SCORE.value} must be one of {", ".join(pairs.splits)}')
    pretrained.tokenizer_of_run(SOURCE.value, config)  # refuses data that has changed
    model = pretrained.load_model(SOURCE.value, trial=TRIAL.value)
    found = score_split(model, pairs, SCORE.value, decode, lowercase=config.data.lowercase)
    print(json.dumps({'split': SCORE.value, **dataclasses.asdict(decode), **found}, indent=2))


if __name__ == '__main__':
    cli.run(main)

"""Translates sentences with a trained encoder-decoder, or scores it on its own data.

python -m experiments.translate runs/phrases --text='Sat, Jan 30, 1926'
python -m experiments.translate runs/phrases --file=input.en > output.de
python -m experiments.translate runs/phrases --score=test

Input and output have one sentence per line. The newest checkpoint of the run is used, so a run can
be scored while it trains; --average=5 takes the mean of the newest five, which a run with
train.keep=5 has. Flags override the run's settings of the beam search.
"""

import dataclasses
import functools
import json
from typing import Any

from absl import flags

from qkattn.config import DecodeConfig
from qkattn.config.setting import check_section
from qkattn.convert import loading
from qkattn.data.load import load
from qkattn.data.tasks.translation import score_split
from qkattn.data.tokenizers.vocabulary import use_recorded_tokenizers
from qkattn.data.tokens import PairDataset
from qkattn.decode.translate import translate, translate_ids
from qkattn.errors import ConfigError
from qkattn.jobs import cli
from qkattn.model.transformer import Transformer
from qkattn.storage.files import absolute
from qkattn.train.checkpoint import recorded_tokenizers
from qkattn.train.program_cache import keep_programs

SOURCE = cli.define_path('source', None, 'Run directory of an encoder-decoder.')
TRIAL = cli.define_trial()
TEXT = flags.DEFINE_string('text', None, 'Sentences to translate, one per line.')
FILE = cli.define_path('file', None, 'File of sentences to translate, one per line.')
SCORE = flags.DEFINE_string('score', None, 'Split of the data to translate and score.')
BEAM = flags.DEFINE_integer('beam', None, 'Hypotheses of the beam search; 1 is greedy.')
LENGTH_PENALTY = flags.DEFINE_float('length_penalty', None, 'a in score / length^a.')
AVERAGE = flags.DEFINE_integer(
    'average', 1, 'Number of newest checkpoints whose parameters are averaged.', lower_bound=1
)


def main() -> None:
    """Prints translations of --text or --file, or the scores of the split --score."""
    keep_programs()
    source = loading.load(cli.required(SOURCE), average=AVERAGE.value)
    config = source.config
    model = source.models[source.check_trial(TRIAL.value)]
    if config is None:
        raise ConfigError(f'--source={SOURCE.value} is not the directory of a training run')
    if config.model.kind != 'encoder_decoder':
        raise ConfigError(
            f'--source={SOURCE.value} is a model of kind {config.model.kind!r}; only an '
            'encoder_decoder translates'
        )
    tokenizer = loading.tokenizer_for(source, config.data.name, '--text')
    decode = beam_search(config.decode)
    if SCORE.value is not None:
        for flag in (TEXT, FILE):
            if flag.value is not None:
                raise ConfigError(f'--score and --{flag.name} exclude each other')
        scores = scores_of(source, model, SCORE.value, decode)
        print(json.dumps({'split': SCORE.value, **dataclasses.asdict(decode), **scores}, indent=2))
        return
    lines = lines_of(cli.text_or_file_content(TEXT, FILE))
    if not lines:
        raise ConfigError('--text or --file must hold at least one sentence')
    if config.data.lowercase:
        lines = [line.lower() for line in lines]
    # Blank lines stay blank, and the others are translated.
    sentences = [line for line in lines if line.strip()]
    translations = iter(translate(model, tokenizer, sentences, decode))
    for line in lines:
        translation = next(translations) if line.strip() else ''
        # Without line breaks, line i of the output belongs to line i of the input.
        print(translation.replace('\n', ' '))


def beam_search(decode: DecodeConfig) -> DecodeConfig:
    """Returns the run's settings of the beam search, with those that flags override."""
    overrides: dict[str, Any] = {'max_sources': None}  # all sentences of a split are scored
    for flag in (BEAM, LENGTH_PENALTY):
        if flag.value is not None:
            overrides[flag.name] = flag.value
    overridden = dataclasses.replace(decode, **overrides)
    check_section('decode.', overridden)
    return overridden


def scores_of(
    source: loading.Loaded, model: Transformer, split: str, decode: DecodeConfig
) -> dict[str, Any]:
    """Translates a split of the run's data; returns BLEU and other scores."""
    data = source.config.data
    # A tokenizer.json is opened in the way that the run recorded.
    tokenizers = recorded_tokenizers(absolute(source.path), data)
    with use_recorded_tokenizers(*tokenizers):
        pairs = load(data)
    assert isinstance(pairs, PairDataset)  # as for every encoder_decoder
    if split not in pairs.splits:
        raise ConfigError(f'--score={split} must be one of {", ".join(pairs.splits)}')
    translate_batch = functools.partial(translate_ids, model, pairs.source.tokenizer, config=decode)
    return score_split(
        pairs,
        split,
        translate_batch,
        longest_source=source.model_config.encoder.context - 1,  # the separator takes a position
        max_sources=None,
        lowercase=data.lowercase,
    )


def lines_of(text: str) -> list[str]:
    r"""Splits a text at '\n' and '\r\n' only, unlike `str.splitlines`. Empty lines are kept."""
    lines = text.split('\n')
    if lines[-1] == '':
        del lines[-1]
    return [line.removesuffix('\r') for line in lines]


if __name__ == '__main__':
    cli.run(main, positional=SOURCE)

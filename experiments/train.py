"""Trains one architecture as a stack of trials.

python -m experiments.train --config=configs/small.py --workdir=runs/small
"""

from typing import Any

from absl import flags

from qkattn.config import Config
from qkattn.errors import ConfigError
from qkattn.metrics import PREFIXES
from qkattn.run import cli
from qkattn.train import train
from qkattn.train.results import FINISHED

CONFIG = cli.define_config()
WORKDIR = flags.DEFINE_string('workdir', None, 'Run directory; the same one resumes.')


def main() -> None:
    config = cli.read_config(CONFIG, Config)
    if WORKDIR.value is None:
        raise ConfigError('--workdir=DIRECTORY is required')
    for result in train(config, WORKDIR.value, command=cli.command('train')):
        trial = ' '.join(f'{name}={value}' for name, value in result['trial'].items())
        print(f'{trial} {result["status"]}', end='')
        if result['status'] == FINISHED:
            reached = [f'{split} {" ".join(said)}' for split, said in summary(result).items()]
            print(f': {", ".join(reached)}', end='')
        print()


def summary(result: dict[str, Any]) -> dict[str, list[str]]:
    """What a finished trial reached, split by split, as far as it was measured."""
    formats = {
        'loss': '{:.4f} nats/token',
        'perplexity': 'perplexity {:.4g}',
        'bits_per_byte': '{:.4f} bits/byte',
        'accuracy': '{:.2%} right',
        'bleu': 'BLEU {:.2f}',
    }
    return {
        split: [
            said.format(result[f'{short}_{name}'])
            for name, said in formats.items()
            if f'{short}_{name}' in result and result[f'{short}_{name}'] is not None
        ]
        for split, short in PREFIXES.items()
        if result[f'{short}_loss'] is not None
    }


if __name__ == '__main__':
    cli.run(main)

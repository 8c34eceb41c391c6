"""Trains one architecture as a stack of trials.

python -m experiments.train --config=configs/small.py --workdir=runs/small
"""

from absl import flags

from qkattn import cli
from qkattn.config import Config, ConfigError
from qkattn.train import train
from qkattn.train.loop import FINISHED

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
            losses = (result['val_bits_per_byte'], result['test_bits_per_byte'])
            print(': validation {:.4f}, test {:.4f} bits/byte'.format(*losses), end='')
        print()


if __name__ == '__main__':
    cli.run(main)

"""Trains one architecture as a stack of trials.

python -m experiments.train --config=configs/small.py --workdir=runs/small
"""

from absl import flags

from qkattn import cli
from qkattn.config import Config, ConfigError
from qkattn.train import train

CONFIG = cli.define_config()
WORKDIR = flags.DEFINE_string('workdir', None, 'Run directory; the same one resumes.')


def main() -> None:
    config = cli.read_config(CONFIG, Config)
    if WORKDIR.value is None:
        raise ConfigError('--workdir=DIRECTORY is required')
    for result in train(config, WORKDIR.value, command=cli.command('train')):
        print(
            ' '.join(f'{name}={value}' for name, value in result['trial'].items()),
            f'{result["status"]}:',
            f'validation {result["val_bits_per_byte"]} bits/byte,',
            f'test {result["test_bits_per_byte"]} bits/byte',
        )


if __name__ == '__main__':
    cli.run(main)

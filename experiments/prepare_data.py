"""Tokenizes a text once into a directory, which any number of runs on any number of hosts read.

python -m experiments.prepare_data --config=configs/small.py --out=runs/tokens
python -m experiments.train --config=small --workdir=runs/from_tokens \\
    --config.data.name=tokens --config.data.path=runs/tokens

Only the data fields of the config are read. Existing tokens are checked against their sha256 and
made again if they are damaged.
"""

from qkattn.config import Config
from qkattn.config.setting import check_section
from qkattn.data.load import prepare
from qkattn.jobs import cli, signals

CONFIG = cli.define_config(Config)
OUT = cli.define_path('out', None, 'Directory of the tokens.')


@signals.exit_on_signal()
def main() -> None:
    out = cli.required(OUT)
    data = cli.read_config(CONFIG).data
    check_section('data.', data)
    dataset = prepare(data, out)
    for split in dataset.splits:
        info = dataset.info(split)
        print(
            f'{split}: {info.num_tokens:,} tokens, {info.num_documents:,} documents, '
            f'{info.num_bytes:,} bytes'
        )
    print(f'{dataset.tokenizer.name}, {dataset.vocab_size:,} ids')
    print(f'to train: --config.data.name=tokens --config.data.path={out}')


if __name__ == '__main__':
    cli.run(main)

"""Tokenizes a text once into shards, which any number of runs on any number of hosts read.

python -m experiments.prepare_data --config=configs/small.py --out=tokens/stdlib
python -m experiments.train --config=configs/small.py --workdir=runs/shards
    --config.data.name=shards --config.data.path=tokens/stdlib

Of the config only the fields of data are read. The same command goes on after an interruption.
--verify compares all shards with their sha256.
"""

from absl import flags

from qkattn.config import Config
from qkattn.data.load import prepare, verify
from qkattn.errors import ConfigError
from qkattn.jobs import cli, signals

CONFIG = cli.define_config(Config)
OUT = flags.DEFINE_string('out', None, 'Directory of the shards; the same directory goes on.')
TOKENS = flags.DEFINE_integer(
    'shard_tokens',
    100_000_000,
    'A shard ends with the document that reaches so many tokens.',
    lower_bound=1,
)
VERIFY = flags.DEFINE_bool('verify', False, 'Compare the shards in --out with their sha256.')


@signals.exit_on_signal()
def main() -> None:
    out = cli.required(OUT)
    if VERIFY.value:
        if problems := verify(out):
            raise ConfigError('; '.join(problems))
        print(f'{out}: all shards have their sha256')
        return
    data = cli.read_config(CONFIG).data
    index = prepare(data, out, shard_tokens=TOKENS.value)
    for split, info in index.splits.items():
        count = len(info.shards)
        print(
            f'{split}: {count:,} shard{"s" * (count > 1)}, {info.num_tokens:,} tokens, '
            f'{info.num_documents:,} documents, {info.num_bytes:,} bytes'
        )
    print(f'{index.tokenizer_name}, {index.vocab_size:,} ids')
    print(f'to train: --config.data.name=shards --config.data.path={out}')


if __name__ == '__main__':
    cli.run(main)

"""Tokenizes a text once into a directory, which any number of runs on any number of hosts read.

python -m experiments.prepare_data --config=configs/small.py --out=runs/tokens
python -m experiments.train --config=small --workdir=runs/from_tokens \\
    --config.data.name=tokens --config.data.path=runs/tokens

Only the data fields of the config are read. Existing tokens are checked against their sha256 and
made again if they are damaged. The command that trains on them is printed.
"""

import dataclasses
import shlex

from absl import flags

from qkattn.config import Config, DataConfig
from qkattn.config.setting import check_section
from qkattn.data.corpora.corpus_registry import SETTINGS
from qkattn.data.load import prepare
from qkattn.data.tasks.language import MaskedRows
from qkattn.data.tokenizers.vocabulary import is_import_path
from qkattn.data.tokens import TokenDataset
from qkattn.errors import ConfigError
from qkattn.jobs import cli, signals

# More processes than any machine has cores.
MAX_WORKERS = 1024

CONFIG = cli.define_config(Config)
OUT = cli.define_path('out', None, 'Directory of the tokens.')
WORKERS = flags.DEFINE_integer(
    'workers', 1, 'Processes that tokenize; the tokens do not depend on their number.'
)


@signals.exit_on_signal()
def main() -> None:
    """Tokenizes the data of a config into --out; prints the command that trains on them."""
    out = cli.required(OUT)
    config = cli.read_config(CONFIG)
    data = config.data
    check_section('data.', data)
    if not 1 <= WORKERS.value <= MAX_WORKERS:
        raise ConfigError(f'--workers={WORKERS.value} must be at least 1 and at most {MAX_WORKERS}')
    dataset = prepare(data, out, WORKERS.value)
    for split in dataset.splits:
        info = dataset.info(split)
        noun = 'document' if info.num_documents == 1 else 'documents'
        print(
            f'{split}: {info.num_tokens:,} tokens, {info.num_documents:,} {noun}, '
            f'{info.num_bytes:,} bytes'
        )
    print(f'{dataset.tokenizer.name}, {dataset.vocab_size:,} ids')
    arguments = [*cli.arguments(on_tokens(config, out, dataset)), '--workdir=DIRECTORY']
    print(f'to train: {cli.script("train")} {shlex.join(arguments)}')


def on_tokens(config: Config, out: str, dataset: TokenDataset) -> Config:
    """Returns the config of a run that reads the tokens in `out` in place of the text.

    Settings of the text, such as `lowercase`, get their defaults.
    """
    data_fields = {}
    for name in (*SETTINGS, 'lowercase', 'tokenizer', 'tokenizer_size'):
        data_fields[name] = getattr(DataConfig, name)  # the default
    if is_import_path(config.data.tokenizer):
        # The run imports the tokenizer only if its config names it.
        data_fields['tokenizer'] = config.data.tokenizer
    data_fields['name'] = 'tokens'
    data_fields['path'] = out
    data = dataclasses.replace(config.data, **data_fields)

    num_ids = dataset.vocab_size
    if config.model.kind == MaskedRows.kind:
        num_ids += 1  # the mask token
    vocab_size = max(config.model.vocab_size, num_ids)
    model = dataclasses.replace(config.model, vocab_size=vocab_size)
    return dataclasses.replace(config, data=data, model=model)


if __name__ == '__main__':
    cli.run(main)

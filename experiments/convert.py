"""Rewrites the attention of a trained or published model, exactly where that is possible.

python -m experiments.convert runs/small --apply='truncate(rank=8)'
python -m experiments.convert runs/small --apply=merge --out=runs/merged
python -m experiments.convert runs/small --layout=transformers --out=runs/gpt2

The source is a run directory, a directory of exported parameters, a directory or .safetensors file
of a GPT-2 in the Hugging Face layout, or a nanoGPT .pt file. --out is a directory of exported
parameters, from which training continues with --config.train.init_from=DIR. With
--layout=transformers it is a GPT-2 or a Llama that transformers reads, where the model is one.
"""

import json
from pathlib import Path

import numpy as np
from absl import flags

from qkattn.config import ModelConfig
from qkattn.convert import loading, transformers_layout
from qkattn.convert.conversions import CONVERSIONS, convert_model, logit_error, parse_conversion
from qkattn.errors import ConfigError, ConversionError
from qkattn.jobs import cli
from qkattn.report.prose import counted
from qkattn.storage.files import absolute, check_directory
from qkattn.train import exported
from qkattn.train.program_cache import keep_programs

SOURCE = cli.define_path('source', None, 'Model to convert.')
TRIAL = cli.define_trial()
IMPORTS = cli.define_imports()
NUM_HEADS = flags.DEFINE_integer(
    'num_heads', None, 'Number of heads, for published files without a config.'
)
APPLY = flags.DEFINE_multi_string(
    'apply',
    [],
    '\n'.join(
        [
            'Conversion, e.g. merge or truncate(rank=8), exact unless an error is mentioned:',
            *(f'{name}: {conversion.summary}' for name, conversion in CONVERSIONS.items()),
            'They are applied in order',
        ]
    ),
)
# The largest relative change of the logits that an exact conversion may cause by rounding.
EXACT = 1e-3

OUT = cli.define_path('out', None, 'Directory to write to.')
LAYOUT = flags.DEFINE_enum(
    'layout',
    'qkattn',
    ['qkattn', 'transformers'],
    "Files of --out: exported parameters ('qkattn'), or model.safetensors, config.json and "
    "tokenizer.json of a GPT-2 or Llama ('transformers'), with the same logits.",
)


def main() -> None:
    """Applies the conversions of --apply to a model in turn, and writes it to --out."""
    keep_programs()
    path = cli.required(SOURCE)
    for text in APPLY.value:
        parse_conversion(text)  # raises an error before the model is loaded
    if OUT.value is not None:
        out = check_directory(cli.required(OUT), name='--out')
        if out.exists() and any(out.iterdir()):
            raise ConfigError(f'--out={OUT.value} is not empty; give another directory')
    elif LAYOUT.value != LAYOUT.default:
        raise ConfigError(f'--layout={LAYOUT.value} needs --out=DIRECTORY to write to')
    source = loading.load(path, num_heads=NUM_HEADS.value, imports=IMPORTS.value)
    trial = source.check_trial(TRIAL.value)
    config = source.model_config
    params = source.params[trial]
    reference = (config, params)  # the model whose logits an exact conversion keeps
    length = min(config.context, 64)
    tokens_BT = np.random.default_rng(0).integers(0, config.vocab_size, (4, length))
    diverged = ''
    if not source.alive[trial]:
        diverged = f'; trial {trial} diverged, its last finite parameters'
    print(f'{path}: {config.variant}, {counted(config.num_layers, "layer")}{diverged}')
    for conversion in APPLY.value:
        config, params, is_exact = apply_conversion(
            conversion, config, params, reference, tokens_BT
        )
        if not is_exact:
            reference = (config, params)
    if OUT.value is None:
        return
    if LAYOUT.value == 'transformers':
        write_for_transformers(source, config, params)
        return
    origin = {'source': Path(path).name, 'trial': trial, 'applied': APPLY.value}
    exported.save(OUT.value, config, params, origin=origin)
    variant = json.dumps({'score': config.score, 'value': config.value})
    note = ''
    if source.config:
        note = '; without optimizer state: its moments do not transform with the parameters'
    print(f'wrote {OUT.value} ({variant}){note}')


def apply_conversion(
    conversion: str,
    config: ModelConfig,
    params: dict,
    reference: tuple[ModelConfig, dict],
    tokens_BT: np.ndarray,
) -> tuple[ModelConfig, dict, bool]:
    """Converts a model, and prints how much that changes.

    Args:
        conversion: The conversion, such as 'merge' or 'truncate(rank=8)'.
        config: The config of the model.
        params: The parameters of the model.
        reference: Config and parameters of the model whose logits an exact conversion keeps.
        tokens_BT: The tokens that logits are compared on.

    Returns:
        The config and the parameters of the converted model, and whether the conversion is exact.

    Raises:
        ConfigError: The model cannot be converted, or an exact conversion changes the logits.
    """
    try:
        config, params, error_by_layer = convert_model(conversion, config, params)
        change = logit_error(reference, (config, params), tokens_BT)
        is_exact = not error_by_layer
        if is_exact and not change <= EXACT:  # `not <=` also catches NaN
            raise ConversionError(
                f'it changes logits by {change:.1e} of the largest, but an exact conversion '
                f'may change them by {EXACT:.0e} at most'
            )
    except ConversionError as error:
        raise ConfigError(f'{conversion} cannot be applied: {error}') from error
    name, _, _ = conversion.partition('(')  # 'truncate(rank=8)' -> 'truncate'
    is_least = ''
    if name in CONVERSIONS:  # the lossy ones are `truncate` and `truncate_vo`
        is_least = ', the least that any of this rank do (Eckart-Young)'
    for layer, lost in enumerate(error_by_layer):
        print(
            f'layer {layer}: {conversion} leaves out {lost:.3e} of the norm of the '
            f'matrices{is_least}'
        )
    print(f'{conversion}: {config.variant}, largest relative logit change {change:.2e}')
    return config, params, is_exact


def write_for_transformers(source: loading.Loaded, config: ModelConfig, params: dict) -> None:
    """Writes a model, with its tokenizer if possible, to --out in the layout of transformers."""
    layout = transformers_layout.layout_of(config)
    tokenizer = None
    why_no_tokenizer = 'the source is not a run, whose data have a tokenizer'
    if source.config is not None:
        try:
            tokenizer = loading.tokenizer_for(source, source.config.data.name, 'token ids')
        except ConfigError as error:  # the data may be on another machine
            why_no_tokenizer = str(error)
    transformers_layout.save(OUT.value, config, params, tokenizer)
    print(f'wrote {OUT.value}, a {layout.name} in the layout of transformers')
    if tokenizer is None:
        print(f'without tokenizer.json: {why_no_tokenizer}')
    elif not (absolute(OUT.value) / 'tokenizer.json').exists():
        print(f'without tokenizer.json: {tokenizer.name} has no such form')


if __name__ == '__main__':
    cli.run(main, positional=SOURCE)

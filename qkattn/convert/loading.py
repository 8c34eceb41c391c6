"""Loads models by path: runs, exported parameters, and published files."""

import contextlib
import dataclasses
import functools
import operator
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax

from qkattn.config import Config, DataConfig, ModelConfig
from qkattn.convert.published import load_gpt2, load_nanogpt
from qkattn.data.corpora import corpus_registry
from qkattn.data.corpora.corpus import explain_read_errors
from qkattn.data.load import tokenizer_of
from qkattn.data.token_files import INDEX, open_prepared, read_index
from qkattn.data.tokenizers.subwords import FileTokenizer
from qkattn.data.tokenizers.tiktoken_encodings import PREFIX
from qkattn.data.tokenizers.tokenizer import ByteTokenizer, Tokenizer
from qkattn.data.tokenizers.vocabulary import (
    is_import_path,
    names_in,
    restore_tokenizer,
    use_recorded_tokenizers,
)
from qkattn.errors import ConfigError
from qkattn.model.transformer import Transformer, inference_model
from qkattn.storage.files import absolute, as_path, read_whole
from qkattn.train import exported
from qkattn.train.checkpoint import Checkpoints


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Loaded:
    """The newest checkpoint of a run, or a single model without a run.

    A trial is one seed and one setting of the hyperparameters. A model without a run has one trial.
    """

    path: Path
    model_config: ModelConfig
    # The float32 parameters of each trial.
    params: list[dict]
    # Seed, learning rate and weight decay of each trial; [{}] without a run.
    trials: list[dict[str, Any]]
    # False for trials that diverged. Their parameters are the last finite ones.
    alive: list[bool]
    # The config of the run; None without a run.
    config: Config | None = None
    # The number of optimizer steps; None without a run.
    step: int | None = None

    @functools.cached_property
    def models(self) -> list[Transformer]:
        """The model of each trial, with parameters in the compute dtype."""
        return [inference_model(self.model_config, params) for params in self.params]

    @property
    def trial(self) -> int:
        """The first trial that has not diverged; 0 if all trials have diverged."""
        return self.alive.index(True) if True in self.alive else 0

    @property
    def model(self) -> Transformer:
        """The model of `trial`."""
        return self.models[self.trial]

    def check_trial(self, trial: int | None) -> int:
        """Returns `trial`, or `self.trial` by default. Raises ConfigError if it is out of range."""
        if trial is None:
            return self.trial
        num_trials = len(self.params)
        if not 0 <= trial < num_trials:
            raise ConfigError(
                f'trial={trial} must be in [0, {num_trials}), the trials of {self.path}'
            )
        return trial

    def state(self, trial: int) -> str:
        """Describes a trial of a run: path, variant, step, settings, and whether it diverged."""
        settings = ' '.join(f'{name}={value}' for name, value in self.trials[trial].items())
        diverged = '' if self.alive[trial] else ', which diverged'
        return (
            f'{self.path}: {self.model_config.variant}, step {self.step:,}, '
            f'trial {trial} of {len(self.params)} ({settings}){diverged}'
        )

    def __repr__(self) -> str:
        model = self.model_config
        parts = [
            f'{model.kind} {model.variant}',
            f'd_model={model.d_model}',
            f'num_layers={model.num_layers}',
        ]
        if self.config is not None:
            parts.append(f'step {self.step} of {self.config.train.num_steps}')
            parts.append(f'trials: {self.trials}')
        parts.append(f'path: {self.path}')
        return f'Loaded({", ".join(parts)})'


def load(
    source: str | os.PathLike[str],
    *,
    num_heads: int | None = None,
    average: int = 1,
    imports: Collection[str] = (),
) -> Loaded:
    """Loads a run or a model.

    Args:
        source: One of

            - a run directory;
            - a directory of exported parameters;
            - a directory or .safetensors file of a GPT-2 in the Hugging Face layout;
            - a .pt checkpoint of nanoGPT.
        num_heads: The number of heads, for published files without a config.
        average: The number of newest checkpoints of a run whose parameters are averaged.
        imports: Import paths that exported parameters may use. Import paths of a run are always
            allowed, because its config is code.

    Raises:
        ConfigError: `source` is none of these, is damaged, or has a different layout.
        CheckpointError: All checkpoints of the run are damaged.
    """
    path = as_path(source)
    if not path.exists():
        raise ConfigError(
            f'{path} does not exist; give a run, exported parameters or a published model'
        )
    is_run = exported.is_run(path)
    is_exported = not is_run and (path / exported.ABOUT).exists()  # qkattn.json
    if num_heads is not None and (is_run or is_exported):
        raise ConfigError(
            f'num_heads={num_heads} is for published files, and {path} has a config; leave it out'
        )
    if is_run:
        return _load_run(path, average)
    if average != 1:
        raise ConfigError(
            f'average={average} needs the checkpoints of a run, and {path} is not one'
        )

    if path.suffix == '.pt':
        model_config, params = load_nanogpt(path, num_heads=num_heads)
    elif path.is_file() or (not is_exported and any(path.glob('*.safetensors*'))):
        model_config, params = load_gpt2(path, num_heads=num_heads)
    else:
        model_config, params = exported.load(path, imports)
    return Loaded(path, model_config, params=[params], trials=[{}], alive=[True])


def _load_run(path: Path, average: int) -> Loaded:
    """Loads the newest checkpoint of a run, or the average of the newest ones; see `load`."""
    config, step, stacked_state = exported.load_stack(absolute(path), average)
    trials = config.trials.trials()
    # Arrays of a checkpoint have a leading axis of trials.
    params_of_trials = []
    for index in range(len(trials)):
        take_trial = operator.itemgetter(index)
        params_of_trials.append(jax.tree.map(take_trial, stacked_state['params']))
    return Loaded(
        path=path,
        model_config=config.model,
        params=params_of_trials,
        trials=trials,
        alive=stacked_state['alive'].tolist(),
        config=config,
        step=step,
    )


def tokenizer_for(source: Loaded, data: str | None, otherwise: str) -> Tokenizer:
    """Returns the tokenizer of a loaded model.

    Args:
        source: The model.
        data: The value of the flag --data. It names the tokenizer of a model without a run. None is
            a tokenizer of bytes.
        otherwise: A flag that replaces text, such as '--prompt_tokens', for errors.

    Raises:
        ConfigError: The tokenizer has more tokens than the model, the data has changed since the
            run, `data` names no tokenizer, or `data` is None and the model has more ids than bytes.
    """
    vocab_size = source.model_config.vocab_size
    if source.config is not None:
        tokenizer = _tokenizer_of_run(source.path, source.config.data)
    elif data is not None:
        tokenizer = tokenizer_of_flag(data, otherwise)
    else:
        tokenizer = ByteTokenizer()
        # The ids of another vocabulary would be read as bytes, without an error.
        if vocab_size > tokenizer.vocab_size:
            raise ConfigError(
                f'--data is required: {source.path} has {vocab_size} ids, and text of bytes only '
                f'{tokenizer.vocab_size}; give a tokenizer.json, {PREFIX}NAME, or a directory that '
                'prepare_data has written'
            )
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f'tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens and the model '
            f'{vocab_size}; give {otherwise}'
        )
    return tokenizer


def _tokenizer_of_run(path: Path, data: DataConfig) -> Tokenizer:
    """Returns the tokenizer of a run's data.

    Raises ConfigError if the newest checkpoint was trained with another tokenizer.
    """
    directory = absolute(path) / 'checkpoints'
    with contextlib.closing(Checkpoints(directory, read_only=True)) as checkpoints:
        restored = checkpoints.restore({})  # {} restores no arrays
    assert restored is not None  # `load` has read this checkpoint before
    _, record = restored  # arrays, and facts such as the names of the tokenizers

    # One name, or the names of source and target for parallel text.
    recorded_names = names_in(record['data'])
    # The name selects among tokenizers of one file with different separators.
    with use_recorded_tokenizers(*recorded_names):
        tokenizer = tokenizer_of(data)
    if recorded_names and tokenizer.name != recorded_names[0]:
        raise ConfigError(
            f'{path} was trained with the tokenizer {recorded_names[0]}, but its data has '
            f'changed since and gives {tokenizer.name}; restore the data'
        )
    return tokenizer


def tokenizer_of_flag(data: str, otherwise: str) -> Tokenizer:
    """Returns the tokenizer that the flag --data names.

    Args:
        data: One of

            - a file in the format of tokenizer.json;
            - a tiktoken encoding, such as 'tiktoken:gpt2';
            - a directory that prepare_data has written;
            - the import path of a dataset, such as 'package.module:name';
            - the name of a dataset without required settings, such as 'stdlib', whose tokens are
              bytes.
        otherwise: A flag that replaces text, for errors; see `tokenizer_for`.

    Raises:
        ConfigError: `data` is none of these, a file cannot be read, or a directory has a tokenizer
            from outside the package.
    """
    advice = (
        'give a dataset that needs no other setting '
        f'({", ".join(corpus_registry.NAMED_ALONE)}), a tokenizer.json, tiktoken:NAME, or a '
        'directory that prepare_data has written'
    )
    if data.endswith('.json'):
        # The tokenizers library may raise any exception for a damaged file.
        with explain_read_errors(f'--data={data}', advice, Exception):
            return FileTokenizer(read_whole(as_path(data)))

    if data.startswith(PREFIX):
        return restore_tokenizer(data, model=None)

    # prepare_data writes an index beside the tokens.
    is_prepared = data and (as_path(data) / INDEX).exists()
    if is_prepared:
        return _tokenizer_of_prepared(data, otherwise)

    if is_import_path(data):
        return tokenizer_of(DataConfig(name=data))

    # Datasets without required settings, and those named 'tfds:NAME' or 'hf:NAME'.
    if data in corpus_registry.NAMED_ALONE or corpus_registry.in_catalogue(data):
        return ByteTokenizer()
    raise ConfigError(f'--data={data} names no tokenizer; {advice}')


def _tokenizer_of_prepared(directory: str, otherwise: str) -> Tokenizer:
    """Returns the tokenizer of a directory that prepare_data has written.

    Raises ConfigError if it is a tokenizer from outside the package, or if a file cannot be read.
    The message advises to give the flag `otherwise`.
    """
    kind = read_index(as_path(directory)).tokenizer  # the value of data.tokenizer
    if is_import_path(kind):
        # For security, data files must not decide which code is imported.
        raise ConfigError(
            f'--data={directory} has tokens of {kind!r:.200}, code that only a config can name; '
            f'give {otherwise}'
        )
    return open_prepared(DataConfig(name='tokens', path=directory)).tokenizer

"""Models by path: runs, exported parameters, published files."""

import contextlib
import dataclasses
import functools
import operator
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

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
from qkattn.model import with_params
from qkattn.model.transformer import Transformer
from qkattn.storage.files import absolute, as_path, read_whole
from qkattn.train import exported
from qkattn.train.checkpoint import Checkpoints


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Loaded:
    """The newest checkpoint of a run, or a model by itself.

    A trial is one seed and one setting of the hyperparameters in a run. A model by itself is stored
    as a single trial.
    """

    path: Path
    model_config: ModelConfig
    params: list[dict]  # the float32 parameters of each trial
    trials: list[dict[str, Any]]  # seed, learning rate and weight decay of each; {} without a run
    alive: list[bool]  # False for trials that diverged; they have their last finite parameters
    config: Config | None = None  # the config of the run; None without a run
    step: int | None = None  # the optimizer steps of the run; None without a run

    @functools.cached_property
    def models(self) -> list[Transformer]:
        """The model of each trial, with parameters in the compute dtype."""
        cast = functools.partial(jnp.asarray, dtype=self.model_config.compute_dtype)
        models = []
        for params in self.params:
            models.append(with_params(self.model_config, jax.tree.map(cast, params)))
        return models

    @property
    def trial(self) -> int:
        """The first trial that has not diverged; 0 if all have."""
        return self.alive.index(True) if True in self.alive else 0

    @property
    def model(self) -> Transformer:
        """The model of `trial`."""
        return self.models[self.trial]

    def check_trial(self, trial: int | None) -> int:
        """Returns `trial`, or the default `self.trial` if it is None.

        Raises ConfigError if it is out of range.
        """
        if trial is None:
            return self.trial
        num_trials = len(self.params)
        if not 0 <= trial < num_trials:
            raise ConfigError(
                f'trial={trial} must be in [0, {num_trials}), the trials of {self.path}'
            )
        return trial

    def state(self, trial: int) -> str:
        """Path, variant, step and settings of a trial of a run, and whether it diverged."""
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
    """Loads a run, or a model by itself. The files at `source` decide which.

    Args:
      source: a run directory; a directory of exported parameters; a directory or .safetensors file
        of a GPT-2 in the Hugging Face layout; or a .pt checkpoint of nanoGPT.
      num_heads: the number of heads, for published files without a config.
      average: how many of the newest checkpoints of a run to average the parameters over.
      imports: the import paths of classes that exported parameters may name. (The config of a run
        is code itself, so its import paths are always followed.)

    Raises:
      ConfigError: if `source` is none of these, is damaged, or has a different layout.
      CheckpointError: if every checkpoint of the run is damaged.
    """
    path = as_path(source)
    if not path.exists():
        raise ConfigError(
            f'{path} does not exist; give a run, exported parameters or a published model'
        )
    if exported.is_run(path):
        config, step, stack = exported.load_stack(absolute(path), average)
        trials = config.trials.trials()
        # The arrays of a checkpoint have a leading axis of trials.
        params = []
        for x in range(len(trials)):
            params.append(jax.tree.map(operator.itemgetter(x), stack['params']))
        return Loaded(
            path=path,
            model_config=config.model,
            params=params,
            trials=trials,
            alive=stack['alive'].tolist(),
            config=config,
            step=step,
        )
    if average != 1:
        raise ConfigError(
            f'average={average} needs the checkpoints of a run, and {path} is not one'
        )

    # A model by itself: a checkpoint of nanoGPT, a GPT-2, or else exported parameters.
    is_exported = (path / exported.ABOUT).exists()
    if path.suffix == '.pt':
        model_config, model_params = load_nanogpt(path, num_heads=num_heads)
    elif path.is_file() or (not is_exported and any(path.glob('*.safetensors*'))):
        model_config, model_params = load_gpt2(path, num_heads=num_heads)
    else:
        model_config, model_params = exported.load(path, imports)
    return Loaded(path, model_config, [model_params], [{}], [True])


def tokenizer_for(source: Loaded, data: str, otherwise: str) -> Tokenizer:
    """Returns the tokenizer of a loaded model.

    Args:
      source: the model. If it comes from a run, the config of the run names the tokenizer.
      data: the value of the flag --data, which names the tokenizer of any other model.
      otherwise: what the user can give in place of text, for errors: '--prompt_tokens', for
        example, a flag that takes token ids.

    Raises:
      ConfigError: the tokenizer has more tokens than the model, the data has changed since the run,
        or the flag names no tokenizer.
    """
    if source.config is None:
        tokenizer = tokenizer_of_flag(data, otherwise)
    else:
        tokenizer = _tokenizer_of_run(source.path, source.config.data)
    vocab_size = source.model_config.vocab_size
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f'tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens and the model '
            f'{vocab_size}; give {otherwise}'
        )
    return tokenizer


def _tokenizer_of_run(path: Path, data: DataConfig) -> Tokenizer:
    """Opens the tokenizer of a run's data.

    Raises ConfigError if the newest checkpoint of the run has the name of another tokenizer,
    because the data has changed since.
    """
    # Read only the record of the checkpoint: with {} there are no arrays to restore.
    directory = absolute(path) / 'checkpoints'
    with contextlib.closing(Checkpoints(directory, read_only=True)) as checkpoints:
        restored = checkpoints.restore({})
    assert restored is not None  # `load` has read this checkpoint before.
    _, record = restored

    # The name of the tokenizer; for parallel text, those of the source and of the target.
    recorded_names = names_in(record['data'])
    # One tokenizer.json can give two tokenizers, with different separators between documents.
    # `tokenizer_of` opens the one with the recorded name.
    with use_recorded_tokenizers(*recorded_names):
        tokenizer = tokenizer_of(data)
    if recorded_names and tokenizer.name != recorded_names[0]:
        raise ConfigError(
            f'{path} was trained with the tokenizer {recorded_names[0]}, but its data has '
            f'changed since and gives {tokenizer.name}; restore the data'
        )
    return tokenizer


def tokenizer_of_flag(data: str, otherwise: str) -> Tokenizer:
    """Opens the tokenizer that the flag --data names.

    Args:
      data: the value of the flag, one of

        - a .json file in the format of tokenizer.json;
        - an encoding of tiktoken, as in 'tiktoken:gpt2';
        - a directory that prepare_data has written: the tokenizer of its tokens;
        - the import path of a dataset, as in 'package.module:name': the dataset's tokenizer;
        - the name of a dataset that needs no other setting, as in 'stdlib': bytes are the tokens.
      otherwise: what errors advise to give instead; see `tokenizer_for`.

    Raises:
      ConfigError: `data` is none of these, a file cannot be read, or the tokens of a directory come
        from a tokenizer outside the package.
    """
    advice = (
        'give a dataset that needs no other setting '
        f'({", ".join(corpus_registry.NAMED_ALONE)}), a tokenizer.json, tiktoken:NAME, or a '
        'directory that prepare_data has written'
    )
    # The cases are in the order of the docstring.
    if data.endswith('.json'):
        # The library that reads such files may raise any exception.
        with explain_read_errors(f'--data={data}', advice, Exception):
            return FileTokenizer(read_whole(as_path(data)))

    if data.startswith(PREFIX):
        return restore_tokenizer(data, None)

    # INDEX is the file that prepare_data writes beside the tokens.
    is_prepared = data and (as_path(data) / INDEX).exists()
    if is_prepared:
        kind = read_index(as_path(data)).tokenizer  # a value of data.tokenizer
        if is_import_path(kind):
            # A file of data must not decide which code is imported.
            raise ConfigError(
                f'--data={data} has tokens of {kind!r:.200}, code that only a config can name; '
                f'give {otherwise}'
            )
        return open_prepared(DataConfig(name='tokens', path=data)).tokenizer

    if is_import_path(data):
        return tokenizer_of(DataConfig(name=data))

    if data in corpus_registry.NAMED_ALONE or corpus_registry.in_catalogue(data):
        return ByteTokenizer()
    raise ConfigError(f'--data={data} names no tokenizer; {advice}')

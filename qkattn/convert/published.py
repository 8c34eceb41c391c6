"""GPT-2 and nanoGPT files as a model config and the parameters of its Decoder.

The Decoder with score 'qk', value 'vo', layer norm and learned positions is GPT-2: pre-norm, tanh
GELU (`gelu_new`), scale H^-0.5, norm epsilon 1e-5. Radford et al. 2019. `transformers_layout`
writes these files.
"""

import dataclasses
import importlib
import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
from flax import traverse_util
from safetensors.numpy import load_file

from qkattn.config import Config, ModelConfig
from qkattn.errors import ConfigError
from qkattn.model.cost import abstract_params
from qkattn.model.sites import validate
from qkattn.storage.files import as_path, component, local_copy, read_whole
from qkattn.storage.records import parse_json

Source = str | os.PathLike[str] | Mapping[str, Any]

# The tensor of the output matrix, and the parameter of the Decoder that is its transpose.
HEAD = 'lm_head.weight'
OUTPUT_MATRIX = 'w_output_DV'
# Where the Decoder keeps the parameters of its Score and its Value.
QK = 'blocks/attention/score'
VO = 'blocks/attention/value'
# The tensors of a GPT-2 under their names in Hugging Face's files, without the prefix
# `transformer.` and with * for the number of the layer. Each has its axes (C = 3 D), and the
# parameters of the Decoder that it concatenates along the last axis. Matrices are
# [inputs, outputs]; heads are in order.
TENSORS: dict[str, tuple[str, tuple[str, ...]]] = {
    'wte.weight': ('VD', ('w_embedding_VD',)),
    'wpe.weight': ('TD', ('w_position_TD',)),
    'h.*.ln_1.weight': ('D', ('blocks/attention_norm/g_D',)),
    'h.*.ln_1.bias': ('D', ('blocks/attention_norm/b_D',)),
    'h.*.attn.c_attn.weight': ('DC', (f'{QK}/w_q_DNH', f'{QK}/w_k_DKH', f'{VO}/w_v_DKH')),
    'h.*.attn.c_attn.bias': ('C', (f'{QK}/b_q_NH', f'{QK}/b_k_KH', f'{VO}/b_v_KH')),
    'h.*.attn.c_proj.weight': ('DD', (f'{VO}/w_o_NHD',)),
    'h.*.attn.c_proj.bias': ('D', (f'{VO}/b_o_D',)),
    'h.*.ln_2.weight': ('D', ('blocks/mlp_norm/g_D',)),
    'h.*.ln_2.bias': ('D', ('blocks/mlp_norm/b_D',)),
    'h.*.mlp.c_fc.weight': ('DF', ('blocks/mlp/w_in_DF',)),
    'h.*.mlp.c_fc.bias': ('F', ('blocks/mlp/b_in_F',)),
    'h.*.mlp.c_proj.weight': ('FD', ('blocks/mlp/w_out_FD',)),
    'h.*.mlp.c_proj.bias': ('D', ('blocks/mlp/b_out_D',)),
    'ln_f.weight': ('D', ('final_norm/g_D',)),
    'ln_f.bias': ('D', ('final_norm/b_D',)),
    HEAD: ('VD', (OUTPUT_MATRIX,)),  # a second name of wte.weight if embeddings are tied
}
# The values in config.json with which GPT-2 is the Decoder; the default of transformers is first.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    'model_type': ('gpt2',),
    'activation_function': ('gelu_new', 'gelu_pytorch_tanh', 'gelu', 'relu'),
    'layer_norm_epsilon': (1e-5,),
    'scale_attn_weights': (True,),
    'scale_attn_by_inverse_layer_idx': (False,),
}
# Our names of its activation functions.
ACTIVATIONS = {
    'gelu_new': 'gelu_tanh',
    'gelu_pytorch_tanh': 'gelu_tanh',
    'gelu': 'gelu',
    'relu': 'relu',
}
# Fields of ModelConfig by their names in config.json and in nanoGPT's model_args.
FIELDS = {
    'n_embd': 'd_model',
    'n_head': 'num_heads',
    'n_layer': 'num_layers',
    'n_positions': 'context',
    'block_size': 'context',
    'vocab_size': 'vocab_size',
    'n_inner': 'mlp_width',
    'bias': 'biases',
}
# nanoGPT stores these matrices as torch.nn.Linear does, [outputs, inputs].
TRANSPOSED = ('c_attn.weight', 'c_proj.weight', 'c_fc.weight')
# Prefixes of tensor names: 'module.transformer.wte.weight' is 'wte.weight'. They come from
# torch.compile, DataParallel, and the Hugging Face model with an output matrix.
PREFIXES = re.compile(r'(_orig_mod\.|module\.|transformer\.)*')
# Causal masks, e.g. 'h.0.attn.bias', which older versions saved among the parameters.
MASKS = re.compile(r'h\.\d+\.attn\.(bias|masked_bias)')
# The number of the layer in the name of a tensor: 3 in 'h.3.ln_1.weight'.
LAYER = re.compile(r'h\.(\d+)\.')


def load_gpt2(source: Source, *, num_heads: int | None = None) -> tuple[ModelConfig, dict]:
    """Reads a GPT-2 in the Hugging Face layout, as a config and float32 parameters.

    The config has dropout 0.

    Args:
      source: one of
        - a directory with model.safetensors (or its index) and config.json;
        - a .safetensors file; a config.json beside it is read too;
        - a dictionary of numpy, jax or torch arrays by name, in 16 or 32 bits.
      num_heads: the number of heads, required without a config.json.

    Raises:
      ConfigError: if the tensors or the config.json are not those of a GPT-2, or d_model is not a
        multiple of the number of heads.
    """
    named: Any = source
    described: dict[str, Any] = {}  # the contents of config.json
    if not isinstance(source, Mapping):
        path = as_path(source)
        directory = path if path.is_dir() else path.parent
        config_file = directory / 'config.json'
        if path.is_dir() or config_file.exists():
            # True is the default of transformers.
            described = {'tie_word_embeddings': True} | _read_json(config_file)
        named = _read_safetensors(path)

    for name, choices in SUPPORTED.items():
        default = choices[0]
        value = described.get(name, default)
        if value not in choices:
            supported = ' or '.join(repr(choice) for choice in choices)
            raise ConfigError(f'config.json: {name}={value!r} is not supported, only {supported}')

    # A width of null in config.json is four times n_embd, which transformers sets to 768 if absent.
    width = described.get('n_embd', 768)
    if described.get('n_inner', 0) is None and isinstance(width, int):
        described['n_inner'] = 4 * width

    config, params = _decoder(_normalized(named), described, 'config.json', num_heads)
    activation: Any = ACTIVATIONS[described.get('activation_function', 'gelu_new')]
    return dataclasses.replace(config, activation=activation), params


def load_nanogpt(source: Source, *, num_heads: int | None = None) -> tuple[ModelConfig, dict]:
    """Reads a model saved by nanoGPT or a descendant of it, as a config and float32 parameters.

    The model may have biases or none, a padded vocabulary, and a tied or untied output matrix. The
    config has the exact GELU of nanoGPT's MLP (`nn.GELU()`).

    Args:
      source: one of
        - a .pt checkpoint, which requires torch; only tensors and plain values are loaded from it;
        - a .safetensors file;
        - a dictionary of arrays by name;
        - a dictionary {'model': arrays by name, 'model_args': settings}, as in a checkpoint.
      num_heads: the number of heads, required if the source has no model_args.

    Raises:
      ConfigError: if the tensors do not have this layout, or torch is missing.
    """
    named: Any = source
    if not isinstance(source, Mapping):
        path = as_path(source)
        read = _read_safetensors if path.suffix == '.safetensors' else _read_torch
        named = read(path)

    described: dict[str, Any] = {}  # the model_args of a checkpoint
    if isinstance(named, Mapping) and isinstance(named.get('model'), Mapping):
        arguments = named.get('model_args') or {}
        named = named['model']
        if not isinstance(arguments, Mapping):
            raise ConfigError(f'model_args={arguments!r:.80} must be a dictionary, as of nanoGPT')
        described = dict(arguments)
        # Dropout has no effect on a trained model.
        described.pop('dropout', None)
    for name, value in described.items():
        if name not in FIELDS:
            raise ConfigError(f'model_args: {name}={value!r} is not an argument of nanoGPT')

    tensors = _normalized(named)
    for name, tensor in tensors.items():
        if name.endswith(TRANSPOSED):
            tensors[name] = np.ascontiguousarray(tensor.T)
    config, params = _decoder(tensors, described, 'model_args', num_heads)
    return dataclasses.replace(config, activation='gelu'), params


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors of a GPT-2 with this config, by name."""
    D = config.d_model
    size_of_axis = {
        'D': D,
        'C': 3 * D,
        'F': config.mlp_width,
        'V': config.vocab_size,
        'T': config.context,
    }
    shape_of_name: dict[str, tuple[int, ...]] = {}
    for pattern, (axes, _) in TENSORS.items():
        is_left_out_bias = pattern.endswith('.bias') and not config.biases
        is_tied = pattern == HEAD and config.tied_embeddings
        if is_left_out_bias or is_tied:
            continue
        shape = tuple(size_of_axis[axis] for axis in axes)
        for name in names_in_layers(pattern, config):
            shape_of_name[name] = shape
    return shape_of_name


def names_in_layers(pattern: str, config: ModelConfig) -> list[str]:
    """Returns the tensor names of a key of `TENSORS`: 'h.*.ln_1.bias' gives one for each layer."""
    if '*' not in pattern:
        return [pattern]
    return [pattern.replace('*', str(layer)) for layer in range(config.num_layers)]


def _decoder(
    tensors: dict[str, np.ndarray], described: Mapping[str, Any], where: str, num_heads: int | None
) -> tuple[ModelConfig, dict]:
    """Returns the config and the parameters of the Decoder with these tensors.

    Args:
      tensors: float32 arrays under GPT-2's names, matrices [inputs, outputs].
      described: the settings of config.json or of model_args, as far as there are any.
      where: 'config.json' or 'model_args', for errors.
      num_heads: the number of heads; None takes n_head of `described`.

    Raises:
      ConfigError: if a tensor is missing, unexpected or wrong, or a setting contradicts them.
    """
    config = _config_of_tensors(tensors, described, where, num_heads)
    _check_tensors(tensors, config)
    for name, field in FIELDS.items():
        if name in described and described[name] != getattr(config, field):
            raise ConfigError(
                f'{where}: {name}={described[name]!r} does not fit the tensors, which have '
                f'{field}={getattr(config, field)!r}'
            )

    # Each tensor holds one or more parameters, side by side along its last axis.
    part_of_path: dict[str, np.ndarray] = {}
    expected = traverse_util.flatten_dict(abstract_params(config), sep='/')
    for pattern, (_, paths) in TENSORS.items():
        if paths[0] not in expected:
            continue  # This is the output matrix of tied embeddings, or a bias of a model without.
        stack = np.stack([tensors[name] for name in names_in_layers(pattern, config)])
        parts = np.split(stack, len(paths), axis=-1)
        part_of_path |= dict(zip(paths, parts, strict=True))

    parameters = {}
    for path, parameter in expected.items():
        part = part_of_path[path]
        if path == OUTPUT_MATRIX:
            part = np.swapaxes(part, 1, 2)  # [1, V, D] -> [1, D, V]
        parameters[path] = jnp.asarray(part.reshape(parameter.shape))
    return config, traverse_util.unflatten_dict(parameters, sep='/')


def _config_of_tensors(
    tensors: dict[str, np.ndarray], described: Mapping[str, Any], where: str, num_heads: int | None
) -> ModelConfig:
    """Returns the config with the sizes of the tensors; only num_heads does not follow from them.

    The arguments and the errors are those of `_decoder`.
    """
    if num_heads is None and 'n_head' not in described:
        raise ConfigError(
            f'--num_heads=N of convert (num_heads= in Python) is required where no {where} gives '
            'n_head; other commands read what convert writes to --out'
        )
    for name in ('wte.weight', 'wpe.weight', 'h.0.mlp.c_fc.weight'):
        if name not in tensors:
            raise ConfigError(f'tensor {name!r} is missing')
        if tensors[name].ndim != 2:
            raise ConfigError(f'tensor {name!r} is not a matrix')

    is_same = HEAD not in tensors or np.array_equal(tensors[HEAD], tensors['wte.weight'])
    tied = described.get('tie_word_embeddings', is_same)
    if tied and not is_same:
        raise ConfigError(f"tensor {HEAD!r} differs from 'wte.weight', to which it should be tied")

    layers = set()
    for name in tensors:
        match = LAYER.match(name)
        if match is not None:
            layers.add(match[1])

    config = ModelConfig(
        d_model=tensors['wte.weight'].shape[1],
        num_layers=len(layers),
        num_heads=described['n_head'] if num_heads is None else num_heads,
        d_ff=tensors['h.0.mlp.c_fc.weight'].shape[1],
        context=len(tensors['wpe.weight']),
        vocab_size=len(tensors['wte.weight']),
        biases='ln_f.bias' in tensors,
        tied_embeddings=tied,
    )
    validate(Config(model=config))
    return config


def _check_tensors(tensors: dict[str, np.ndarray], config: ModelConfig) -> None:
    """Raises ConfigError unless the tensors are finite and exactly those of the config."""
    expected = shapes(config)
    for name, shape in expected.items():
        if name not in tensors:
            raise ConfigError(f'tensor {name!r} is missing')
        if tensors[name].shape != shape:
            raise ConfigError(f'tensor {name!r} has shape {tensors[name].shape}, not {shape}')
        if not np.isfinite(tensors[name]).all():
            raise ConfigError(f'tensor {name!r} has values that are not finite')

    # With tied embeddings, a file may still hold the output matrix.
    unexpected = sorted(tensors.keys() - expected.keys() - {HEAD})
    if unexpected:
        biased = 'with' if config.biases else 'without'
        raise ConfigError(f'tensor {unexpected[0]!r} does not belong to a GPT-2 {biased} biases')


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Reads all tensors of a file, of a model directory, or of the files in a .index.json."""
    if path.is_dir():
        single = path / 'model.safetensors'
        index = path / 'model.safetensors.index.json'
        path = index if index.exists() and not single.exists() else single

    if path.suffix == '.json':
        # weight_map has the name of the file for each tensor.
        file_of_tensor = _read_json(path).get('weight_map')
        is_dict = isinstance(file_of_tensor, dict)
        if not is_dict or not all(_is_part(name) for name in file_of_tensor.values()):
            raise ConfigError(
                f'{path}: weight_map={file_of_tensor!r:.80} must name a .safetensors file beside '
                'it for each tensor'
            )
        file_names = [component(name) for name in set(file_of_tensor.values())]
        tensors: dict[str, np.ndarray] = {}
        for file_name in sorted(file_names):
            tensors |= _read_safetensors(path.parent / file_name)
        return tensors

    try:
        with local_copy(path) as file:
            return load_file(file)
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigError(f'{path} cannot be read as safetensors: {error}') from error


def _is_part(name: Any) -> bool:
    """Returns whether the name of a file in an index leads nowhere else than its directory."""
    return isinstance(name, str) and name.endswith('.safetensors') and Path(name).name == name


def _read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object; raises ConfigError for anything else."""
    try:
        # Unpacking raises TypeError unless the file holds an object.
        return {**parse_json(read_whole(path))}
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f'{path} cannot be read: {error}') from error


def _read_torch(path: Path) -> dict[str, Any]:
    """Reads a torch checkpoint, tensors and plain values only."""
    try:
        # torch is optional, and slow to import.
        torch = importlib.import_module('torch')
    except ImportError as error:
        raise ConfigError(f'{path.name} can only be read with torch; install it') from error
    try:
        with local_copy(path) as file:
            _require_whole(file)
            return torch.load(file, map_location='cpu', weights_only=True)
    except Exception as error:
        # A damaged file may make torch raise any exception. The first line of its message will do.
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise ConfigError(f'{path} cannot be read as a torch checkpoint: {reason}') from error


def _require_whole(file: str | os.PathLike) -> None:
    """Raises ValueError for a zip archive whose members are larger than the archive itself.

    Torch does not compress what it stores, so such a file is not from torch. When it loads one, it
    allocates whatever size the archive declares.
    """
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
        if unpacked > os.path.getsize(file):
            raise ValueError(f'it unpacks to {unpacked:,} bytes, more than it has')


def _normalized(named: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns the tensors as float32 numpy arrays, under GPT-2's names without prefixes.

    Saved causal masks are left out. Raises ConfigError for anything that is not a tensor by name.
    """
    tensors: dict[str, np.ndarray] = {}
    if not isinstance(named, Mapping):
        raise ConfigError(f'a {type(named).__name__} is not a dictionary of tensors by name')
    for original, value in named.items():
        if not isinstance(original, str) or not hasattr(value, 'dtype'):
            raise ConfigError(f'{original!r}: a {type(value).__name__} is not a tensor by name')

        name = PREFIXES.sub('', original, count=1)
        if MASKS.fullmatch(name):
            continue
        if name in tensors:
            raise ConfigError(f'tensor {name!r} occurs twice, the second time as {original!r}')

        dtype = str(value.dtype).removeprefix('torch.')
        if dtype not in ('float32', 'float16', 'bfloat16'):
            raise ConfigError(
                f'tensor {original!r} is of {dtype}; supported are float32, float16 and bfloat16'
            )

        # A tensor of torch may claim more numbers than are stored, by a stride of 0.
        if hasattr(value, 'untyped_storage'):
            claimed_bytes = value.numel() * value.element_size()
            if claimed_bytes > value.untyped_storage().nbytes():
                shape = tuple(value.shape)
                raise ConfigError(
                    f'tensor {original!r} has shape {shape}, but fewer stored numbers'
                )
        if hasattr(value, 'detach'):
            # numpy does not know the bfloat16 of torch, so torch converts its tensors.
            value = value.detach().cpu().float().numpy()
        tensors[name] = np.asarray(value).astype(np.float32)
    return tensors

"""Reads GPT-2 and nanoGPT files as the config and the parameters of a Decoder.

A GPT-2 (Radford et al. 2019) is a pre-norm Decoder with score 'qk', value 'vo', layer norm and
learned positions. `transformers_layout` writes these files.
"""

import dataclasses
import importlib
import os
import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import safetensors
from flax import traverse_util
from safetensors.numpy import load_file

from qkattn.config import Config, ModelConfig
from qkattn.errors import ConfigError
from qkattn.model.cost import abstract_params
from qkattn.model.sites import validate
from qkattn.storage.files import as_path, local_copy, read_whole, require_plain_name
from qkattn.storage.records import parse_json

Source = str | os.PathLike[str] | Mapping[str, Any]

# The tensor of the output matrix, and its transpose in the Decoder.
HEAD = 'lm_head.weight'
OUTPUT_MATRIX = 'w_output_DV'
# Paths of the Score and the Value in the Decoder.
QK = 'blocks/attention/score'
VO = 'blocks/attention/value'


class Contents(NamedTuple):
    """The axes of a tensor in a GPT-2 file, and the Decoder parameters that it holds."""

    # One letter per axis: D = d_model, C = 3 D, F = mlp_width, V = vocab_size, T = context.
    axes: str
    # Parameters of the Decoder, concatenated along the last axis. For example, c_attn.weight [D, C]
    # holds W_Q, W_K and W_V.
    paths: tuple[str, ...]


# The tensors of a GPT-2 by their names in Hugging Face files, without the prefix `transformer.`,
# and with * for the layer index. Matrices are [inputs, outputs].
TENSORS: dict[str, Contents] = {
    'wte.weight': Contents('VD', ('w_embedding_VD',)),
    'wpe.weight': Contents('TD', ('w_position_TD',)),
    'h.*.ln_1.weight': Contents('D', ('blocks/attention_norm/g_D',)),
    'h.*.ln_1.bias': Contents('D', ('blocks/attention_norm/b_D',)),
    'h.*.attn.c_attn.weight': Contents('DC', (f'{QK}/w_q_DNH', f'{QK}/w_k_DKH', f'{VO}/w_v_DKH')),
    'h.*.attn.c_attn.bias': Contents('C', (f'{QK}/b_q_NH', f'{QK}/b_k_KH', f'{VO}/b_v_KH')),
    'h.*.attn.c_proj.weight': Contents('DD', (f'{VO}/w_o_NHD',)),
    'h.*.attn.c_proj.bias': Contents('D', (f'{VO}/b_o_D',)),
    'h.*.ln_2.weight': Contents('D', ('blocks/mlp_norm/g_D',)),
    'h.*.ln_2.bias': Contents('D', ('blocks/mlp_norm/b_D',)),
    'h.*.mlp.c_fc.weight': Contents('DF', ('blocks/mlp/w_in_DF',)),
    'h.*.mlp.c_fc.bias': Contents('F', ('blocks/mlp/b_in_F',)),
    'h.*.mlp.c_proj.weight': Contents('FD', ('blocks/mlp/w_out_FD',)),
    'h.*.mlp.c_proj.bias': Contents('D', ('blocks/mlp/b_out_D',)),
    'ln_f.weight': Contents('D', ('final_norm/g_D',)),
    'ln_f.bias': Contents('D', ('final_norm/b_D',)),
    HEAD: Contents('VD', (OUTPUT_MATRIX,)),  # equal to wte.weight if embeddings are tied
}
# The supported values of settings in config.json. The first one is the default of transformers.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    'model_type': ('gpt2',),
    'activation_function': ('gelu_new', 'gelu_pytorch_tanh', 'gelu', 'relu'),
    'layer_norm_epsilon': (1e-5,),
    'scale_attn_weights': (True,),
    'scale_attn_by_inverse_layer_idx': (False,),
}
# Our names of GPT-2's activation functions.
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
# Prefixes of tensor names, as in 'module.transformer.wte.weight'. torch.compile, DataParallel and
# GPT2LMHeadModel add them.
PREFIXES = re.compile(r'(_orig_mod\.|module\.|transformer\.)*')
# Causal masks such as 'h.0.attn.bias', which old versions saved with the parameters.
MASKS = re.compile(r'h\.\d+\.attn\.(bias|masked_bias)')
# The layer index in a tensor name, such as 3 in 'h.3.ln_1.weight'.
LAYER = re.compile(r'h\.(\d+)\.')


def load_gpt2(source: Source, *, num_heads: int | None = None) -> tuple[ModelConfig, dict]:
    """Loads a GPT-2 in the Hugging Face layout.

    Args:
        source: One of

            - a directory with config.json and model.safetensors or its index;
            - a .safetensors file, with or without a config.json beside it;
            - a dictionary of numpy, jax or torch arrays by name, in 16 or 32 bits.
        num_heads: The number of heads. Required without a config.json.

    Returns:
        config: The model config, with dropout 0.
        params: The float32 parameters.

    Raises:
        ConfigError: The tensors or the config.json are not those of a GPT-2, or d_model is not a
            multiple of the number of heads.
    """
    arrays: Any
    settings: dict[str, Any]
    if isinstance(source, Mapping):
        arrays = source
        settings = {}
    else:
        path = as_path(source)
        settings = _read_settings(path)
        arrays = _read_safetensors(path)

    for name, choices in SUPPORTED.items():
        default = choices[0]  # of transformers, for a setting that is left out
        value = settings.get(name, default)
        if value not in choices:
            supported = ' or '.join(repr(choice) for choice in choices)
            raise ConfigError(f'config.json: {name}={value!r} is not supported, only {supported}')

    tensors = _float32_tensors(arrays)
    config, params = _decoder_of_tensors(tensors, settings, 'config.json', num_heads)
    gpt2_activation = settings.get('activation_function', 'gelu_new')
    activation: Any = ACTIVATIONS[gpt2_activation]  # 'gelu_new' -> 'gelu_tanh'
    return dataclasses.replace(config, activation=activation), params


def _read_settings(path: Path) -> dict[str, Any]:
    """Reads the config.json in a model directory, or beside a model file.

    Returns {} for a model file without a config.json.
    """
    is_directory = path.is_dir()
    directory = path if is_directory else path.parent
    config_file = directory / 'config.json'
    if not is_directory and not config_file.exists():
        return {}
    settings = _read_json(config_file)
    # transformers ties the embeddings by default.
    settings.setdefault('tie_word_embeddings', True)
    # transformers reads "n_inner": null as 4 * n_embd.
    if 'n_inner' in settings and settings['n_inner'] is None:
        n_embd = settings.get('n_embd', 768)  # the default of transformers
        if isinstance(n_embd, int):  # another type is refused later
            settings['n_inner'] = 4 * n_embd
    return settings


def load_nanogpt(source: Source, *, num_heads: int | None = None) -> tuple[ModelConfig, dict]:
    """Loads a model that was saved by nanoGPT or a fork.

    The model may be without biases, and may have a padded vocabulary and an untied output matrix.
    The activation is exact GELU.

    Args:
        source: One of

            - a .pt checkpoint, which requires torch. Only tensors and plain values are loaded.
            - a .safetensors file.
            - a dictionary of arrays by name.
            - a checkpoint as a dictionary {'model': arrays by name, 'model_args': settings}.
        num_heads: The number of heads. Required without model_args.

    Returns:
        config: The model config, with dropout 0.
        params: The float32 parameters.

    Raises:
        ConfigError: The tensors do not have this layout, or torch is missing.
    """
    content: Any
    if isinstance(source, Mapping):
        content = source
    else:
        path = as_path(source)
        is_safetensors = path.suffix == '.safetensors'
        content = _read_safetensors(path) if is_safetensors else _read_torch(path)

    is_checkpoint = isinstance(content, Mapping) and isinstance(content.get('model'), Mapping)
    if is_checkpoint:
        arrays = content['model']
        settings = _settings_of_checkpoint(content)
    else:
        arrays = content
        settings = {}

    tensors = _float32_tensors(arrays)
    for name, tensor in tensors.items():
        if name.endswith(TRANSPOSED):
            # nanoGPT stores this matrix as [outputs, inputs], and GPT-2 as [inputs, outputs].
            tensors[name] = np.ascontiguousarray(tensor.T)
    config, params = _decoder_of_tensors(tensors, settings, 'model_args', num_heads)
    return dataclasses.replace(config, activation='gelu'), params


def _settings_of_checkpoint(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the model_args of a nanoGPT checkpoint without the dropout, which is ignored.

    Raises ConfigError if model_args is not a dictionary or has unknown keys.
    """
    model_args = checkpoint.get('model_args') or {}
    if not isinstance(model_args, Mapping):
        raise ConfigError(f'model_args={model_args!r:.80} must be a dictionary, as of nanoGPT')
    settings = dict(model_args)
    settings.pop('dropout', None)
    for name, value in settings.items():
        if name not in FIELDS:
            raise ConfigError(f'model_args: {name}={value!r} is not an argument of nanoGPT')
    return settings


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a GPT-2's tensors by name: {'wte.weight': (V, D), ...}."""
    D = config.d_model
    size_of_axis = {
        'D': D,
        'C': 3 * D,
        'F': config.mlp_width,
        'V': config.vocab_size,
        'T': config.context,
    }
    shape_of_name: dict[str, tuple[int, ...]] = {}
    for pattern, contents in TENSORS.items():  # such as 'h.*.ln_1.weight', with axes 'D'
        is_missing_bias = pattern.endswith('.bias') and not config.biases
        is_tied_output = pattern == HEAD and config.tied_embeddings
        if is_missing_bias or is_tied_output:
            continue
        shape = tuple(size_of_axis[axis] for axis in contents.axes)
        for name in names_in_layers(pattern, config):
            shape_of_name[name] = shape
    return shape_of_name


def names_in_layers(pattern: str, config: ModelConfig) -> list[str]:
    """Returns the tensor names for a key of `TENSORS`, with * replaced by each layer index."""
    if '*' not in pattern:
        return [pattern]
    return [pattern.replace('*', str(layer)) for layer in range(config.num_layers)]


def _decoder_of_tensors(
    tensors: dict[str, np.ndarray],
    settings: Mapping[str, Any],
    settings_name: str,
    num_heads: int | None,
) -> tuple[ModelConfig, dict]:
    """Converts the tensors of a GPT-2 to the config and parameters of a Decoder.

    Args:
        tensors: float32 arrays by name in GPT-2, with matrices [inputs, outputs].
        settings: The content of config.json or model_args, or {}.
        settings_name: 'config.json' or 'model_args', for errors.
        num_heads: The number of heads; by default n_head of `settings`.

    Raises:
        ConfigError: A tensor is missing, unexpected or invalid, or a setting contradicts the
            tensors.
    """
    config = _config_of_tensors(tensors, settings, settings_name, num_heads)
    _check_tensors(tensors, config)
    for name, field in FIELDS.items():
        if name in settings and settings[name] != getattr(config, field):
            raise ConfigError(
                f'{settings_name}: {name}={settings[name]!r} does not fit the tensors, which have '
                f'{field}={getattr(config, field)!r}'
            )

    return config, _parameters_of_tensors(tensors, config)


def _parameters_of_tensors(tensors: dict[str, np.ndarray], config: ModelConfig) -> dict:
    """Returns the parameters of a Decoder from the tensors of a GPT-2 with this config."""
    # The shapes of all parameters by path, such as 'blocks/attention/score/w_q_DNH'.
    expected_parameters = traverse_util.flatten_dict(abstract_params(config), sep='/')

    # Stack the L layers of each tensor, and split it into parameters. For example, c_attn.weight
    # becomes [L, D, 3 D], and then W_Q, W_K and W_V [L, D, D].
    array_of_path: dict[str, np.ndarray] = {}
    for pattern, contents in TENSORS.items():
        paths = contents.paths
        if paths[0] not in expected_parameters:
            continue  # a bias of a model without biases, or a tied output matrix
        stack = np.stack([tensors[name] for name in names_in_layers(pattern, config)])
        arrays = np.split(stack, len(paths), axis=-1)
        array_of_path |= dict(zip(paths, arrays, strict=True))

    # Reshape the arrays. For example, W_Q becomes [L, D, N, H].
    parameters = {}
    for path, expected in expected_parameters.items():
        array = array_of_path[path]
        if path == OUTPUT_MATRIX:
            array = np.swapaxes(array, 1, 2)  # [1, V, D] -> [1, D, V]
        parameters[path] = jnp.asarray(array.reshape(expected.shape))
    return traverse_util.unflatten_dict(parameters, sep='/')


def _config_of_tensors(
    tensors: dict[str, np.ndarray],
    settings: Mapping[str, Any],
    settings_name: str,
    num_heads: int | None,
) -> ModelConfig:
    """Derives the config of a GPT-2 from its tensors; see `_decoder_of_tensors`."""
    # The shapes of the tensors do not tell the number of heads.
    if num_heads is None and 'n_head' not in settings:
        raise ConfigError(
            '--num_heads=N of convert (num_heads= in Python) is required where no '
            f'{settings_name} gives n_head; other commands read what convert writes to --out'
        )
    for name in ('wte.weight', 'wpe.weight', 'h.0.mlp.c_fc.weight'):
        if name not in tensors:
            raise ConfigError(f'tensor {name!r} is missing')
        if tensors[name].ndim != 2:
            raise ConfigError(f'tensor {name!r} is not a matrix')

    # A tied output matrix, the tensor HEAD, is a copy of the embedding, or left out.
    embedding_VD = tensors['wte.weight']
    can_be_tied = HEAD not in tensors or np.array_equal(tensors[HEAD], embedding_VD)
    is_tied = settings.get('tie_word_embeddings', can_be_tied)
    if is_tied and not can_be_tied:
        raise ConfigError(f"tensor {HEAD!r} differs from 'wte.weight', to which it should be tied")

    config = ModelConfig(
        d_model=embedding_VD.shape[1],
        num_layers=_count_layers(tensors),
        num_heads=settings['n_head'] if num_heads is None else num_heads,
        d_ff=tensors['h.0.mlp.c_fc.weight'].shape[1],
        context=len(tensors['wpe.weight']),
        vocab_size=len(embedding_VD),
        biases='ln_f.bias' in tensors,
        tied_embeddings=is_tied,
    )
    validate(Config(model=config))
    return config


def _count_layers(names: Iterable[str]) -> int:
    """Returns the number of layers from tensor names such as 'h.3.ln_1.weight'."""
    layer_indices = set()
    for name in names:
        match = LAYER.match(name)
        if match is not None:
            layer_indices.add(match[1])  # '3'
    return len(layer_indices)


def _check_tensors(tensors: dict[str, np.ndarray], config: ModelConfig) -> None:
    """Raises ConfigError unless the tensors are finite and fit the config."""
    expected_shapes = shapes(config)
    for name, expected_shape in expected_shapes.items():
        if name not in tensors:
            raise ConfigError(f'tensor {name!r} is missing')
        shape = tensors[name].shape
        if shape != expected_shape:
            raise ConfigError(f'tensor {name!r} has shape {shape}, not {expected_shape}')
        if not np.isfinite(tensors[name]).all():
            raise ConfigError(f'tensor {name!r} has values that are not finite')

    # A file may hold the output matrix even if it is tied.
    allowed_names = {*expected_shapes, HEAD}
    unexpected_names = sorted(tensors.keys() - allowed_names)
    if unexpected_names:
        biased = 'with' if config.biases else 'without'
        raise ConfigError(
            f'tensor {unexpected_names[0]!r} does not belong to a GPT-2 {biased} biases'
        )


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Reads the tensors of a model by name.

    `path` is a .safetensors file, the .index.json of a large model, or a directory with either.
    """
    if path.is_dir():
        single_file = path / 'model.safetensors'
        index = path / 'model.safetensors.index.json'
        has_only_index = index.exists() and not single_file.exists()
        path = index if has_only_index else single_file

    if path.suffix == '.json':
        # A large model has several files, which the index lists.
        tensors: dict[str, np.ndarray] = {}
        for file_name in _files_of_index(path):
            tensors |= _read_safetensors(path.parent / file_name)
        return tensors

    try:
        with local_copy(path) as file:
            return load_file(file)
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigError(f'{path} cannot be read as safetensors: {error}') from error


def _files_of_index(index: Path) -> list[str]:
    """Returns the sorted names of the .safetensors files in an index.

    The weight_map of the index has the file of each tensor, as in
    {"wte.weight": "model-00001-of-00002.safetensors"}. Raises ConfigError if it is malformed, or
    has a file in another directory.
    """

    def is_safetensors_name(name: Any) -> bool:
        if not isinstance(name, str) or not name.endswith('.safetensors'):
            return False
        return Path(name).name == name  # without a directory

    weight_map: Any = _read_json(index).get('weight_map')
    is_map = isinstance(weight_map, dict)
    if not is_map or not all(is_safetensors_name(name) for name in weight_map.values()):
        raise ConfigError(
            f'{index}: weight_map={weight_map!r:.80} must name a .safetensors file beside it for '
            'each tensor'
        )
    return sorted({require_plain_name(name) for name in weight_map.values()})


def _read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises ConfigError for other content."""
    try:
        content = parse_json(read_whole(path))
        return {**content}  # raises TypeError unless it is an object
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f'{path} cannot be read: {error}') from error


def _read_torch(path: Path) -> dict[str, Any]:
    """Reads the tensors and plain values of a torch checkpoint."""
    try:
        torch = importlib.import_module('torch')  # optional, and slow to import
    except ImportError as error:
        raise ConfigError(f'{path.name} can only be read with torch; install it') from error
    try:
        with local_copy(path) as file:
            _refuse_zip_bomb(file)
            return torch.load(file, map_location='cpu', weights_only=True)
    except Exception as error:
        # torch may raise any exception for a damaged file.
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise ConfigError(f'{path} cannot be read as a torch checkpoint: {reason}') from error


def _refuse_zip_bomb(file: str | os.PathLike) -> None:
    """Raises ValueError for a zip archive that is larger when unpacked.

    torch does not compress its archives. A malicious file could declare a huge size, which torch
    would allocate.
    """
    if not zipfile.is_zipfile(file):
        return
    with zipfile.ZipFile(file) as archive:
        unpacked_bytes = sum(member.file_size for member in archive.infolist())
    if unpacked_bytes > os.path.getsize(file):
        raise ValueError(f'it unpacks to {unpacked_bytes:,} bytes, more than it has')


def _float32_tensors(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Converts numpy, jax or torch tensors to float32 numpy arrays by their names in GPT-2.

    Prefixes are dropped: 'transformer.wte.weight' -> 'wte.weight'. Causal masks are left out.

    Raises ConfigError if `arrays` is not a dictionary of tensors by name, if two names are equal
    without prefixes, or if a tensor is not supported.
    """
    tensors: dict[str, np.ndarray] = {}
    if not isinstance(arrays, Mapping):
        raise ConfigError(f'a {type(arrays).__name__} is not a dictionary of tensors by name')
    for full_name, array in arrays.items():
        if not isinstance(full_name, str) or not hasattr(array, 'dtype'):
            raise ConfigError(f'{full_name!r}: a {type(array).__name__} is not a tensor by name')

        name = PREFIXES.sub('', full_name, count=1)
        is_causal_mask = MASKS.fullmatch(name) is not None  # such as 'h.0.attn.bias'
        if is_causal_mask:
            continue
        if name in tensors:
            raise ConfigError(f'tensor {name!r} occurs twice, the second time as {full_name!r}')
        tensors[name] = _as_float32(full_name, array)
    return tensors


def _as_float32(name: str, tensor: Any) -> np.ndarray:
    """Converts a numpy, jax or torch tensor. Errors mention `name`.

    Raises ConfigError for other dtypes, and for a torch tensor with more elements than storage. In
    torch, strides of 0 let a small file declare a tensor that does not fit into memory.
    """
    dtype = str(tensor.dtype).removeprefix('torch.')
    if dtype not in ('float32', 'float16', 'bfloat16'):
        raise ConfigError(
            f'tensor {name!r} is of {dtype}; supported are float32, float16 and bfloat16'
        )
    if hasattr(tensor, 'untyped_storage'):  # a tensor of torch
        bytes_of_shape = tensor.numel() * tensor.element_size()
        if bytes_of_shape > tensor.untyped_storage().nbytes():
            shape = tuple(tensor.shape)
            raise ConfigError(f'tensor {name!r} has shape {shape}, but fewer stored numbers')
    if hasattr(tensor, 'detach'):  # a tensor of torch, whose bfloat16 numpy cannot convert
        tensor = tensor.detach().cpu().float().numpy()
    return np.asarray(tensor).astype(np.float32)

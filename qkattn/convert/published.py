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

# The tensor of the output matrix, and the parameter of the Decoder that is its transpose.
HEAD = 'lm_head.weight'
OUTPUT_MATRIX = 'w_output_DV'
# Where the Decoder keeps the parameters of its Score and its Value.
QK = 'blocks/attention/score'
VO = 'blocks/attention/value'


class Contents(NamedTuple):
    """What a tensor of a GPT-2 file holds.

    `axes` has a letter for each axis: D = d_model, C = 3 D, F = mlp_width, V = vocab_size,
    T = context. `paths` are the parameters of the Decoder that lie side by side along the last
    axis. For example, c_attn.weight [D, C] holds W_Q, W_K and W_V.
    """

    axes: str
    paths: tuple[str, ...]


# The tensors of a GPT-2 under their names in Hugging Face's files, without the prefix
# `transformer.` and with * for the number of the layer. Matrices are [inputs, outputs]. Heads are
# in order.
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
    HEAD: Contents('VD', (OUTPUT_MATRIX,)),  # a second name of wte.weight if embeddings are tied
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
    arrays: Any
    settings: dict[str, Any]
    if isinstance(source, Mapping):
        arrays = source
        settings = {}
    else:
        path = as_path(source)
        settings = _settings_beside(path)
        arrays = _read_safetensors(path)

    for name, choices in SUPPORTED.items():
        default = choices[0]
        value = settings.get(name, default)
        if value not in choices:
            supported = ' or '.join(repr(choice) for choice in choices)
            raise ConfigError(f'config.json: {name}={value!r} is not supported, only {supported}')

    config, params = _decoder(_normalized(arrays), settings, 'config.json', num_heads)
    activation: Any = ACTIVATIONS[settings.get('activation_function', 'gelu_new')]
    return dataclasses.replace(config, activation=activation), params


def _settings_beside(path: Path) -> dict[str, Any]:
    """Returns the settings in the config.json of a model, which is a directory or a file.

    A directory must contain a config.json. If there is none beside a file, the result is {}. Two
    defaults of transformers are filled in: tie_word_embeddings is True, and n_inner, the width of
    the MLP, is 4 * n_embd if config.json has "n_inner": null.
    """
    directory = path if path.is_dir() else path.parent
    config_file = directory / 'config.json'
    if not path.is_dir() and not config_file.exists():
        return {}
    settings = {'tie_word_embeddings': True} | _read_json(config_file)
    n_embd = settings.get('n_embd', 768)  # the default of transformers
    has_default_width = 'n_inner' in settings and settings['n_inner'] is None
    if has_default_width and isinstance(n_embd, int):
        settings['n_inner'] = 4 * n_embd
    return settings


def load_nanogpt(source: Source, *, num_heads: int | None = None) -> tuple[ModelConfig, dict]:
    """Reads a model saved by nanoGPT or a descendant of it, as a config and float32 parameters.

    The model may have biases or none, a padded vocabulary, and a tied or untied output matrix. Its
    activation is the exact GELU, as in nanoGPT's MLP (`nn.GELU()`).

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
    content: Any
    if isinstance(source, Mapping):
        content = source
    else:
        path = as_path(source)
        is_safetensors = path.suffix == '.safetensors'
        content = _read_safetensors(path) if is_safetensors else _read_torch(path)

    # A checkpoint is {'model': arrays by name, 'model_args': settings, ...}. Other sources are only
    # the arrays by name.
    is_checkpoint = isinstance(content, Mapping) and isinstance(content.get('model'), Mapping)
    arrays = content['model'] if is_checkpoint else content
    settings = _settings_of_checkpoint(content) if is_checkpoint else {}

    # nanoGPT stores some matrices as [outputs, inputs], GPT-2 as [inputs, outputs].
    tensors = _normalized(arrays)
    for name, tensor in tensors.items():
        if name.endswith(TRANSPOSED):
            tensors[name] = np.ascontiguousarray(tensor.T)
    config, params = _decoder(tensors, settings, 'model_args', num_heads)
    return dataclasses.replace(config, activation='gelu'), params


def _settings_of_checkpoint(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the model_args of a nanoGPT checkpoint, without the dropout, which has no effect.

    Raises ConfigError if they are not a dictionary, or if one is not an argument of nanoGPT.
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
    """Returns the shape of every tensor of a GPT-2, by name: {'wte.weight': (V, D), ...}."""
    D = config.d_model
    size_of_axis = {
        'D': D,
        'C': 3 * D,
        'F': config.mlp_width,
        'V': config.vocab_size,
        'T': config.context,
    }
    shape_of_name: dict[str, tuple[int, ...]] = {}
    for pattern, contents in TENSORS.items():
        is_left_out_bias = pattern.endswith('.bias') and not config.biases
        is_tied = pattern == HEAD and config.tied_embeddings
        if is_left_out_bias or is_tied:
            continue
        shape = tuple(size_of_axis[axis] for axis in contents.axes)
        for name in names_in_layers(pattern, config):
            shape_of_name[name] = shape
    return shape_of_name


def names_in_layers(pattern: str, config: ModelConfig) -> list[str]:
    """Returns the tensor names of a key of `TENSORS`: 'h.*.ln_1.bias' gives one for each layer."""
    if '*' not in pattern:
        return [pattern]
    return [pattern.replace('*', str(layer)) for layer in range(config.num_layers)]


def _decoder(
    tensors: dict[str, np.ndarray],
    settings: Mapping[str, Any],
    settings_name: str,
    num_heads: int | None,
) -> tuple[ModelConfig, dict]:
    """Makes the config and the parameters of a Decoder from the tensors of a GPT-2.

    Args:
      tensors: float32 arrays under GPT-2's names, matrices [inputs, outputs].
      settings: what config.json or model_args says about the model; may be empty.
      settings_name: 'config.json' or 'model_args', for errors.
      num_heads: the number of heads; None takes n_head of `settings`.

    Raises:
      ConfigError: if a tensor is missing, unexpected or wrong, or a setting contradicts them.
    """
    config = _config_of_tensors(tensors, settings, settings_name, num_heads)
    _check_tensors(tensors, config)
    for name, field in FIELDS.items():
        if name in settings and settings[name] != getattr(config, field):
            raise ConfigError(
                f'{settings_name}: {name}={settings[name]!r} does not fit the tensors, which have '
                f'{field}={getattr(config, field)!r}'
            )

    # Stack each tensor over the L layers, and split it into the parameters that it holds. For
    # example, c_attn.weight becomes [L, D, 3 D], and then W_Q, W_K and W_V, each [L, D, D].
    expected = traverse_util.flatten_dict(abstract_params(config), sep='/')
    array_of_path: dict[str, np.ndarray] = {}
    for pattern, contents in TENSORS.items():
        paths = contents.paths
        if paths[0] not in expected:
            continue  # The model has no biases, or its embeddings are tied.
        stack = np.stack([tensors[name] for name in names_in_layers(pattern, config)])
        arrays = np.split(stack, len(paths), axis=-1)
        array_of_path |= dict(zip(paths, arrays, strict=True))

    # Give each parameter the shape that the Decoder expects: W_Q becomes [L, D, N, H].
    parameters = {}
    for path, parameter in expected.items():
        array = array_of_path[path]
        if path == OUTPUT_MATRIX:
            array = np.swapaxes(array, 1, 2)  # [1, V, D] -> [1, D, V]
        parameters[path] = jnp.asarray(array.reshape(parameter.shape))
    return config, traverse_util.unflatten_dict(parameters, sep='/')


def _config_of_tensors(
    tensors: dict[str, np.ndarray],
    settings: Mapping[str, Any],
    settings_name: str,
    num_heads: int | None,
) -> ModelConfig:
    """Derives the config of a GPT-2 from the shapes of its tensors.

    The shapes do not tell the number of heads. So it is `num_heads`, or else n_head of `settings`.
    `_decoder` describes the arguments.

    Raises ConfigError if the number of heads is not given, if a tensor whose shape is needed is
    missing or not a matrix, or if the output matrix should be tied to the embedding but differs.
    """
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

    # A file of tied embeddings holds the output matrix as a copy, or leaves it out.
    is_same = HEAD not in tensors or np.array_equal(tensors[HEAD], tensors['wte.weight'])
    tied = settings.get('tie_word_embeddings', is_same)
    if tied and not is_same:
        raise ConfigError(f"tensor {HEAD!r} differs from 'wte.weight', to which it should be tied")

    numbers_of_layers = set()
    for name in tensors:
        match = LAYER.match(name)
        if match is not None:
            numbers_of_layers.add(match[1])

    config = ModelConfig(
        d_model=tensors['wte.weight'].shape[1],
        num_layers=len(numbers_of_layers),
        num_heads=settings['n_head'] if num_heads is None else num_heads,
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
    """Returns the names of the .safetensors files that an index lists, sorted.

    Its weight_map says which file holds which tensor, as in
    {"wte.weight": "model-00001-of-00002.safetensors"}. Raises ConfigError unless every file lies in
    the directory of the index.
    """
    weight_map = _read_json(index).get('weight_map')
    error = ConfigError(
        f'{index}: weight_map={weight_map!r:.80} must name a .safetensors file beside it for each '
        'tensor'
    )
    if not isinstance(weight_map, dict):
        raise error
    for name in weight_map.values():
        if not isinstance(name, str) or not name.endswith('.safetensors'):
            raise error
        if Path(name).name != name:  # a path to another directory
            raise error
    return sorted({require_plain_name(name) for name in weight_map.values()})


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
    """Raises ValueError for a zip archive that unpacks to more bytes than the file has.

    Torch saves archives without compression, so such a file does not come from torch. It may be an
    attack: a small file that declares a huge size, which torch would allocate.
    """
    if not zipfile.is_zipfile(file):
        return
    with zipfile.ZipFile(file) as archive:
        unpacked = sum(member.file_size for member in archive.infolist())
    if unpacked > os.path.getsize(file):
        raise ValueError(f'it unpacks to {unpacked:,} bytes, more than it has')


def _normalized(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Converts tensors of numpy, jax or torch to float32 numpy arrays under GPT-2's names.

    Prefixes are dropped: 'transformer.wte.weight' -> 'wte.weight'. Saved causal masks are left out.

    Raises ConfigError if the argument is not a dictionary of tensors by name, if two names are
    equal without their prefixes, or if `_as_float32` does not support a tensor.
    """
    tensors: dict[str, np.ndarray] = {}
    if not isinstance(arrays, Mapping):
        raise ConfigError(f'a {type(arrays).__name__} is not a dictionary of tensors by name')
    for original, value in arrays.items():
        if not isinstance(original, str) or not hasattr(value, 'dtype'):
            raise ConfigError(f'{original!r}: a {type(value).__name__} is not a tensor by name')

        name = PREFIXES.sub('', original, count=1)
        if MASKS.fullmatch(name):
            continue
        if name in tensors:
            raise ConfigError(f'tensor {name!r} occurs twice, the second time as {original!r}')
        tensors[name] = _as_float32(original, value)
    return tensors


def _as_float32(name: str, tensor: Any) -> np.ndarray:
    """Converts a tensor of numpy, jax or torch; `name` is its name in errors.

    Raises ConfigError for an unsupported dtype, and for a tensor of torch that has fewer stored
    numbers than its shape. Torch allows that: a stride of 0 repeats a number. So a small file could
    hold a tensor that does not fit into memory.
    """
    dtype = str(tensor.dtype).removeprefix('torch.')
    if dtype not in ('float32', 'float16', 'bfloat16'):
        raise ConfigError(
            f'tensor {name!r} is of {dtype}; supported are float32, float16 and bfloat16'
        )
    if hasattr(tensor, 'untyped_storage'):
        bytes_of_shape = tensor.numel() * tensor.element_size()
        if bytes_of_shape > tensor.untyped_storage().nbytes():
            shape = tuple(tensor.shape)
            raise ConfigError(f'tensor {name!r} has shape {shape}, but fewer stored numbers')
    if hasattr(tensor, 'detach'):
        # numpy does not know the bfloat16 of torch, so torch converts its tensors.
        tensor = tensor.detach().cpu().float().numpy()
    return np.asarray(tensor).astype(np.float32)

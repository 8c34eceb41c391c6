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

# By the name in Hugging Face's GPT-2, without the prefix `transformer.` and with * for the layer:
# the axes of a tensor (C = 3 D), and the parameters that it concatenates along the last one.
# Matrices are [inputs, outputs]; heads are in order.
HEAD = 'lm_head.weight'
QK = 'blocks/attention/score'
VO = 'blocks/attention/value'
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
    HEAD: ('VD', ('w_output_DV',)),  # a second name of wte.weight where embeddings are tied
}
# The only values in config.json at which GPT-2 is the Decoder, the default of transformers first.
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
# torch.nn.Linear, and so nanoGPT, stores [outputs, inputs].
TRANSPOSED = ('c_attn.weight', 'c_proj.weight', 'c_fc.weight')
# Of torch.compile, of DataParallel, and of the Hugging Face model with a head.
PREFIXES = re.compile(r'(_orig_mod\.|module\.|transformer\.)*')
# Causal masks that older versions saved among the parameters.
MASKS = re.compile(r'h\.\d+\.attn\.(bias|masked_bias)')


def load_gpt2(source: Source, *, num_heads: int | None = None) -> tuple[ModelConfig, dict]:
    """Reads a GPT-2 in the Hugging Face layout; the parameters are float32, and dropout is 0.

    `source` is a directory with model.safetensors (or its index) and config.json, a .safetensors
    file, beside which config.json is read where there is one, or a dictionary of numpy, jax or
    torch arrays by name, in 16 or 32 bits. Without a config.json, `num_heads` is required.
    ConfigError if the tensors or the config.json are not those of a GPT-2, or if its heads do not
    divide its width.
    """
    named: Any = source
    described: dict[str, Any] = {}
    if not isinstance(source, Mapping):
        path = as_path(source)
        about = (path if path.is_dir() else path.parent) / 'config.json'
        if path.is_dir() or about.exists():
            described = {'tie_word_embeddings': True} | _read_json(about)
        named = _read_safetensors(path)
    for name, (default, *others) in SUPPORTED.items():
        if (value := described.get(name, default)) not in (default, *others):
            supported = ' or '.join(repr(choice) for choice in (default, *others))
            raise ConfigError(f'config.json: {name}={value!r} is not supported, only {supported}')
    width = described.get('n_embd', 768)
    if described.get('n_inner', 0) is None and isinstance(width, int):
        described['n_inner'] = 4 * width
    config, params = _decoder(_normalized(named), described, 'config.json', num_heads)
    activation: Any = ACTIVATIONS[described.get('activation_function', 'gelu_new')]
    return dataclasses.replace(config, activation=activation), params


def load_nanogpt(source: Source, *, num_heads: int | None = None) -> tuple[ModelConfig, dict]:
    """Reads a model saved by nanoGPT or a descendant; the parameters are float32.

    Models may have biases or none, a padded vocabulary, a tied or an untied output matrix. The
    config has the exact GELU of nanoGPT's MLP (`nn.GELU()`). `source` is a checkpoint .pt (requires
    torch, and loads tensors and plain values only), a .safetensors file, or a dictionary of arrays,
    alone or as 'model' beside 'model_args', without which `num_heads` is required. ConfigError if
    the tensors are not of this layout or torch is missing.
    """
    named: Any = source
    described: dict[str, Any] = {}
    if not isinstance(source, Mapping):
        path = as_path(source)
        named = _read_safetensors(path) if path.suffix == '.safetensors' else _read_torch(path)
    if isinstance(named, Mapping) and isinstance(named.get('model'), Mapping):
        arguments = named.get('model_args') or {}
        named = named['model']
        if not isinstance(arguments, Mapping):
            raise ConfigError(f'model_args={arguments!r:.80} must be a dictionary, as of nanoGPT')
        described = {**arguments}
        described.pop('dropout', None)  # no part of a trained model
    for name in described.keys() - FIELDS.keys():
        raise ConfigError(f'model_args: {name}={described[name]!r} is not an argument of nanoGPT')
    tensors = {
        name: np.ascontiguousarray(tensor.T) if name.endswith(TRANSPOSED) else tensor
        for name, tensor in _normalized(named).items()
    }
    config, params = _decoder(tensors, described, 'model_args', num_heads)
    return dataclasses.replace(config, activation='gelu'), params


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of a model, by name."""
    D = config.d_model
    sizes = {'D': D, 'C': 3 * D, 'F': config.mlp_width}
    sizes |= {'V': config.vocab_size, 'T': config.context}
    return {
        each: tuple(sizes[axis] for axis in axes)
        for name, (axes, _) in TENSORS.items()
        if (config.biases or not name.endswith('.bias'))
        and not (config.tied_embeddings and name == HEAD)
        for each in names_in_layers(name, config)
    }


def names_in_layers(name: str, config: ModelConfig) -> list[str]:
    """The names of a tensor in all layers, or the name alone of one outside of them."""
    layers = range(config.num_layers) if '*' in name else [0]
    return [name.replace('*', str(layer)) for layer in layers]


def _decoder(
    tensors: dict[str, np.ndarray], described: Mapping[str, Any], where: str, num_heads: int | None
) -> tuple[ModelConfig, dict]:
    """The config and parameters; shapes give all sizes but num_heads, `described` has to agree."""
    if num_heads is None and 'n_head' not in described:
        raise ConfigError(
            f'--num_heads=N of convert (num_heads= in Python) is required where no {where} gives '
            'n_head; other commands read what convert writes to --out'
        )
    for name in ('wte.weight', 'wpe.weight', 'h.0.mlp.c_fc.weight'):
        if name not in tensors or tensors[name].ndim != 2:
            problem = 'is not a matrix' if name in tensors else 'is missing'
            raise ConfigError(f'tensor {name!r} {problem}')
    same = HEAD not in tensors or np.array_equal(tensors[HEAD], tensors['wte.weight'])
    tied = described.get('tie_word_embeddings', same)
    if tied and not same:
        raise ConfigError(f"tensor {HEAD!r} differs from 'wte.weight', to which it should be tied")
    numbers = [re.match(r'h\.(\d+)\.', name) for name in tensors]
    config = ModelConfig(
        d_model=tensors['wte.weight'].shape[1],
        num_layers=len({number[1] for number in numbers if number}),
        num_heads=described['n_head'] if num_heads is None else num_heads,
        d_ff=tensors['h.0.mlp.c_fc.weight'].shape[1],
        context=len(tensors['wpe.weight']),
        vocab_size=len(tensors['wte.weight']),
        biases='ln_f.bias' in tensors,
        tied_embeddings=tied,
    )
    validate(Config(model=config))
    expected = shapes(config)
    flat = {}
    for name, shape in expected.items():
        if name not in tensors:
            raise ConfigError(f'tensor {name!r} is missing')
        if tensors[name].shape != shape:
            raise ConfigError(f'tensor {name!r} has shape {tensors[name].shape}, not {shape}')
        if not np.isfinite(tensors[name]).all():
            raise ConfigError(f'tensor {name!r} has values that are not finite')
    if unexpected := sorted(tensors.keys() - expected.keys() - {HEAD}):
        biased = 'with' if config.biases else 'without'
        raise ConfigError(f'tensor {unexpected[0]!r} does not belong to a GPT-2 {biased} biases')
    for name, field in FIELDS.items():
        if name in described and described[name] != getattr(config, field):
            raise ConfigError(
                f'{where}: {name}={described[name]!r} does not fit the tensors, which have '
                f'{field}={getattr(config, field)!r}'
            )
    for path, target in traverse_util.flatten_dict(abstract_params(config), sep='/').items():
        ((name, paths),) = ((name, paths) for name, (_, paths) in TENSORS.items() if path in paths)
        joined = np.stack([tensors[each] for each in names_in_layers(name, config)])
        part = np.split(joined, len(paths), axis=-1)[paths.index(path)]
        part = part[0].T if name == HEAD else part
        flat[path] = jnp.asarray(part.reshape(target.shape))
    return config, traverse_util.unflatten_dict(flat, sep='/')


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a file, of a model directory, or of the files that a .index.json lists."""
    if path.is_dir():
        single = path / 'model.safetensors'
        index = path / 'model.safetensors.index.json'
        path = single if single.exists() or not index.exists() else index
    if path.suffix == '.json':
        files = _read_json(path).get('weight_map')
        if not isinstance(files, dict) or not all(map(_is_part, files.values())):
            raise ConfigError(
                f'{path}: weight_map={files!r:.80} must name a .safetensors file beside it for '
                'each tensor'
            )
        parts = sorted(map(component, {*files.values()}))
        return {n: t for part in parts for n, t in _read_safetensors(path.parent / part).items()}
    try:
        with local_copy(path) as file:
            return load_file(file)
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigError(f'{path} cannot be read as safetensors: {error}') from error


def _is_part(name: Any) -> bool:
    """Whether an index names a file of its own directory: no path that leads elsewhere."""
    return isinstance(name, str) and name.endswith('.safetensors') and Path(name).name == name


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return {**parse_json(read_whole(path))}
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f'{path} cannot be read: {error}') from error


def _read_torch(path: Path) -> dict[str, Any]:
    try:
        torch = importlib.import_module('torch')  # optional, and slow to import
    except ImportError as error:
        raise ConfigError(f'{path.name} can only be read with torch; install it') from error
    try:
        with local_copy(path) as file:
            _require_whole(file)
            return torch.load(file, map_location='cpu', weights_only=True)
    except Exception as error:  # of any kind where the file is damaged
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f'{path} cannot be read as a torch checkpoint: {reason}') from error


def _require_whole(file: str | os.PathLike) -> None:
    """Raises ValueError for an archive whose members are together larger than the file.

    Torch stores them as they are, and takes the memory that the archive says they need.
    """
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
        if unpacked > os.path.getsize(file):
            raise ValueError(f'it unpacks to {unpacked:,} bytes, more than it has')


def _normalized(named: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The tensors in float32, under GPT-2's names without prefixes; saved masks are left out."""
    tensors: dict[str, np.ndarray] = {}
    if not isinstance(named, Mapping):
        raise ConfigError(f'a {type(named).__name__} is no dictionary of tensors by name')
    for original, value in named.items():
        if not isinstance(original, str) or not hasattr(value, 'dtype'):
            raise ConfigError(f'{original!r}: a {type(value).__name__} is no tensor by name')
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
        if hasattr(value, 'untyped_storage') and (
            value.numel() * value.element_size() > value.untyped_storage().nbytes()
        ):
            shape = tuple(value.shape)
            raise ConfigError(f'tensor {original!r} has shape {shape}, but fewer stored numbers')
        if hasattr(value, 'detach'):  # of torch, whose bfloat16 numpy does not know
            value = value.detach().cpu().float().numpy()
        tensors[name] = np.asarray(value).astype(np.float32)
    return tensors

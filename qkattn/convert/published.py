"""GPT-2 and nanoGPT files as a model config and the parameters of its Decoder.

The Decoder with score 'qk', value 'vo', layer norm and learned positions is GPT-2: pre-norm, tanh
GELU (`gelu_new`), scale H^-0.5, norm epsilon 1e-5. Radford et al. 2019. Tensors have the names of
Hugging Face's GPT-2, without the prefix `transformer.`. Matrices are [inputs, outputs]; c_attn
concatenates W_Q, W_K and W_V, each with its heads in order.
"""

import dataclasses
import importlib
import os
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
from flax import traverse_util
from safetensors.numpy import load_file

from qkattn.config import ModelConfig
from qkattn.errors import LayoutError, SpecError
from qkattn.model.cost import abstract_params
from qkattn.model.sites import attention_spec
from qkattn.storage.files import as_path, local_copy
from qkattn.storage.records import parse_json

Source = str | os.PathLike[str] | Mapping[str, Any]
Tensors = dict[str, np.ndarray]

# The parameters in each tensor, concatenated along its last axis.
OUTER = {
    'wte.weight': ['w_embedding_VD'],
    'wpe.weight': ['w_position_TD'],
    'ln_f.weight': ['final_norm/g_D'],
    'ln_f.bias': ['final_norm/b_D'],
}
LAYER = {
    'ln_1.weight': ['attention_norm/g_D'],
    'ln_1.bias': ['attention_norm/b_D'],
    'attn.c_attn.weight': [
        'attention/score/w_q_DNH',
        'attention/score/w_k_DKH',
        'attention/value/w_v_DKH',
    ],
    'attn.c_attn.bias': [
        'attention/score/b_q_NH',
        'attention/score/b_k_KH',
        'attention/value/b_v_KH',
    ],
    'attn.c_proj.weight': ['attention/value/w_o_NHD'],
    'attn.c_proj.bias': ['attention/value/b_o_D'],
    'ln_2.weight': ['mlp_norm/g_D'],
    'ln_2.bias': ['mlp_norm/b_D'],
    'mlp.c_fc.weight': ['mlp/w_in_DF'],
    'mlp.c_fc.bias': ['mlp/b_in_F'],
    'mlp.c_proj.weight': ['mlp/w_out_FD'],
    'mlp.c_proj.bias': ['mlp/b_out_D'],
}
HEAD = 'lm_head.weight'  # [V, D]; a second name of wte.weight where embeddings are tied

# The only values in config.json at which GPT-2 is the Decoder, the default of transformers first;
# 'gelu_pytorch_tanh' is the same function. Published files often leave them out.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    'model_type': ('gpt2',),
    'activation_function': ('gelu_new', 'gelu_pytorch_tanh'),
    'layer_norm_epsilon': (1e-5,),
    'scale_attn_weights': (True,),
    'scale_attn_by_inverse_layer_idx': (False,),
    'add_cross_attention': (False,),
}
DEFAULTS: dict[str, Any] = {name: accepted[0] for name, accepted in SUPPORTED.items()}
DEFAULTS |= {'n_inner': None, 'tie_word_embeddings': True}
# Fields of ModelConfig by their names in config.json and in nanoGPT's model_args.
GPT2_FIELDS = {
    'n_embd': 'd_model',
    'n_head': 'num_heads',
    'n_layer': 'num_layers',
    'n_positions': 'context',
    'vocab_size': 'vocab_size',
    'n_inner': 'mlp_width',
}
NANOGPT_FIELDS = {
    'block_size': 'context',
    'vocab_size': 'vocab_size',
    'n_layer': 'num_layers',
    'n_head': 'num_heads',
    'n_embd': 'd_model',
    'bias': 'biases',
}
# torch.nn.Linear, and so nanoGPT, stores [outputs, inputs].
TRANSPOSED = ('c_attn.weight', 'c_proj.weight', 'c_fc.weight')

# Prefixes of torch.compile, of DataParallel, and of the Hugging Face model with a head.
PREFIXES = re.compile(r'(_orig_mod\.|module\.|transformer\.)*')
# Causal masks that older versions saved among the parameters.
MASKS = re.compile(r'h\.\d+\.attn\.(bias|masked_bias)')


def load_gpt2(source: Source, *, num_heads: int | None = None) -> tuple[ModelConfig, dict]:
    """Reads a GPT-2 in the Hugging Face layout; the parameters are float32.

    Names may start with `transformer.`; saved attention masks are ignored; float16 and bfloat16
    are widened. Dropout is not part of a trained model and is 0 in the config.

    Args:
      source: a directory with model.safetensors (or its index) and config.json, a .safetensors
        file, beside which config.json is read where there is one, or a dictionary of numpy, jax
        or torch arrays by name.
      num_heads: N, required without a config.json, since the shapes do not determine it.

    Raises:
      LayoutError: the tensors or the config.json are not those of a GPT-2.
    """
    described: dict[str, Any] = {}
    named: Any = source
    if not isinstance(source, Mapping):
        path = as_path(source)
        if not path.exists():
            raise LayoutError(f'{path} does not exist')
        about = (path if path.is_dir() else path.parent) / 'config.json'
        if path.is_dir() or about.exists():
            described = DEFAULTS | _read_json(about)
        named = _read_safetensors(path)
    for name in (*SUPPORTED, *GPT2_FIELDS) if described else ():
        if name not in described:
            raise LayoutError(f'config.json: {name} is missing')
        if name in SUPPORTED and described[name] not in SUPPORTED[name]:
            raise LayoutError(
                f'config.json: {name}={described[name]!r} is not supported, only '
                f'{SUPPORTED[name][0]!r}'
            )
    if described and described['n_inner'] is None:
        described['n_inner'] = 4 * described['n_embd']
    return _decoder(_normalized(named), described, GPT2_FIELDS, 'config.json', num_heads)


def load_nanogpt(source: Source, *, num_heads: int | None = None) -> tuple[ModelConfig, dict]:
    """Reads a model saved by nanoGPT or a descendant; the parameters are float32.

    Models may have biases or none, a padded vocabulary, a tied or an untied output matrix. The
    config has the exact GELU of nanoGPT's MLP (`nn.GELU()`).

    Args:
      source: a checkpoint .pt (requires torch, and loads tensors and plain values only), a
        .safetensors file, or a dictionary: of arrays by name, or a whole checkpoint with 'model'
        and 'model_args'. Arrays may be numpy, jax or torch.
      num_heads: N, required without 'model_args', since the shapes do not determine it.

    Raises:
      LayoutError: the tensors are not of this layout, or torch is required and missing.
    """
    named: Any = source
    if not isinstance(source, Mapping):
        path = as_path(source)
        named = _read_safetensors(path) if path.suffix == '.safetensors' else _read_torch(path)
    arguments: dict[str, Any] = {}
    if 'model' in named and isinstance(named['model'], Mapping):
        arguments = {**(named.get('model_args') or {})}
        arguments.pop('dropout', None)  # no part of a trained model
        named = named['model']
    for name in arguments.keys() - NANOGPT_FIELDS.keys():
        raise LayoutError(f'model_args: {name}={arguments[name]!r} is not an argument of nanoGPT')
    tensors = {
        name: np.ascontiguousarray(tensor.T) if name.endswith(TRANSPOSED) else tensor
        for name, tensor in _normalized(named).items()
    }
    config, params = _decoder(tensors, arguments, NANOGPT_FIELDS, 'model_args', num_heads)
    return dataclasses.replace(config, activation='gelu'), params


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of a model, by name."""
    D, F, V, T = config.d_model, config.mlp_width, config.vocab_size, config.context
    sizes = dict.fromkeys((*OUTER, *LAYER), (D,)) | {
        'wte.weight': (V, D),
        'wpe.weight': (T, D),
        'attn.c_attn.weight': (D, 3 * D),
        'attn.c_attn.bias': (3 * D,),
        'attn.c_proj.weight': (D, D),
        'mlp.c_fc.weight': (D, F),
        'mlp.c_fc.bias': (F,),
        'mlp.c_proj.weight': (F, D),
    }
    named = {name: sizes[name] for name in OUTER}
    named |= {f'h.{i}.{name}': sizes[name] for i in range(config.num_layers) for name in LAYER}
    if not config.tied_embeddings:
        named[HEAD] = (V, D)
    return {n: shape for n, shape in named.items() if config.biases or not n.endswith('.bias')}


def _decoder(
    tensors: Tensors,
    described: Mapping[str, Any],
    fields: Mapping[str, str],
    where: str,
    num_heads: int | None,
) -> tuple[ModelConfig, dict]:
    """The config and parameters of the tensors, which have to agree with what describes them."""
    if num_heads is None and 'n_head' not in described:
        raise LayoutError(f'num_heads is required, since the tensors come without {where}')
    tied = described.get('tie_word_embeddings')
    config = _config_of(tensors, described['n_head'] if num_heads is None else num_heads, tied)
    for name, field in fields.items():
        if name in described and described[name] != getattr(config, field):
            raise LayoutError(
                f'{where}: {name}={described[name]!r} does not fit the tensors, which have '
                f'{field}={getattr(config, field)!r}'
            )
    return config, _params_of(config, tensors)


def _config_of(tensors: Tensors, num_heads: int, tied: bool | None) -> ModelConfig:
    """The config of the tensors: all sizes but the number of heads follow from their shapes.

    Where `tied` is None, lm_head.weight is a second name of wte.weight if the two are equal.
    """
    for name in ('wte.weight', 'wpe.weight', 'h.0.mlp.c_fc.weight'):
        if name not in tensors:
            raise LayoutError(f'tensor {name!r} is missing')
        if tensors[name].ndim != 2:
            raise LayoutError(f'tensor {name!r} has shape {tensors[name].shape}, not a matrix')
    same = HEAD in tensors and np.array_equal(tensors[HEAD], tensors['wte.weight'])
    if tied is None:
        tied = same or HEAD not in tensors
    elif tied and HEAD in tensors and not same:
        raise LayoutError(f"tensor {HEAD!r} differs from 'wte.weight', to which it should be tied")
    numbers = [re.match(r'h\.(\d+)\.', name) for name in tensors]
    config = ModelConfig(
        d_model=tensors['wte.weight'].shape[1],
        num_layers=1 + max(int(number[1]) for number in numbers if number),
        num_heads=num_heads,
        d_ff=tensors['h.0.mlp.c_fc.weight'].shape[1],
        context=len(tensors['wpe.weight']),
        vocab_size=len(tensors['wte.weight']),
        biases='ln_f.bias' in tensors,
        tied_embeddings=tied,
    )
    try:
        attention_spec(config)
    except SpecError as error:
        raise LayoutError(f'model: {error}') from error
    expected = shapes(config)
    for name, shape in expected.items():
        if name not in tensors:
            raise LayoutError(f'tensor {name!r} is missing')
        if tensors[name].shape != shape:
            hint = '; load_gpt2 expects [inputs, outputs], load_nanogpt the transpose'
            hint = hint if tensors[name].shape == shape[::-1] else ''
            raise LayoutError(f'tensor {name!r} has shape {tensors[name].shape}, not {shape}{hint}')
    unexpected = sorted(set(tensors) - set(expected) - ({HEAD} if tied else set()))
    if unexpected:
        biased = 'with' if config.biases else 'without'
        raise LayoutError(f'tensor {unexpected[0]!r} does not belong to a GPT-2 {biased} biases')
    return config


def _params_of(config: ModelConfig, tensors: Tensors) -> dict:
    """The float32 parameters of Decoder(config), from the tensors of `config`."""
    target = traverse_util.flatten_dict(abstract_params(config), sep='/')
    L, flat = config.num_layers, {}
    if not config.tied_embeddings:
        flat['w_output_DV'] = jnp.asarray(tensors[HEAD].T)
    for name, paths in [*OUTER.items(), *LAYER.items()]:
        paths = paths if name in OUTER else [f'blocks/{path}' for path in paths]
        if paths[0] not in target:  # a bias
            continue
        names = [name] if name in OUTER else [f'h.{i}.{name}' for i in range(L)]
        joined = np.stack([tensors[name] for name in names])
        for path, part in zip(paths, np.split(joined, len(paths), axis=-1), strict=True):
            flat[path] = jnp.asarray(part.reshape(target[path].shape))
    assert set(flat) == set(target), set(flat) ^ set(target)
    return traverse_util.unflatten_dict(flat, sep='/')


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a file, of a model directory, or of the files that a .index.json lists."""
    if path.is_dir():
        names = ('model.safetensors', 'model.safetensors.index.json')
        files = [path / name for name in names if (path / name).exists()]
        if not files:
            raise LayoutError(f'{path} holds neither {names[0]} nor {names[1]}')
        path = files[0]
    if path.suffix == '.json':
        parts = sorted(set(_read_json(path)['weight_map'].values()))
        return {n: t for part in parts for n, t in _read_safetensors(path.parent / part).items()}
    try:
        with local_copy(path) as file:
            return load_file(file)
    except (OSError, safetensors.SafetensorError) as error:
        raise LayoutError(f'{path} cannot be read as safetensors: {error}') from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise LayoutError(f'{path} cannot be read: {error}') from error


def _read_torch(path: Path) -> dict[str, Any]:
    try:
        torch = importlib.import_module('torch')  # optional, and slow to import
    except ImportError as error:
        raise LayoutError(
            f'{path.name} can only be read with torch: install torch, or save the tensors as '
            'safetensors or as a dictionary of numpy arrays'
        ) from error
    try:
        with local_copy(path) as file:
            return torch.load(file, map_location='cpu', weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).strip().splitlines()[0]
        raise LayoutError(f'{path} cannot be read as a torch checkpoint: {reason}') from error


def _normalized(named: Mapping[str, Any]) -> Tensors:
    """The tensors in float32, under GPT-2's names without prefixes; saved masks are left out.

    Raises:
      LayoutError: two tensors of one name, or one that does not hold 32- or 16-bit floats.
    """
    tensors: Tensors = {}
    for original, value in named.items():
        name = PREFIXES.sub('', original, count=1)
        if MASKS.fullmatch(name):
            continue
        if name in tensors:
            raise LayoutError(f'tensor {name!r} occurs twice, the second time as {original!r}')
        dtype = str(value.dtype).removeprefix('torch.')
        if dtype not in ('float32', 'float16', 'bfloat16'):
            raise LayoutError(
                f'tensor {original!r} is of {dtype}; supported are float32, float16 and bfloat16'
            )
        if hasattr(value, 'detach'):  # of torch, whose bfloat16 numpy does not know
            value = value.detach().cpu().float().numpy()
        tensors[name] = np.asarray(value).astype(np.float32)
    return tensors

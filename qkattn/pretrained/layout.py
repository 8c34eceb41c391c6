"""The layout of GPT-2's tensors, and its map to the parameters of a Decoder.

Tensors have the names of Hugging Face's GPT-2 (Radford et al. 2019), without the prefix
`transformer.`. Matrices are [inputs, outputs]; c_attn concatenates W_Q, W_K and W_V, each with its
heads in order.
"""

import dataclasses
import re
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from qkattn.config import ModelConfig
from qkattn.errors import LayoutError, SpecError
from qkattn.model import abstract_model
from qkattn.model.sites import attention_spec

Tensors = dict[str, np.ndarray]

# Settings that may have any value in GPT-2's layout; the others have to be those of GPT-2.
FREE = (
    'd_model',
    'num_layers',
    'num_heads',
    'd_ff',
    'context',
    'vocab_size',
    'biases',
    'tied_embeddings',
    'init',
    'init_embedding',
    'init_qk',
    'init_vo',
    'init_mlp',
    'dropout',
    'remat',
    'scan_unroll',
    'compute_dtype',
)

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


def require_gpt2(config: ModelConfig) -> None:
    """Raises LayoutError for the first setting that GPT-2's layout cannot hold."""
    try:
        attention_spec(config)
    except SpecError as error:
        raise LayoutError(f'model: {error}') from error
    gpt2 = dataclasses.asdict(ModelConfig(score='qk', value='vo', norm='layernorm'))
    gpt2 |= {'positions': 'learned', **{name: getattr(config, name) for name in FREE}}
    gpt2 |= {'num_kv_heads': config.num_heads, 'head_size': config.d_model // config.num_heads}
    for name, supported in gpt2.items():
        value = getattr(config, name)
        derived = name in ('num_kv_heads', 'head_size') and value is None
        if value != supported and not derived:
            raise LayoutError(
                f'model.{name}={value!r} has no place in the GPT-2 layout, which supports '
                f'{name}={supported!r} only'
            )


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


def config_of(
    tensors: Mapping[str, np.ndarray], *, num_heads: int, tied: bool | None = None
) -> ModelConfig:
    """The config of the tensors: all sizes follow from their shapes, except the number of heads.

    Args:
      tied: whether lm_head.weight is a second name of wte.weight; None compares the two.

    Raises:
      LayoutError: a tensor is missing, has a wrong shape, or does not belong to GPT-2.
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
    require_gpt2(config)
    expected = shapes(config)
    for name, shape in expected.items():
        if name not in tensors:
            raise LayoutError(f'tensor {name!r} is missing')
        if tensors[name].shape != shape:
            hint = ''
            if tensors[name].shape == shape[::-1]:
                hint = '; load_gpt2 expects [inputs, outputs], load_nanogpt the transpose'
            raise LayoutError(f'tensor {name!r} has shape {tensors[name].shape}, not {shape}{hint}')
    unexpected = sorted(set(tensors) - set(expected) - ({HEAD} if tied else set()))
    if unexpected:
        biased = 'with' if config.biases else 'without'
        raise LayoutError(f'tensor {unexpected[0]!r} has no place in a GPT-2 {biased} biases')
    return config


def to_params(config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> dict:
    """The float32 parameters of Decoder(config), from tensors that `config_of` accepts."""
    target = _parameter_shapes(config)
    flat = {}

    def split(tensor: np.ndarray, paths: list[str]) -> None:
        for path, part in zip(paths, np.split(tensor, len(paths), axis=-1), strict=True):
            flat[path] = jnp.asarray(part.reshape(target[path]))

    for name, paths in OUTER.items():
        if paths[0] in target:
            split(tensors[name], paths)
    for name, paths in LAYER.items():
        paths = [f'blocks/{path}' for path in paths]
        if paths[0] in target:
            split(np.stack([tensors[f'h.{i}.{name}'] for i in range(config.num_layers)]), paths)
    if not config.tied_embeddings:
        flat['w_output_DV'] = jnp.asarray(tensors[HEAD].T)
    assert set(flat) == set(target), set(flat) ^ set(target)
    return traverse_util.unflatten_dict(flat, sep='/')


def to_tensors(config: ModelConfig, params: dict) -> Tensors:
    """The float32 tensors of `params`; a model without biases gets zero biases.

    Raises:
      LayoutError: GPT-2's layout cannot hold `config`, or `params` are not those of `config`.
    """
    require_gpt2(config)
    flat, target = traverse_util.flatten_dict(params, sep='/'), _parameter_shapes(config)
    for path in sorted(set(flat) ^ set(target)):
        raise LayoutError(f'parameter {path!r} is {"extra" if path in flat else "missing"}')
    for path, shape in target.items():
        if flat[path].shape != shape:
            raise LayoutError(
                f'parameter {path!r} has shape {flat[path].shape}, but the config gives {shape}'
            )
    tensors: Tensors = {}
    expected = shapes(dataclasses.replace(config, biases=True))

    def concatenated(paths: list[str], shape: tuple[int, ...]) -> np.ndarray:
        if paths[0] not in target:
            return np.zeros(shape, np.float32)
        parts = [np.asarray(flat[path], np.float32).reshape(*shape[:-1], -1) for path in paths]
        return np.concatenate(parts, axis=-1)

    for name, paths in OUTER.items():
        tensors[name] = concatenated(paths, expected[name])
    for name, paths in LAYER.items():
        shape = (config.num_layers, *expected[f'h.0.{name}'])
        layers = concatenated([f'blocks/{path}' for path in paths], shape)
        tensors |= {f'h.{i}.{name}': layer for i, layer in enumerate(layers)}
    if not config.tied_embeddings:
        tensors[HEAD] = np.ascontiguousarray(np.asarray(flat['w_output_DV'], np.float32).T)
    return tensors


def _parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    abstract = abstract_model(config)
    flat = traverse_util.flatten_dict(nnx.to_pure_dict(nnx.state(abstract)), sep='/')
    return {path: leaf.shape for path, leaf in flat.items()}

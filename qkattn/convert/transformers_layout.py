"""Writes models in the layout of Hugging Face's `transformers`, as a GPT-2 or a Llama.

The model must be a pre-norm decoder with score 'qk', value 'vo' and softmax. With learned positions
and layer norm, it is written as a GPT-2 (Radford et al. 2019). With rotary positions, RMS norm and
a gated MLP, it is written as a Llama (Touvron et al. 2023, arXiv 2302.13971).

directory/model.safetensors       float32 parameters by their names in transformers
directory/config.json             sizes and options
directory/tokenizer.json          the tokenizer, if it can be written in this form
directory/tokenizer_config.json   its settings
"""

import dataclasses
import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import safetensors.numpy
from flax import traverse_util
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from qkattn.attention.rope import BASE
from qkattn.config import ModelConfig
from qkattn.convert.published import HEAD, OUTPUT_MATRIX, TENSORS, names_in_layers
from qkattn.convert.published import shapes as gpt2_shapes
from qkattn.data.tokenizers.subwords import BPETokenizer, FileTokenizer
from qkattn.data.tokenizers.tokenizer import ByteTokenizer, CharacterTokenizer, Tokenizer
from qkattn.errors import ConfigError
from qkattn.model.blocks import NORM_EPSILON
from qkattn.model.cost import abstract_params
from qkattn.storage.files import absolute, replacing, write_atomic

# The valid values of settings in both layouts, and in each.
REQUIRED = {
    'kind': ('decoder',),
    'pattern': (None,),
    'score': ('qk',),
    'value': ('vo',),
    'normalizer': ('softmax',),
    'norm_position': ('pre',),
    'qk_norm': (False,),
    'logit_cap': (None,),
    'scale_embeddings': (False,),
}
REQUIRED_OF_GPT2 = {'norm': ('layernorm',), 'activation': ('gelu_tanh', 'gelu', 'relu')}
REQUIRED_OF_LLAMA = {'norm': ('rmsnorm',), 'activation': ('swiglu', 'geglu', 'reglu')}
# Names in transformers of the activation function of the MLP, or of its gate.
ACTIVATIONS = {
    'gelu_tanh': 'gelu_new',
    'gelu': 'gelu',
    'relu': 'relu',
    'swiglu': 'silu',
    'geglu': 'gelu',
    'reglu': 'relu',
}
# Parameters of the Decoder by tensor name of a Llama, with * for the layer index. Matrices in the
# files are [outputs, inputs], as in torch.nn.Linear.
LLAMA_TENSORS = {
    'model.embed_tokens.weight': 'w_embedding_VD',
    'model.layers.*.input_layernorm.weight': 'blocks/attention_norm/g_D',
    'model.layers.*.self_attn.q_proj.weight': 'blocks/attention/score/w_q_DNH',
    'model.layers.*.self_attn.q_proj.bias': 'blocks/attention/score/b_q_NH',
    'model.layers.*.self_attn.k_proj.weight': 'blocks/attention/score/w_k_DKH',
    'model.layers.*.self_attn.k_proj.bias': 'blocks/attention/score/b_k_KH',
    'model.layers.*.self_attn.v_proj.weight': 'blocks/attention/value/w_v_DKH',
    'model.layers.*.self_attn.v_proj.bias': 'blocks/attention/value/b_v_KH',
    'model.layers.*.self_attn.o_proj.weight': 'blocks/attention/value/w_o_NHD',
    'model.layers.*.self_attn.o_proj.bias': 'blocks/attention/value/b_o_D',
    'model.layers.*.post_attention_layernorm.weight': 'blocks/mlp_norm/g_D',
    'model.layers.*.mlp.gate_proj.weight': 'blocks/mlp/w_gate_DF',
    'model.layers.*.mlp.gate_proj.bias': 'blocks/mlp/b_gate_F',
    'model.layers.*.mlp.up_proj.weight': 'blocks/mlp/w_in_DF',
    'model.layers.*.mlp.up_proj.bias': 'blocks/mlp/b_in_F',
    'model.layers.*.mlp.down_proj.weight': 'blocks/mlp/w_out_FD',
    'model.layers.*.mlp.down_proj.bias': 'blocks/mlp/b_out_D',
    'model.norm.weight': 'final_norm/g_D',
    'lm_head.weight': 'w_output_DV',
}
# The parameters into which `score_scale` is multiplied.
QUERIES = ('blocks/attention/score/w_q_DNH', 'blocks/attention/score/b_q_NH')


@dataclasses.dataclass(frozen=True)
class Layout:
    """An architecture of transformers."""

    # The name for messages: 'GPT-2' or 'Llama'.
    name: str
    # (config, params) -> tensors by name.
    tensors: Callable[[ModelConfig, dict], dict[str, np.ndarray]]
    # config -> the content of config.json.
    config: Callable[[ModelConfig], dict[str, Any]]


def save(
    directory: str | os.PathLike,
    model: ModelConfig,
    params: dict,
    tokenizer: Tokenizer | None = None,
) -> Layout:
    """Writes a model as a GPT-2 or a Llama of transformers.

    Args:
        directory: The directory, which is created if needed.
        model: The config of the model.
        params: The parameters of the model.
        tokenizer: The tokenizer. It is written if `tokenizer_json` supports it.

    Returns:
        The layout of the files.

    Raises:
        ConfigError: The model is neither a GPT-2 nor a Llama. Nothing is written.
    """
    layout = layout_of(model)
    path = absolute(directory)
    path.mkdir(parents=True, exist_ok=True)

    # The temporary file takes the place of model.safetensors when the block ends.
    with replacing(path / 'model.safetensors') as temporary_file:
        tensors = layout.tensors(model, params)
        # transformers requires a format, and 'pt' is that of torch.
        safetensors.numpy.save_file(tensors, temporary_file, metadata={'format': 'pt'})

    tokenizer_file = None if tokenizer is None else tokenizer_json(tokenizer)
    if tokenizer_file is not None:
        write_atomic(path / 'tokenizer.json', tokenizer_file)
        tokenizer_config = {
            'tokenizer_class': 'PreTrainedTokenizerFast',
            'model_max_length': model.context,
        }
        write_atomic(path / 'tokenizer_config.json', json.dumps(tokenizer_config, indent=2) + '\n')

    # The separator of documents marks their beginning and their end.
    separator = None if tokenizer is None else tokenizer.separator
    model_config = layout.config(model) | {'bos_token_id': separator, 'eos_token_id': separator}
    write_atomic(path / 'config.json', json.dumps(model_config, indent=2) + '\n')
    return layout


def layout_of(model: ModelConfig) -> Layout:
    """Returns the layout of a model: GPT2 for learned positions, LLAMA for RoPE.

    Raises ConfigError if the layout does not support a setting of the model.
    """
    layout_by_positions = {'learned': GPT2, 'rope': LLAMA}
    valid_positions = tuple(layout_by_positions)
    require_setting('positions', model.positions, valid_positions, layout_has='transformers has')
    layout = layout_by_positions[model.positions]
    layout_has = f'a {layout.name} has'

    required_of_layout = REQUIRED_OF_GPT2 if layout is GPT2 else REQUIRED_OF_LLAMA
    for field, valid_values in (REQUIRED | required_of_layout).items():
        require_setting(field, getattr(model, field), valid_values, layout_has)

    # A window of the whole context has no effect.
    if model.window is not None and model.window < model.context:
        require_setting('window', model.window, (None,), layout_has)

    D = model.d_model
    N = model.num_heads
    if D % N:
        raise ConfigError(
            f'model.d_model={D} must be a multiple of num_heads={N} in the layout of a '
            f'{layout.name} of transformers'
        )
    if layout is GPT2:
        require_setting('num_kv_heads', model.num_kv_heads, (None, N), layout_has)
        require_setting('head_size', model.head_size, (None, D // N), layout_has)
    return layout


def require_setting(field: str, value: Any, valid_values: tuple[Any, ...], layout_has: str) -> None:
    """Raises ConfigError unless the value of model.`field` is valid.

    `layout_has` begins the message's list of valid values, as in 'a Llama has'.
    """
    if value in valid_values:
        return
    choices = ' or '.join(repr(choice) for choice in valid_values)
    advice = ''
    if field in ('score', 'value'):
        advice = '; --apply=to_standard rewrites the variants that are qk/vo in another form'
    if field == 'num_kv_heads':
        advice = '; --apply=gqa_to_mha repeats the heads'
    raise ConfigError(
        f'model.{field}={value!r} has no place in the layout of transformers: {layout_has} {field}='
        f'{choices}{advice}'
    )


def complete_parameters(model: ModelConfig, params: dict, *, biases: bool) -> dict[str, np.ndarray]:
    """Returns the float32 parameters of a layout by path, with defaults for missing ones.

    `score_scale`, which the layouts lack, is multiplied into W_Q and b_Q.

    Args:
        model: The config of the model.
        params: The parameters of the model.
        biases: Whether to add biases of 0 to a model without biases. Missing gains are always 1.
    """
    # The shapes of the parameters of a model with all gains, and with biases if the layout has any.
    has_biases = model.biases or biases
    full_config = dataclasses.replace(model, attention_gain=True, biases=has_biases)
    expected_parameters = traverse_util.flatten_dict(abstract_params(full_config), sep='/')
    model_parameters = traverse_util.flatten_dict(params, sep='/')
    complete: dict[str, np.ndarray] = {}
    for path, expected in expected_parameters.items():
        name = path.rpartition('/')[2]  # 'blocks/mlp_norm/g_D' -> 'g_D'
        if path in model_parameters:
            parameter = np.asarray(model_parameters[path], np.float32)
        elif name.startswith('g_'):
            parameter = np.ones(expected.shape, np.float32)
        else:
            parameter = np.zeros(expected.shape, np.float32)
        if path in QUERIES:  # W_Q and b_Q
            parameter = parameter * np.float32(model.score_scale)
        complete[path] = parameter
    return complete


def gpt2_tensors(model: ModelConfig, params: dict) -> dict[str, np.ndarray]:
    """Returns the tensors of a GPT2LMHeadModel by name. Missing biases are zero."""
    parameters = complete_parameters(model, params, biases=True)
    shapes = gpt2_shapes(dataclasses.replace(model, biases=True))  # {'wte.weight': (V, D), ...}
    tensors: dict[str, np.ndarray] = {}
    for pattern, contents in TENSORS.items():
        if pattern == HEAD:
            continue  # added below
        is_in_layers = '*' in pattern
        for layer, name in enumerate(names_in_layers(pattern, model)):
            # For example, c_attn.weight [D, 3 D] holds W_Q, W_K and W_V, each [D, N, H].
            leading_sizes = shapes[name][:-1]
            parts = []
            for path in contents.paths:
                parameter = parameters[path][layer] if is_in_layers else parameters[path]
                parts.append(parameter.reshape(*leading_sizes, -1))
            tensor = np.concatenate(parts, axis=-1)
            tensors[f'transformer.{name}'] = np.ascontiguousarray(tensor)

    if not model.tied_embeddings:
        tensors[HEAD] = np.ascontiguousarray(parameters[OUTPUT_MATRIX].T)
    return tensors


def gpt2_config(model: ModelConfig) -> dict[str, Any]:
    """Returns the config.json of a GPT-2."""
    return {
        'architectures': ['GPT2LMHeadModel'],
        'model_type': 'gpt2',
        'vocab_size': model.vocab_size,
        'n_positions': model.context,
        'n_embd': model.d_model,
        'n_layer': model.num_layers,
        'n_head': model.num_heads,
        'n_inner': model.mlp_width,
        'activation_function': ACTIVATIONS[model.activation],
        'layer_norm_epsilon': NORM_EPSILON,
        'embd_pdrop': model.dropout,
        'resid_pdrop': model.dropout,
        'attn_pdrop': model.probability_dropout,
        'tie_word_embeddings': model.tied_embeddings,
    }


def llama_tensors(model: ModelConfig, params: dict) -> dict[str, np.ndarray]:
    """Returns the tensors of a LlamaForCausalLM by name."""
    parameters = complete_parameters(model, params, biases=False)
    D = model.d_model
    # Matrices of a Llama are [outputs, inputs], so most are transposed.
    tensors: dict[str, np.ndarray] = {}
    for pattern, path in LLAMA_TENSORS.items():
        if path not in parameters:
            continue  # a bias of a model without biases, or a tied output matrix
        axes = path.rpartition('_')[2]  # 'blocks/attention/score/w_q_DNH' -> 'DNH'
        is_in_layers = '*' in pattern
        for layer, name in enumerate(names_in_layers(pattern, model)):
            parameter = parameters[path][layer] if is_in_layers else parameters[path]
            if name.endswith('.bias') or axes == 'D':
                tensor = parameter.reshape(-1)
            elif axes == 'VD':  # the embedding
                tensor = parameter
            elif axes.startswith('D'):  # DNH, DKH, DF or DV
                tensor = parameter.reshape(D, -1).T
            else:  # NHD or FD
                tensor = parameter.reshape(-1, D).T
            tensors[name] = np.ascontiguousarray(tensor)
    return tensors


def llama_config(model: ModelConfig) -> dict[str, Any]:
    """Returns the config.json of a Llama."""
    return {
        'architectures': ['LlamaForCausalLM'],
        'model_type': 'llama',
        'vocab_size': model.vocab_size,
        'max_position_embeddings': model.context,
        'hidden_size': model.d_model,
        'intermediate_size': model.mlp_width,
        'num_hidden_layers': model.num_layers,
        'num_attention_heads': model.num_heads,
        'num_key_value_heads': model.num_kv_heads or model.num_heads,
        'head_dim': model.head_size or model.d_model // model.num_heads,
        'hidden_act': ACTIVATIONS[model.activation],
        'rms_norm_eps': NORM_EPSILON,
        # Versions of transformers read one of these two.
        'rope_theta': BASE,
        'rope_parameters': {'rope_type': 'default', 'rope_theta': BASE},
        'attention_bias': model.biases,
        'mlp_bias': model.biases,
        'attention_dropout': model.probability_dropout,
        'tie_word_embeddings': model.tied_embeddings,
    }


GPT2 = Layout('GPT-2', gpt2_tensors, gpt2_config)
LLAMA = Layout('Llama', llama_tensors, llama_config)


def tokenizer_json(tokenizer: Tokenizer) -> bytes | None:
    """Returns the content of a Hugging Face tokenizer.json that gives the same ids.

    Returns None for tiktoken encodings and for classes from outside the package.
    """
    # A subclass may encode differently, so types are compared exactly. `model` returns the file
    # from which a tokenizer can be read again.
    if type(tokenizer) is FileTokenizer:
        return tokenizer.model()  # already a tokenizer.json

    if type(tokenizer) is BPETokenizer:
        # BPETokenizer encodes single lines, which end with '\n'.
        hf_tokenizer = LibraryTokenizer.from_buffer(tokenizer.model())
        lines = pre_tokenizers.Split('\n', 'merged_with_previous')
        hf_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([lines, hf_tokenizer.pre_tokenizer])
    elif type(tokenizer) is ByteTokenizer:
        # In BPE without merges, every byte is a token.
        hf_tokenizer = LibraryTokenizer(models.BPE(vocab=ids_of_bytes(), merges=[]))
        hf_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=False
        )
        hf_tokenizer.decoder = decoders.ByteLevel()
    elif type(tokenizer) is CharacterTokenizer:
        vocabulary = json.loads(tokenizer.model())
        characters = vocabulary['characters']  # in the order of their ids
        id_of_token = {token: token_id for token_id, token in enumerate(characters)}
        id_of_token['[UNKNOWN]'] = tokenizer.unknown
        id_of_token['[SEPARATOR]'] = tokenizer.separator
        hf_tokenizer = LibraryTokenizer(models.WordLevel(id_of_token, unk_token='[UNKNOWN]'))
        any_character = Regex(r'[\s\S]')  # `.` would not match newlines
        hf_tokenizer.pre_tokenizer = pre_tokenizers.Split(any_character, 'isolated')
        hf_tokenizer.decoder = decoders.Fuse()  # joins characters without spaces
    else:
        return None
    return hf_tokenizer.to_str().encode()


def ids_of_bytes() -> dict[str, int]:
    """Returns GPT-2's mapping from visible characters to bytes (Radford et al. 2019).

    Visible characters of Latin-1 stand for themselves: 'A' -> 65. The characters from U+0100 on
    stand for the remaining bytes: 'Ā' -> 0.
    """
    visible_bytes = {
        *range(ord('!'), ord('~') + 1),
        *range(ord('¡'), ord('¬') + 1),
        *range(ord('®'), ord('ÿ') + 1),
    }
    byte_of_character = {chr(byte): byte for byte in visible_bytes}  # {'A': 65, ...}
    invisible_bytes = [byte for byte in range(256) if byte not in visible_bytes]
    for index, byte in enumerate(invisible_bytes):
        byte_of_character[chr(256 + index)] = byte
    return byte_of_character

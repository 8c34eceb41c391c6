"""A GPT-2 written from the published equations, in float64 numpy, that shares no code with ours."""

import math

import numpy as np

D, N, L, F, T, V = 16, 2, 3, 48, 10, 29


def tanh_gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def exact_gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def forward(tensors, tokens_BT, *, num_heads=N, gelu=tanh_gelu):
    """Logits of Radford et al. 2019 from tensors by name; biases that are absent are zero."""
    p = {name: np.asarray(t, np.float64) for name, t in tensors.items()}

    def affine(x, name):
        return x @ p[f'{name}.weight'] + p.get(f'{name}.bias', 0)

    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * p[f'{name}.weight'] + p.get(f'{name}.bias', 0)

    tokens_BT = np.asarray(tokens_BT)
    x_BTD = p['wte.weight'][tokens_BT] + p['wpe.weight'][: tokens_BT.shape[1]]
    later_TS = np.triu(np.ones((tokens_BT.shape[1],) * 2, bool), 1)
    layer = 0
    while f'h.{layer}.ln_1.weight' in p:
        h = f'h.{layer}'
        q_BTD, k_BTD, v_BTD = np.split(affine(norm(x_BTD, f'{h}.ln_1'), f'{h}.attn.c_attn'), 3, -1)
        heads = []
        for q, k, v in zip(
            *(np.split(a, num_heads, -1) for a in (q_BTD, k_BTD, v_BTD)), strict=True
        ):
            s_BTS = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
            s_BTS = np.where(later_TS, -np.inf, s_BTS)
            p_BTS = np.exp(s_BTS - s_BTS.max(-1, keepdims=True))
            heads.append(p_BTS / p_BTS.sum(-1, keepdims=True) @ v)
        x_BTD = x_BTD + affine(np.concatenate(heads, -1), f'{h}.attn.c_proj')
        hidden = gelu(affine(norm(x_BTD, f'{h}.ln_2'), f'{h}.mlp.c_fc'))
        x_BTD = x_BTD + affine(hidden, f'{h}.mlp.c_proj')
        layer += 1
    return norm(x_BTD, 'ln_f') @ p.get('lm_head.weight', p['wte.weight']).T


def make_tensors(*, biases=True, width=F):
    """Random GPT-2 tensors under their published names; gains near 1, nothing symmetrical."""
    rng = np.random.default_rng(0)
    shapes = {'wte': (V, D), 'wpe': (T, D), 'ln_f': (D,)}
    for i in range(L):
        shapes |= {
            f'h.{i}.ln_1': (D,),
            f'h.{i}.attn.c_attn': (D, 3 * D),
            f'h.{i}.attn.c_proj': (D, D),
            f'h.{i}.ln_2': (D,),
            f'h.{i}.mlp.c_fc': (D, width),
            f'h.{i}.mlp.c_proj': (width, D),
        }
    tensors = {}
    for name, shape in shapes.items():
        around = 1 if 'ln_' in name else 0
        tensors[f'{name}.weight'] = around + 0.3 * rng.standard_normal(shape)
        if biases and name not in ('wte', 'wpe'):
            tensors[f'{name}.bias'] = 0.3 * rng.standard_normal(shape[-1])
    return {name: t.astype(np.float32) for name, t in tensors.items()}


TOKENS = np.random.default_rng(1).integers(0, V, (3, T))

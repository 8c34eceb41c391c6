"""The same language model in plain PyTorch: torch.compile, fused attention and AdamW."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from experiments.benchmark.race import Work


class Block(nn.Module):
    def __init__(self, model: Mapping[str, Any]):
        super().__init__()
        D = model['d_model']
        self.num_heads = model['num_heads']
        self.gelu = 'tanh' if model['activation'] == 'gelu_tanh' else 'none'
        self.attention_norm = nn.LayerNorm(D, bias=False)
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.out = nn.Linear(D, D, bias=False)
        self.mlp_norm = nn.LayerNorm(D, bias=False)
        self.mlp_in = nn.Linear(D, 4 * D, bias=False)
        self.mlp_out = nn.Linear(4 * D, D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds causal attention of x, then an MLP; both act on the normalized x, [B, T, D]."""
        B, T, D = x.shape
        qkv = self.qkv(self.attention_norm(x))  # [B, T, 3 D]
        q, k, v = (
            part.view(B, T, self.num_heads, -1).transpose(1, 2) for part in qkv.split(D, dim=2)
        )
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, N, T, H]
        x = x + self.out(o.transpose(1, 2).reshape(B, T, D))
        hidden = F.gelu(self.mlp_in(self.mlp_norm(x)), approximate=self.gelu)
        return x + self.mlp_out(hidden)


class GPT(nn.Module):
    def __init__(self, model: Mapping[str, Any]):
        super().__init__()
        self.embedding = nn.Embedding(model['vocab_size'], model['d_model'])
        self.position = nn.Embedding(model['context'], model['d_model'])
        self.blocks = nn.ModuleList([Block(model) for _ in range(model['num_layers'])])
        self.norm = nn.LayerNorm(model['d_model'], bias=False)
        for parameter in self.parameters():
            is_matrix = parameter.ndim > 1
            if is_matrix:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the mean cross-entropy of tokens[:, 1:]; tokens is [B, T + 1]."""
        inputs = tokens[:, :-1]
        targets = tokens[:, 1:]
        x = self.embedding(inputs) + self.position.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def train(config: Mapping[str, Any]) -> Work:
    """Builds the training steps of a run, whose config is JSON: gradients, clipping, AdamW.

    They run on a GPU if there is one. A call makes one step.
    """
    sizes = config['model']
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    torch.manual_seed(0)
    torch.set_float32_matmul_precision('high')  # TF32 on GPUs, as in JAX
    model = GPT(sizes).to(device)
    compute_loss = torch.compile(model)

    parameters = list(model.parameters())
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    gains = [parameter for parameter in parameters if parameter.ndim == 1]
    groups = [
        {'params': matrices, 'weight_decay': 0.1},
        {'params': gains, 'weight_decay': 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=True)

    shape = (config['train']['batch_size'], sizes['context'] + 1)
    tokens = np.random.default_rng(0).integers(sizes['vocab_size'], size=shape)
    batch = torch.from_numpy(tokens).to(device)
    compute_dtype = getattr(torch, sizes['compute_dtype'])
    is_mixed_precision = compute_dtype != torch.float32

    def step() -> None:
        with torch.autocast(device.type, compute_dtype, enabled=is_mixed_precision):
            loss = compute_loss(batch)
        adamw.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        adamw.step()

    def run(calls: int) -> None:
        for _ in range(calls):
            step()
        if device.type == 'cuda':
            torch.cuda.synchronize()

    return Work(run)

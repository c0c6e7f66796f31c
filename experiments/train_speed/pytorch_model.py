"""Kintsugi's two model families, written plainly in PyTorch: the peer of the speed table and the oracle of the gradients.

Parameters are fp32. Matrices are cast to the compute dtype where they are used, so their gradients and the optimizer's
state are fp32 too; activations and the residual stream have the compute dtype; norms and the loss reduce in fp32.
q, k, v are one matrix, gate and up another.
"""

import math
import tomllib

import torch
import torch.nn as nn
import torch.nn.functional as F


class Config:
    """The [model] table of a configuration file."""

    def __init__(self, model):
        self.family = model.get("family", "llama")
        self.L, self.C, self.H = model["num_layers"], model["dim"], model["num_heads"]
        self.K = model.get("num_kv_heads", 0) or self.H
        self.D = model.get("head_dim", 0) or self.C // self.H
        self.F, self.V, self.T = model["ffn_dim"], model["vocab_size"], model["max_seq_len"]
        self.eps = model.get("norm_eps", 1e-5)
        self.theta = model.get("rope_theta", 10000.0)
        self.tied = model.get("tied_embedding", False)
        self.qk_norm = model.get("qk_norm", False)
        self.gpt2 = self.family == "gpt2"


def read_config(path, batch=None):
    """A configuration file of `train`, with `batch` sequences a step instead of its own where given, and its model."""
    with open(path, "rb") as f:
        config = tomllib.load(f)
    if batch:
        config["training"]["global_batch_size"] = batch
    return config, Config(config["model"])


def check_losses(shape, losses):
    """Every loss is finite, and the first that of fresh weights: normed activations times weights of deviation 0.02 make
    normal logits of variance C 0.02^2."""
    assert abs(losses[0] - math.log(shape.V) - shape.C * 0.02**2 / 2) < 0.1 and all(map(math.isfinite, losses)), losses


class Linear(nn.Module):
    def __init__(self, I, O, bias, std):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(O, I) * std)
        self.bias = nn.Parameter(torch.zeros(O)) if bias else None

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class Norm(nn.Module):
    def __init__(self, C, layer_norm, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(C))
        self.bias = nn.Parameter(torch.zeros(C)) if layer_norm else None
        self.eps = eps

    def forward(self, x):
        w = self.weight.to(x.dtype)
        if self.bias is None:
            return F.rms_norm(x, w.shape, w, self.eps)
        return F.layer_norm(x, w.shape, w, self.bias.to(x.dtype), self.eps)


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def rotation(c):
    """Cosines and sines of rotary positions, (T, D)."""
    angle = torch.outer(torch.arange(c.T).float(), c.theta ** (-torch.arange(0, c.D, 2).float() / c.D))
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.norm1, self.norm2 = Norm(c.C, c.gpt2, c.eps), Norm(c.C, c.gpt2, c.eps)
        residual = 0.02 / math.sqrt(2 * c.L)
        self.qkv = Linear(c.C, (c.H + 2 * c.K) * c.D, c.gpt2, 0.02)
        if c.qk_norm:
            self.q_norm, self.k_norm = Norm(c.D, False, c.eps), Norm(c.D, False, c.eps)
        self.o = Linear(c.H * c.D, c.C, c.gpt2, residual)
        self.up = Linear(c.C, c.F if c.gpt2 else 2 * c.F, c.gpt2, 0.02)
        self.down = Linear(c.F, c.C, c.gpt2, residual)

    def forward(self, x, cos, sin):
        c, (B, T, _) = self.c, x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, c.H + 2 * c.K, c.D).transpose(1, 2).split((c.H, c.K, c.K), dim=1)
        if c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if not c.gpt2:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=c.K != c.H)
        x = x + self.o(y.transpose(1, 2).reshape(B, T, c.H * c.D))
        h = self.up(self.norm2(x))
        if c.gpt2:
            return x + self.down(F.gelu(h, approximate="tanh"))
        gate, up = h.chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, c, dtype):
        super().__init__()
        self.c, self.dtype = c, dtype
        self.tokens = nn.Parameter(torch.randn(c.V, c.C) * 0.02)
        self.positions = nn.Parameter(torch.randn(c.T, c.C) * 0.02) if c.gpt2 else None
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.L))
        self.norm = Norm(c.C, c.gpt2, c.eps)
        self.head = None if c.tied else Linear(c.C, c.V, False, 0.02)
        cos, sin = rotation(c)
        self.register_buffer("cos", cos.to(dtype), persistent=False)
        self.register_buffer("sin", sin.to(dtype), persistent=False)

    def forward(self, ids, targets, reduction="mean"):
        T = ids.shape[1]
        x = F.embedding(ids, self.tokens)
        if self.c.gpt2:
            x = x + self.positions[:T]
        x = x.to(self.dtype)
        for block in self.blocks:
            x = block(x, self.cos[:T], self.sin[:T])
        return self.loss(x, targets, reduction)

    def loss(self, x, targets, reduction):
        x = self.norm(x)
        logits = F.linear(x, self.tokens.to(x.dtype)) if self.head is None else self.head(x)
        return F.cross_entropy(logits.float().view(-1, self.c.V), targets.reshape(-1), reduction=reduction)

    def flops_per_token(self, T):
        """The full-attention rule: 6 N' + 12 L H D T, N' parameters with the head, without the token and position tables."""
        c = self.c
        tables = self.tokens.numel() + (0 if self.positions is None else self.positions.numel())
        n = sum(p.numel() for p in self.parameters()) - tables + (c.V * c.C if c.tied else 0)
        return 6 * n + 12 * c.L * c.H * c.D * T

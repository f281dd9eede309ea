"""The model once more, by another route: float64, complex pairs, relative offsets, plain loops.

Written from the definition alone and independent of model.py, whose `rotate`, tables and YaRN it
never calls. With z_m = x_m + i x_(m + D/2), the pair m of a head:

    score_ij = mscale^2 / sqrt(D) * sum_m Re( conj(zq_im) zk_jm e^(i omega_m (j - i)) )
    y_im     = sum_j A_ij zv_jm e^(i omega'_m (j - i))        omega' = 0 for rope

No absolute position enters, so whatever the code does in its rotated frames must cancel.
`lively` makes models in which positions matter; `explicit` is the same law with rotation matrices.
"""

import math
from dataclasses import asdict
from functools import cache

import torch

from model import GPT, GPTConfig, KVCache

TOLERANCE = 1e-4  # fp32 logits of unit size: a chain of some 1e3 roundings of 6e-8, as a walk
MODES = ("rope", "rove", "rope+yarn", "rove+yarn")
CASES = tuple((mode, "yarn") for mode in MODES) + (("rove+yarn", "orig"),)


def small(mode="rove", **changes):
    """A config whose head_dim is 8: the ramp's lower bound clamps, three of four pairs differ."""
    sizes = dict(block_size=32, vocab_size=97, n_layer=2, n_head=2, n_embd=16)
    return GPTConfig(**{**sizes, "pos_mode": mode, **changes})


def wide(mode="rove", factor=1.0, **changes):
    """The published geometry, block_size 1024 and head_dim 64, in one layer of two heads."""
    sizes = dict(block_size=1024, vocab_size=97, n_layer=1, n_head=2, n_embd=128)
    return GPTConfig(**{**sizes, "pos_mode": mode, "yarn_factor": factor, **changes})


def lively(config, seed=0):
    """A model in eval mode whose attention is far from uniform: weights of unit gain, no zero
    bias, no layer norm of ones (at init, 0.02, positions would hardly move a logit)."""
    net = GPT(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in net.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.dim() == 2:
                gain = 1.0 if "wte" in name else 1.6
                p.copy_(noise * gain / math.sqrt(p.shape[1]))
            else:
                p.add_(0.2 * noise)
    return net


def ids(config, B, T, seed=0):
    """Seeded token ids (B, T)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (B, T), generator=generator)


def frequencies(D, theta, length, factor, beta_fast=32.0, beta_slow=1.0):
    """omega as a list of Python floats, the ramp as in YaRN's released code."""
    plain = [math.exp(-math.log(theta) * 2 * m / D) for m in range(D // 2)]
    if factor <= 1:
        return plain
    # a pair makes r turns where length * theta^(-2m/D) = 2 pi r
    fast, slow = (
        D / 2 * math.log(length / (2 * math.pi * r), theta) for r in (beta_fast, beta_slow)
    )
    low, high = max(math.floor(fast), 0), min(math.ceil(slow), D - 1)
    kept = [1 - min(max((m - low) / ((high - low) or 0.001), 0), 1) for m in range(D // 2)]
    return [k * omega + (1 - k) * omega / factor for k, omega in zip(kept, plain, strict=True)]


def temperature(factor):
    return 1.0 if factor <= 1 else 1.0 + 0.1 * math.log(factor)


def positions(config):
    """Return (omega of q and k, omega of v and y, scale of the scores) of a config."""
    D, s = config.n_embd // config.n_head, config.yarn_factor if "yarn" in config.pos_mode else 1
    args = (D, config.rope_theta, config.block_size)
    betas = (config.yarn_beta_fast, config.yarn_beta_slow)
    qk = frequencies(*args, s, *betas)
    v = frequencies(*args, 1 if config.yarn_values == "orig" else s, *betas)
    if config.pos_mode.startswith("rope"):
        v = [0.0] * (D // 2)
    return qk, v, temperature(s) ** 2 / math.sqrt(D)


def pairs(x):
    """(..., D) real to (..., D / 2) complex: channel m with channel m + D / 2."""
    D = x.shape[-1]
    return torch.complex(x[..., : D // 2], x[..., D // 2 :])


def turns(omega, T):
    """The (T, T) matrix e^(i omega (j - i)), complex128, built from its 2 T - 1 diagonals."""
    angle = omega * torch.arange(1 - T, T, dtype=torch.float64)
    return torch.polar(torch.ones_like(angle), angle).unfold(0, T, 1).flip(0)


def weights(scores):
    """Causal softmax of scores (..., T, T)."""
    T = scores.shape[-1]
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -math.inf).softmax(-1)


def attend(q, k, v, omega_qk, omega_v, scale):
    """Attention of q, k, v (..., T, D) float64 by offsets, head by head and pair by pair."""
    if q.dim() > 2:
        heads = zip(q, k, v, strict=True)
        return torch.stack([attend(*head, omega_qk, omega_v, scale) for head in heads])
    T = len(q)
    zq, zk, zv = pairs(q), pairs(k), pairs(v)
    scores = 0
    for m, omega in enumerate(omega_qk):
        scores = scores + (zq[:, None, m].conj() * zk[None, :, m] * turns(omega, T)).real
    A = weights(scores * scale)
    y = torch.stack([(A * turns(w, T)) @ zv[:, m] for m, w in enumerate(omega_v)], dim=-1)
    return torch.cat((y.real, y.imag), dim=-1)


def matrix(omega, delta):
    """R_delta as a (D, D) float64 matrix."""
    half = len(omega)
    R = torch.zeros(2 * half, 2 * half, dtype=torch.float64)
    for m, w in enumerate(omega):
        c, s = math.cos(w * delta), math.sin(w * delta)
        R[m, m], R[m, m + half], R[m + half, m], R[m + half, m + half] = c, -s, s, c
    return R


def explicit(q, k, v, omega_qk, omega_v, scale):
    """The same for one head, q, k, v (T, D), by sums over rotation matrices; return (y, A)."""
    T = len(q)
    scores = [[q[i] @ matrix(omega_qk, j - i) @ k[j] for j in range(T)] for i in range(T)]
    A = weights(torch.stack([torch.stack(row) for row in scores]) * scale)
    y = [sum(A[i, j] * (matrix(omega_v, j - i) @ v[j]) for j in range(i + 1)) for i in range(T)]
    return torch.stack(y), A


def layer_norm(x, weight, bias):
    centred = x - x.mean(-1, keepdim=True)
    x = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    return x if bias is None else x + bias


def gelu(x):
    return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def logits(state, config, idx):
    """Logits (B, T, V) float64 of the whole model, from a state dict; differentiable."""
    w = {name: value.double() for name, value in state.items()}

    def linear(name, x):
        bias = w.get(f"{name}.bias")
        return x @ w[f"{name}.weight"].T + (0 if bias is None else bias)

    def norm(name, x):
        return layer_norm(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    where, H = positions(config), config.n_head
    x = w["transformer.wte.weight"][idx]
    B, T, C = x.shape
    for n in range(config.n_layer):
        block = f"transformer.h.{n}"
        qkv = linear(f"{block}.attn.c_attn", norm(f"{block}.ln_1", x))
        q, k, v = (part.reshape(B, T, H, C // H).transpose(1, 2) for part in qkv.split(C, dim=-1))
        y = attend(q, k, v, *where).transpose(1, 2).reshape(B, T, C)
        x = x + linear(f"{block}.attn.c_proj", y)
        inner = gelu(linear(f"{block}.mlp.c_fc", norm(f"{block}.ln_2", x)))
        x = x + linear(f"{block}.mlp.c_proj", inner)
    x = norm("transformer.ln_f", x)
    return x @ w["transformer.wte.weight"][: config.vocab_size].T


@cache
def _expected(key, B, T):
    config = GPTConfig(**dict(key))
    return logits(lively(config).state_dict(), config, ids(config, B, T))


def expected(config, B, T):
    """The oracle's logits of lively(config) on ids(config, B, T), computed once per test run."""
    return _expected(tuple(asdict(config).items()), B, T)


def error(net, B, T):
    """Largest deviation of a lively model's logits from the oracle's."""
    with torch.no_grad():
        got, _ = net(ids(net.config, B, T))
    return (got.double() - expected(net.config, B, T)).abs().max().item()


def chunked(net, idx, size):
    """Logits (B, T, V) of idx read through a KV cache, `size` tokens at a time."""
    cache = KVCache(net.config, idx.shape[1])
    with torch.no_grad():
        parts = [net.head(net.hidden(part, cache=cache)) for part in idx.split(size, dim=1)]
    return torch.cat(parts, dim=1)


def inside(net, idx, **positions):
    """Return q, k, v before rotation and y before projection, float64 (B, H, T, D), of layer 0."""
    seen = {}
    attn = net.transformer.h[0].attn
    hooks = (
        attn.c_attn.register_forward_hook(lambda module, args, out: seen.update(qkv=out)),
        attn.c_proj.register_forward_pre_hook(lambda module, args: seen.update(y=args[0])),
    )
    with torch.no_grad():
        net(idx, **positions)
    for hook in hooks:
        hook.remove()
    qkv_y = (*seen["qkv"].chunk(3, dim=-1), seen["y"])
    return [x.double().unflatten(-1, (net.config.n_head, -1)).transpose(1, 2) for x in qkv_y]


def bare(rows, mode="rove", query=0.0, value=None):
    """A one-head model whose attention reads rows (T, D) themselves: q = query * row, k = row,
    v = value @ row (default: the row). Token t stands for rows[t]."""
    V, D = rows.shape
    net = GPT(GPTConfig(32, V, n_layer=1, n_head=1, n_embd=D, pos_mode=mode)).eval()
    eye, block = torch.eye(D), net.transformer.h[0]
    block.ln_1 = torch.nn.Identity()
    with torch.no_grad():
        net.transformer.wte.weight[:V] = rows
        parts = (query * eye, eye, eye if value is None else value)
        block.attn.c_attn.weight.copy_(torch.cat(parts))
    return net

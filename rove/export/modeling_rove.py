"""GPT-2 with rotary positions for transformers: RoPE, RoVE (arXiv 2606.11275), both under YaRN.

R_t turns channel m of a head together with channel m + head_dim / 2 by the angle t * omega_m:

    scores   (R_i q_i) . (R_j k_j) * mscale^2 / sqrt(head_dim)       in every mode
    rope     y_i = sum_j A_ij v_j
    rove     y_i = R_i^-1 sum_j A_ij R_j v_j

Angles are computed in float64 from config and positions in every forward pass and stored nowhere:
no cast of the weights reaches them, and no length exceeds them. Keys and, in rove, values are
cached rotated. Sizes: B batch, T tokens, H heads, D head dim, C width, V vocabulary.
"""

import math
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_rove import RoveConfig

HEAD, EMBEDDING = "lm_head.weight", "transformer.wte.weight"
TIED: Any = {HEAD: EMBEDDING} if int(transformers.__version__.split(".")[0]) >= 5 else [HEAD]
# The output's field for the cache was renamed in transformers 5.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class Positions(NamedTuple):
    """What attention needs to know of where its tokens stand."""

    qk: Tensor  # (2, B or 1, 1, T, D / 2) float32: cos and sin for queries and keys
    v: Tensor | None  # for values and outputs; None where they do not rotate
    scale: float  # of the scores, YaRN's temperature included
    slots: Tensor  # (T,): where a static cache puts them, in transformers 4
    length: int  # keys to attend to; a static cache returns its free room too


def frequencies(config: RoveConfig, factor: float) -> list[float]:
    """Return D / 2 frequencies, radians per position, for a YaRN factor (1: plain RoPE).

    Over the training length pair m makes max_position_embeddings * omega_m / (2 pi) turns. A ramp,
    linear in the pair index, leads from the floor of the index with yarn_beta_fast turns (kept) to
    the ceiling of that with yarn_beta_slow turns (divided by factor), clamped to [0, D - 1].
    """
    D, theta = config.hidden_size // config.num_attention_heads, config.rope_theta
    plain = [theta ** (-2 * m / D) for m in range(D // 2)]
    if factor == 1:
        return plain
    betas = (config.yarn_beta_fast, config.yarn_beta_slow)
    lengths = [config.max_position_embeddings / (2 * math.pi * beta) for beta in betas]
    fast, slow = (D * math.log(length) / (2 * math.log(theta)) for length in lengths)
    low, high = max(math.floor(fast), 0), min(math.ceil(slow), D - 1)
    slowed = [min(max((m - low) / max(high - low, 0.001), 0.0), 1.0) for m in range(D // 2)]
    return [w * (1 - s) + w / factor * s for w, s in zip(plain, slowed, strict=True)]


def table(omega: list[float], position_ids: Tensor) -> Tensor:
    """Return cos and sin, (2, B, 1, T, D / 2) float32, at position_ids (B, T)."""
    where = position_ids.device
    at = position_ids.to("cpu" if where.type == "mps" else where, torch.float64)  # mps: no float64
    angles = at[:, None, :, None] * torch.tensor(omega, dtype=torch.float64, device=at.device)
    return torch.stack((angles.cos(), angles.sin())).float().to(where)


def positions(config: RoveConfig, position_ids: Tensor, *where: Any) -> Positions:
    """Return what attention needs at position_ids (B or 1, T); where: slots and length."""
    factor = config.yarn_factor if config.pos_mode.endswith("+yarn") else 1.0
    qk = table(frequencies(config, factor), position_ids)
    orig = config.yarn_values == "orig"
    v = table(frequencies(config, 1.0), position_ids) if orig else qk
    mscale = 0.1 * math.log(factor) + 1.0
    scale = mscale**2 / math.sqrt(config.hidden_size // config.num_attention_heads)
    return Positions(qk, v if config.pos_mode.startswith("rove") else None, scale, *where)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the channel pairs of x (B, H, T, D) in float32; negate sin to turn back."""
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


def visible(mask: Tensor | None, T: int, past: int, device: torch.device) -> Tensor | None:
    """Return which of past + T keys each of T queries sees, None where is_causal says it all.

    mask: (B, past + T), 0 for padding, or None; one of 4 dimensions is taken as it is. Padding sees
    itself, as a softmax over nothing would be NaN, and NaN would spread.
    """
    if mask is not None and mask.dim() == 4:
        return mask
    if mask is None and (past == 0 or T == 1):
        return None
    causal = torch.ones(T, past + T, dtype=torch.bool, device=device).tril(past)
    return causal if mask is None else causal & (mask[:, None, None].bool() | causal.triu(past))


class Attention(nn.Module):
    def __init__(self, config: RoveConfig, layer: int) -> None:
        super().__init__()
        C = config.hidden_size
        self.c_attn = nn.Linear(C, 3 * C, bias=config.bias)
        self.c_proj = nn.Linear(C, C, bias=config.bias)
        self.layer, self.n_head = layer, config.num_attention_heads
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, pos: Positions, mask: Tensor | None, cache: Any) -> Tensor:
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)
        q, k, v = rotate(qkv[0], *pos.qk), rotate(qkv[1], *pos.qk), qkv[2]  # each (B, H, T, D)
        if pos.v is not None:
            v = rotate(v, *pos.v)
        if cache is not None:
            slots = {"cache_position": pos.slots}
            k, v = (x[:, :, : pos.length] for x in cache.update(k, v, self.layer, slots))
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(q.dtype)
        p, causal = self.drop.p if self.training else 0.0, mask is None and T > 1
        y = F.scaled_dot_product_attention(q, k, v, mask, p, is_causal=causal, scale=pos.scale)
        if pos.v is not None:
            cos, sin = pos.v
            y = rotate(y, cos, -sin)
        return self.drop(self.c_proj(y.transpose(1, 2).reshape(B, T, C)))


class MLP(nn.Module):
    def __init__(self, config: RoveConfig) -> None:
        super().__init__()
        C = config.hidden_size
        self.c_fc = nn.Linear(C, 4 * C, bias=config.bias)
        self.c_proj = nn.Linear(4 * C, C, bias=config.bias)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")))


class Block(nn.Module):
    def __init__(self, config: RoveConfig, layer: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden_size, bias=config.bias)
        self.attn = Attention(config, layer)
        self.ln_2 = nn.LayerNorm(config.hidden_size, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, pos: Positions, mask: Tensor | None, cache: Any) -> Tensor:
        x = x + self.attn(self.ln_1(x), pos, mask, cache)
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    def __init__(self, config: RoveConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.h = nn.ModuleList(Block(config, n) for n in range(config.num_hidden_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, bias=config.bias)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, *where: Any, keep_all: bool = False) -> list[Tensor]:
        """Return the normalised last states (B, T, C), with keep_all behind those of each block."""
        states = [self.drop(x)]
        for block in self.h:
            states = [*(states if keep_all else ()), block(states[-1], *where)]
        return [*states[:-1], self.ln_f(states[-1])]


class RoveForCausalLM(PreTrainedModel, GenerationMixin):
    config: RoveConfig
    config_class = RoveConfig
    base_model_prefix = "transformer"
    _tied_weights_keys = TIED
    _no_split_modules = ["Block"]
    _skip_keys_device_placement = ["past_key_values", "cache"]
    _supports_sdpa = True

    def __init__(self, config: RoveConfig) -> None:
        super().__init__(config)
        config.check()
        self.transformer = Transformer(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.transformer.wte

    def set_input_embeddings(self, value: Any) -> None:
        self.transformer.wte = value

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.lm_head = new_embeddings

    def _where(
        self, x: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cache: Any
    ) -> tuple[Positions, Tensor | None]:
        """Return positions and mask of the tokens x (B, T, C) that follow what the cache holds."""
        T, past = x.shape[1], 0 if cache is None else int(cache.get_seq_length())
        mask = attention_mask
        if mask is not None and mask.dim() == 2:
            if mask.shape[1] != past + T:
                raise ValueError(f"attention_mask: {mask.shape[1]} tokens wide, not {past} + {T}")
            if position_ids is None:
                position_ids = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, past:]
            mask = None if mask.all() else mask
        slots = torch.arange(past, past + T, device=x.device)
        mask = visible(mask, T, past, x.device)
        length = past + T if mask is None else mask.shape[-1]
        at = slots[None] if position_ids is None else position_ids
        return positions(self.config, at, slots, length), mask

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None, past_key_values: Any = None,
        labels: Tensor | None = None, use_cache: bool | None = None, cache: Any = None,
        inputs_embeds: Tensor | None = None, logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None, return_dict: bool | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Return logits (B, T, V) float32 and, given labels (B, T), the loss: a label is predicted
        from the tokens before it, -100 is left out.

        attention_mask: (B, tokens read so far and now), 0 for padding. The cache is a Cache of
        transformers; `cache` is what its newer versions call past_key_values.
        """
        if kwargs.get("output_attentions"):
            raise ValueError("output_attentions=True: attention weights are never stored here")
        config, cache = self.config, past_key_values if cache is None else cache
        use_cache = config.use_cache and not self.training if use_cache is None else use_cache
        if use_cache and cache is None:
            cache = DynamicCache()
        all_states = output_hidden_states
        all_states = config.output_hidden_states if all_states is None else all_states
        x = self.transformer.wte(input_ids) if inputs_embeds is None else inputs_embeds
        where = *self._where(x, attention_mask, position_ids, cache), cache
        states = self.transformer(x, *where, keep_all=all_states)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits, loss = self.lm_head(states[-1][:, kept]).float(), None
        if labels is not None:
            sizes = {"labels": labels, "vocab_size": config.vocab_size}
            loss = self.loss_function(logits=logits, **sizes, **kwargs)
        found = {"loss": loss, "logits": logits, CACHE: cache if use_cache else None}
        output = CausalLMOutputWithPast(
            **found, hidden_states=tuple(states) if all_states else None
        )
        as_dict = config.return_dict if return_dict is None else return_dict
        return output if as_dict else output.to_tuple()

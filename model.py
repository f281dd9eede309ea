"""GPT-2 in one file with rotary positions: RoPE, RoVE (arXiv 2606.11275), and both under YaRN.

Channel m of a head turns together with channel m + head_dim / 2 ("halves"); position t turns
that pair by the angle t * omega_m, where omega_m = theta^(-2m / head_dim):

    R_t      (x_m, x_m') -> (x_m cos - x_m' sin, x_m' cos + x_m sin)
    scores   (R_i q_i) . (R_j k_j) * mscale^2 / sqrt(head_dim)       in every mode
    rope     y_i = sum_j A_ij v_j
    rove     y_i = R_i^-1 sum_j A_ij R_j v_j                         R^-1 is R with sin negated

YaRN's mscale^2 stands in the softmax scale alone: tables are pure rotations, values never take it.
Sizes: B batch, T tokens, H heads, D head dim, C embedding, V vocabulary.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

PosMode = Literal["rope", "rove", "rope+yarn", "rove+yarn", "learned"]
POS_MODES = get_args(PosMode)
ROTARY_PAIRING = "halves"  # stored in checkpoints; neighbours (2m, 2m + 1) are another model
OVERRIDES = ("dropout", "yarn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_values")
TABLE_ROWS, HEAD_CHUNK = 1024, 1024  # rows by which tables grow; positions with logits at once


@dataclass(frozen=True)
class GPTConfig:
    block_size: int = 1024
    """training context in tokens; longer inputs are accepted"""
    vocab_size: int | None = 50257
    """number of token ids; null takes the data's"""
    n_layer: int = 12
    """transformer blocks"""
    n_head: int = 12
    """attention heads per block"""
    n_embd: int = 768
    """width"""
    dropout: float = 0.0
    """dropout probability, where GPT-2 has it"""
    bias: bool = False
    """biases in linear layers and layer norms"""
    pos_mode: PosMode = "rope"
    """what rotates: q and k (rope), values too (rove), nothing (learned); +yarn: for evaluation"""
    rope_theta: float = 10000.0
    """base of the rotary frequencies"""
    yarn_factor: float = 1.0
    """YaRN's s = target length / block_size; used by the +yarn modes"""
    yarn_beta_fast: float = 32.0
    """pairs that turn more often than this over block_size keep their frequency"""
    yarn_beta_slow: float = 1.0
    """pairs that turn less often than this over block_size are slowed by yarn_factor"""
    yarn_values: Literal["yarn", "orig"] = "yarn"
    """frequencies of the values under rove+yarn: YaRN's or the original ones"""

    def __post_init__(self) -> None:
        slow = f"above 0 and below yarn_beta_fast={self.yarn_beta_fast}"
        pairs = f"n_head={self.n_head} times an even head_dim"
        sizes = ("block_size", "n_layer", "n_head", "n_embd")
        for key, holds, expected in (
            *((key, getattr(self, key) >= 1, "at least 1") for key in sizes),
            ("vocab_size", self.vocab_size is None or self.vocab_size >= 1, "at least 1"),
            ("n_embd", self.n_embd % max(2 * self.n_head, 1) == 0, pairs),
            ("dropout", 0 <= self.dropout < 1, "at least 0, below 1"),
            ("pos_mode", self.pos_mode in POS_MODES, " | ".join(POS_MODES)),
            ("rope_theta", 1 < self.rope_theta < math.inf, "above 1"),
            ("yarn_factor", 1 <= self.yarn_factor < math.inf, "at least 1"),
            ("yarn_beta_slow", 0 < self.yarn_beta_slow < self.yarn_beta_fast, slow),
            ("yarn_values", self.yarn_values in ("yarn", "orig"), "yarn | orig"),
        ):
            _require(holds, key, getattr(self, key), expected)

    def stored(self) -> dict[str, Any]:
        """Return the model_config of a checkpoint: plain types, the rotary pairing included."""
        return {**asdict(self), "rotary_pairing": ROTARY_PAIRING}

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def value_path(self) -> str:
        """rope, rove or learned: the part of pos_mode that belongs to the weights."""
        return self.pos_mode.removesuffix("+yarn")

    @property
    def factor(self) -> float:
        """The YaRN factor in effect: 1 unless the mode is a +yarn one."""
        return self.yarn_factor if self.pos_mode.endswith("+yarn") else 1.0

    @property
    def mscale(self) -> float:
        """YaRN's temperature of q and of k, 0.1 ln(s) + 1; scores take its square."""
        return 0.1 * math.log(self.factor) + 1.0


def _require(holds: bool, key: str, value: object, expected: str) -> None:
    if not holds:
        raise ValueError(f"{key}={value!r}: must be {expected}")


def rotary_frequencies(config: GPTConfig, factor: float) -> Tensor:
    """Return omega (D / 2,) float64, radians per position (factor 1: plain RoPE; learned: zeros).

    YaRN (arXiv 2309.00071) as its released code has it: over the training length, pair m makes
    block_size * omega_m / (2 pi) turns. A ramp, linear in the pair index, leads from the floor of
    the index with beta_fast turns (omega kept) to the ceiling of that with beta_slow turns (omega
    divided by `factor`), both clamped to [0, D - 1].
    """
    D, theta = config.head_dim, config.rope_theta
    pairs = torch.arange(D // 2, dtype=torch.float64, device="cpu")
    omega = theta ** (-2 * pairs / D) * (config.pos_mode != "learned")
    if factor == 1:
        return omega
    betas = (config.yarn_beta_fast, config.yarn_beta_slow)
    lengths = [config.block_size / (2 * math.pi * beta) for beta in betas]
    fast, slow = (D * math.log(length) / (2 * math.log(theta)) for length in lengths)  # pair index
    low, high = max(math.floor(fast), 0), min(math.ceil(slow), D - 1)
    slowed = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)  # 0: kept, 1: omega / factor
    return omega * (1 - slowed) + omega / factor * slowed


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the channel pairs (m, m + D / 2) of x by the tables' angles; negate sin to turn back.

    x: (..., T, D), any float; cos, sin: (T, D / 2). Computes in float32 (float64 if all are).
    """
    exact = x.dtype == cos.dtype == torch.float64
    x1, x2 = x.to(torch.float64 if exact else torch.float32).chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


class Positions(NamedTuple):
    """What attention needs to know of where its T tokens stand."""

    qk: Tensor  # (2, T, D / 2) float32: cos and sin for queries and keys
    v: Tensor  # for values and outputs: the same unless yarn_values is "orig"
    scale: float  # of the scores, YaRN's temperature included
    rows: slice = slice(0)  # [start, stop), for learned positions


class RotaryTables:
    """cos and sin by position, float32 from float64 angles; no module, so no cast reaches them."""

    def __init__(self, config: GPTConfig, device: torch.device) -> None:
        factors = [config.factor, *([1.0] if config.yarn_values == "orig" else [])]  # of qk and v
        self.omegas = [rotary_frequencies(config, factor) for factor in factors]
        self.longest = config.block_size if config.pos_mode == "learned" else math.inf
        self.scale = config.mscale**2 / math.sqrt(config.head_dim)
        self.grow(config.block_size, device)

    @torch.compiler.disable
    @torch.inference_mode(False)
    def grow(self, length: int, device: torch.device) -> None:
        """Hold tables for at least `length` positions on `device`."""
        rows = -(-length // TABLE_ROWS) * TABLE_ROWS
        t = torch.arange(rows, dtype=torch.float64, device="cpu")
        angles = [torch.outer(t, omega) for omega in self.omegas]
        tables = [torch.stack((angle.cos(), angle.sin())).float().to(device) for angle in angles]
        self.qk, self.v = tables[0], tables[-1]

    def at(self, start: int, stop: int, device: torch.device) -> Positions:
        """Return the entries of positions [start, stop)."""
        _require(stop <= self.longest, "length", stop, f"at most {self.longest}, as learned")
        if self.qk.shape[1] < stop or self.qk.device != device:
            self.grow(max(stop, self.qk.shape[1]), device)
        rows, qk = slice(start, stop), self.qk[:, start:stop]
        return Positions(qk, qk if self.v is self.qk else self.v[:, rows], self.scale, rows)


class KVCache:
    """Rotated keys and values of the tokens read so far: (n_layer, 2, B, H, max_tokens, D)."""

    def __init__(self, config: GPTConfig, max_tokens: int) -> None:
        self.config, self.max_tokens, self.length = config, max_tokens, 0
        self.kv: Tensor | None = None  # made with the first keys' sizes, dtype and device

    def append(self, layer: int, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v (B, H, T, D) of a layer; return all its (2, B, H, length + T, D)."""
        B, H, T, D = k.shape
        if self.kv is None:
            self.kv = k.new_empty(self.config.n_layer, 2, B, H, self.max_tokens, D)
        stop = self.length + T
        assert stop <= self.max_tokens, "the cache is full"
        self.kv[layer, :, :, :, self.length : stop] = torch.stack((k, v))
        return self.kv[layer, :, :, :, :stop]


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.layer, self.n_head, self.drop = layer, config.n_head, nn.Dropout(config.dropout)
        self.rotates_values = config.value_path == "rove"

    def forward(self, x: Tensor, pos: Positions, cache: KVCache | None) -> Tensor:
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)
        n = 3 if self.rotates_values and pos.v is pos.qk else 2  # q, k and perhaps v, in one pass
        q, k, v = [*torch.unbind(rotate(qkv[:n], *pos.qk)), qkv[2]][:3]  # each (B, H, T, D)
        if self.rotates_values and n == 2:
            v = rotate(v, *pos.v)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        past, mask = 0 if cache is None else cache.length, None
        p = self.drop.p if self.training else 0.0
        if past > 0 and T > 1:  # is_causal would align the mask to the top left
            mask = torch.ones(T, past + T, dtype=torch.bool, device=x.device).tril(past)
        y = F.scaled_dot_product_attention(q, k, v, mask, p, is_causal=past == 0, scale=pos.scale)
        if self.rotates_values:
            cos, sin = pos.v
            y = rotate(y, cos, -sin)
        return self.drop(self.c_proj(y.transpose(1, 2).reshape(B, T, C)))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")))


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, pos: Positions, cache: KVCache | None) -> Tensor:
        x = x + self.attn(self.ln_1(x), pos, cache)
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        assert config.vocab_size is not None, "vocab_size is to be taken from the data first"
        self.wte = nn.Embedding(-(-config.vocab_size // 64) * 64, config.n_embd)
        learned = config.pos_mode == "learned"
        self.wpe = nn.Embedding(config.block_size, config.n_embd) if learned else None
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, idx: Tensor, pos: Positions, cache: KVCache | None) -> Tensor:
        x = self.wte(idx) if self.wpe is None else self.wte(idx) + self.wpe.weight[pos.rows]
        x = self.drop(x)
        for block in self.h:
            x = block(x, pos, cache)
        return self.ln_f(x)


class GPT(nn.Module):
    """The model; its head is wte. Rows of wte beyond vocab_size (padding to 64) are never seen."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config, self.transformer = config, Transformer(config)
        self.tables = RotaryTables(config, self.transformer.wte.weight.device)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                shrink = math.sqrt(2 * config.n_layer) if name.endswith("c_proj.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 / shrink)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def _apply(self, fn: Any, recurse: bool = True) -> "GPT":  # of .to() and .bfloat16()
        super()._apply(fn, recurse)
        self.tables.grow(self.tables.qk.shape[1], self.transformer.wte.weight.device)
        return self

    def hidden(self, idx: Tensor, pos_offset: int = 0, cache: KVCache | None = None) -> Tensor:
        """Return final hidden states (B, T, C) of idx (B, T), at pos_offset or after the cache."""
        assert cache is None or cache.config == self.config, "filled under another config"
        T, start = idx.shape[1], pos_offset if cache is None else cache.length
        x = self.transformer(idx, self.tables.at(start, start + T, idx.device), cache)
        if cache is not None:
            cache.length += T
        return x

    def head(self, x: Tensor) -> Tensor:
        """Return logits (..., V) float32 of hidden states x (..., C)."""
        return F.linear(x, self.transformer.wte.weight)[..., : self.config.vocab_size].float()

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, pos_offset: int = 0
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return (logits (B, T, V), None), or given targets (B, T) int64 (None, loss): the mean
        cross-entropy in nats per token, a float32 scalar. Any T is accepted."""
        x = self.hidden(idx, pos_offset)
        if targets is None:
            return self.head(x), None
        return None, F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def token_nll(self, idx: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of every token: (B, T) float32 nats, no graph, memory bounded in T."""
        x, wanted = self.hidden(idx).flatten(0, 1), targets.flatten()
        chunks = zip(x.split(HEAD_CHUNK), wanted.split(HEAD_CHUNK), strict=True)
        losses = [F.cross_entropy(self.head(part), t, reduction="none") for part, t in chunks]
        return torch.cat(losses).view(targets.shape)

    @torch.no_grad()
    def score(self, idx: Tensor, targets: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return nll (nats, float32), is_argmax (bool) and rank (int64, ids with a larger logit) of
        the targets, each (B, T), where mask (B, T) is True; elsewhere 0, False and -1."""
        x, wanted = self.hidden(idx)[mask], targets[mask]  # (N, C), (N,)
        parts = []
        for part, t in zip(x.split(HEAD_CHUNK), wanted.split(HEAD_CHUNK), strict=True):
            logits = self.head(part)
            above = (logits > logits.gather(1, t[:, None])).sum(1)
            loss = F.cross_entropy(logits, t, reduction="none")
            parts.append((loss, logits.argmax(1) == t, above))
        nll, top, rank = (torch.cat(column) for column in zip(*parts, strict=True))
        zero = torch.zeros_like(targets)
        out = zero.float().masked_scatter(mask, nll), zero.bool().masked_scatter(mask, top)
        return *out, (zero - 1).masked_scatter(mask, rank)

    def set_yarn_factor(self, factor: float) -> None:
        """Set yarn_factor >= 1; only +yarn modes change. Caches filled before are refused."""
        self.config = replace(self.config, yarn_factor=float(factor))
        self.tables = RotaryTables(self.config, self.transformer.wte.weight.device)

    @torch.no_grad()
    def generate(
        self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None,
        top_p: float | None = None, stop_ids: Sequence[int] = (),
        prompt_lengths: Sequence[int] | Tensor | None = None, seed: int | None = None,
        max_context: int | Literal["auto"] | None = "auto",
    ) -> Tensor:  # fmt: skip
        """Continue prompts idx (B, T) int64; return prompt and new ids, (B, up to T + new) int64.

        temperature 0: greedy; top_k None or 0, top_p None or 1: off. New ids follow the first
        prompt_lengths[b] ids of row b (T) up to one of stop_ids; shorter rows end in stop_ids[0] or
        0. At most max_context tokens are attended ("auto": block_size * yarn_factor; None: any): a
        longer prompt loses its start, a full window's last half is read anew from 0; both warn."""
        B, T = idx.shape
        lengths = [T] * B if prompt_lengths is None else [int(n) for n in prompt_lengths]
        fit = len(lengths) == B and all(1 <= n <= T for n in lengths)
        _require(fit, "prompt_lengths", lengths, f"{B} numbers from 1 to {T}")
        _require(max_new_tokens >= 0, "max_new_tokens", max_new_tokens, "at least 0")
        _require(0 <= temperature < math.inf, "temperature", temperature, "0 (greedy) or more")
        _require(top_k is None or top_k >= 0, "top_k", top_k, "0 (off) or more")
        _require(top_p is None or 0 < top_p <= 1, "top_p", top_p, "above 0, at most 1")
        longest = max(lengths) + max_new_tokens
        auto = int(self.config.block_size * self.config.yarn_factor)
        window = auto if max_context == "auto" else longest if max_context is None else max_context
        _require(max_context is None or window >= 2, "max_context", max_context, "at least 2")
        if longest > window + 1:
            rule = f"a longer prompt is cropped; when full, the last {window // 2} are read anew"
            warnings.warn(f"text outgrows the window of {window} tokens: {rule}", stacklevel=3)
        rng = None if seed is None else torch.Generator(idx.device).manual_seed(seed)
        draw = partial(sample_ids, temperature=temperature, top_k=top_k, top_p=top_p, rng=rng)
        fill = stop_ids[0] if stop_ids else 0
        cuts = [max(0, n - window) for n in lengths]
        prompts = [row[cut:n] for row, cut, n in zip(idx, cuts, lengths, strict=True)]
        tokens = F.pad(pad_sequence(prompts, True, fill), (0, max_new_tokens), value=fill)
        starts = torch.tensor([len(prompt) for prompt in prompts], device=idx.device)
        stops = torch.tensor(stop_ids, dtype=idx.dtype, device=idx.device)
        training = self.training
        try:
            self.eval()
            width = self._decode(tokens, starts, starts + max_new_tokens, stops, window, draw)
        finally:
            self.train(training)
        rows = [torch.cat((p[:c], t)) for p, c, t in zip(idx, cuts, tokens[:, :width], strict=True)]
        return pad_sequence(rows, True, fill)

    def _decode(
        self, tokens: Tensor, starts: Tensor, ends: Tensor, stops: Tensor, window: int, draw: Any
    ) -> int:
        """Fill tokens (B, N) in place from starts to ends, each (B,); return the columns in use."""
        running, room = torch.ones_like(starts, dtype=torch.bool), min(window, tokens.shape[1])
        begin, cache = 0, KVCache(self.config, room)
        for t in range(int(starts.min()), tokens.shape[1]):  # in step; in its prompt a row waits
            if cache.length == window:
                begin, cache = t - window // 2, KVCache(self.config, room)
            new = draw(self.head(self.hidden(tokens[:, begin:t], cache=cache)[:, -1]))
            begin = t  # of the next pass: the one token that is written now
            writes = running & (starts <= t) & (t < ends)
            tokens[:, t] = torch.where(writes, new, tokens[:, t])
            if len(stops):
                running &= ~(writes & torch.isin(new, stops))
                if not (running & (t + 1 < ends)).any():
                    return t + 1
        return tokens.shape[1]

    @classmethod
    def from_checkpoint(
        cls, path: Any, pos_mode: PosMode | None = None, allow_retrofit: bool = False, **yarn: Any
    ) -> "GPT":
        """Load path (a run folder, a checkpoint file, or what one held), in fp32 on the CPU.

        pos_mode may add or drop `+yarn`; other changes than OVERRIDES (None: as stored) are
        refused with a ValueError, and rope to rove or back without allow_retrofit."""
        from rove.checkpoint import load_checkpoint

        checkpoint = path if isinstance(path, dict) else load_checkpoint(path, mmap=True)
        file = checkpoint.get("file", "checkpoint")
        for key, value in yarn.items():
            _require(key in OVERRIDES, key, value, f"as trained; free at load: {OVERRIDES}")
        stored = dict(checkpoint["model_config"])
        keys = sorted(set(stored) ^ set(GPTConfig().stored()))
        _require(not keys, f"{file}: model_config", keys, "all that is stored and no more")
        pairing = stored.pop("rotary_pairing")
        _require(pairing == ROTARY_PAIRING, f"{file}: rotary_pairing", pairing, ROTARY_PAIRING)
        changes = {key: value for key, value in yarn.items() if value is not None}
        try:
            trained = GPTConfig(**stored)
            config = replace(trained, pos_mode=pos_mode or trained.pos_mode, **changes)
            kept = allow_retrofit or config.value_path == trained.value_path
            wanted = f"as trained as {trained.pos_mode!r}, +yarn or not; --allow_retrofit hurts"
            _require(kept, "pos_mode", pos_mode, wanted)
            model = cls(config).eval()
            model.load_state_dict(checkpoint["model"], strict=True)
        except (TypeError, RuntimeError) as error:
            raise ValueError(f"{file}: weights do not fit: {error}"[:300]) from error
        return model


def sample_ids(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, rng: Any
) -> Tensor:
    """Draw one id a row from logits (B, V): of the top_k, the fewest that reach mass top_p."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    if top_k and top_k < logits.shape[-1]:
        kept, ids = logits.topk(top_k)
        logits = torch.full_like(logits, -math.inf).scatter(-1, ids, kept)
    probs = logits.softmax(-1)
    if top_p is not None and top_p < 1:
        ordered, ids = probs.sort(dim=-1, descending=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p
        probs = torch.zeros_like(probs).scatter(-1, ids, ordered.masked_fill(beyond, 0.0))
    return torch.multinomial(probs, 1, generator=rng)[:, 0]

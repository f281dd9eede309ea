"""`eval.py structure` from start to end: one window, in float64, on the CPU."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rove.evals.core.run import one_factor
from rove.evals.perplexity.run import open_data
from rove.evals.results import Partial, result_path
from rove.evals.session import Session
from rove.evals.structure import mixer
from rove.evals.structure.picture import draw
from rove.files import write_atomic
from rove.report.plots import why_no_plots

CPU = torch.device("cpu")
LARGEST = 1 << 27  # entries of the explicit mixer: 1 GiB, of which three or four are held at once
KEPT = 16  # operator-Schmidt values in a result
SHOWN = (0, 1, 4, 16)  # offsets that are printed
UNUSED = {"device": ("auto", "cpu"), "dtype": ("float32",), "batch_size": (1,)}


class Layer(NamedTuple):
    """The attention of a layer on one window: weights by head, what it read and what it gave."""

    att: Tensor  # (H, T, T)
    w_v: Tensor  # (H, D, C)
    b_v: Tensor  # (H, D), 0 without biases
    w_o: Tensor  # (H, C, D)
    turns: Tensor  # (T, D, D) of the values: R_-n, 1 unless they are rotated
    x: Tensor  # (T, C), the input of c_attn
    y: Tensor  # (H, T, D), the input of c_proj by head


def run(e: Session) -> None:
    """Measure one window and write the result and its picture."""
    s, val = e.settings, open_data(e, e.settings.data)
    check_settings(s, e.trained, val.n_tokens)
    mode, values = e.only_variant()
    path = result_path(s.out, e.run, "structure", mode, values)
    if path.suffix == ".png":
        raise ValueError(f"--out {path}: names the JSON; the picture gets .png by itself")
    picture = path.with_suffix(".png")
    if picture.exists() and not path.exists():
        raise ValueError(f"{picture}: is none of a result's; give another --out, or move it away")
    factor = one_factor(e, mode, s.length, e.trained["block_size"])
    if unused := [key for key, usual in UNUSED.items() if getattr(s, key) not in usual]:
        e.say(f"warning: {', '.join(unused)}: no effect, as this is float64 on the CPU")
    e.open(mode, values)
    setting: dict[str, Any] = {"layer": s.layer, "head": s.head, "length": s.length}
    setting |= {"data": val.sha256, "dtype": "float64", **e.set_factor(factor)}
    e.say(f"structure: {e.describe()}; {s.length} tokens, factor {setting['yarn_factor']:g}")
    layers = look_inside(e.model, torch.from_numpy(val.read(0, s.length)))
    blocks, found = measure(layers, s.layer, s.head)
    _say(e, found, s.layer, s.head)
    partial = Partial(path, e.identity("structure", **setting), e.world)
    partial.finish(path, e.common("structure") | setting | found)
    e.say(f"wrote {path}")
    _draw(e, picture, blocks, f"{mode}, layer {s.layer}, head {s.head}")


def check_settings(s: Any, trained: dict[str, Any], n_tokens: int) -> None:
    """Raise ValueError for a layer, a head or a length that there is not or that is too much."""
    C = trained["n_embd"]
    most = min(n_tokens, math.isqrt(LARGEST * trained["n_head"] // C**2))
    for key, least, last in (
        ("layer", 0, trained["n_layer"] - 1),
        ("head", 0, trained["n_head"] - 1),
        ("length", 1, most),
    ):
        if not least <= getattr(s, key) <= last:
            why = ": text and memory for the explicit mixer end there" if key == "length" else ""
            raise ValueError(f"--{key} {getattr(s, key)}: must be {least} to {last}{why}")


@torch.no_grad()
def look_inside(model: Any, ids: Tensor) -> list[Layer]:
    """Return the layers of a model, which becomes float64 with tables of ids' length; ids: (T,)."""
    model.to(CPU).double()
    exact_tables(model.tables, len(ids))
    seen: list[Tensor] = []  # x and y of each layer in turn, (T, C)
    modules = [part for b in model.transformer.h for part in (b.attn.c_attn, b.attn.c_proj)]
    hooks = [m.register_forward_pre_hook(lambda _, args: seen.append(args[0][0])) for m in modules]
    try:
        model.hidden(ids[None])
    finally:
        for hook in hooks:
            hook.remove()
    return [_layer(model, n, *seen[2 * n : 2 * n + 2]) for n in range(len(model.transformer.h))]


def exact_tables(tables: Any, length: int) -> None:
    """Put cos and sin of `length` positions as float64 in the place of a model's float32 ones."""
    t = torch.arange(length, dtype=torch.float64)
    angles = [torch.outer(t, omega) for omega in tables.omegas]
    exact = [torch.stack((angle.cos(), angle.sin())) for angle in angles]
    qk, v, *_ = tables.at(0, length, CPU)
    for found, own in ((qk, exact[0]), (v, exact[-1])):
        assert torch.allclose(found.double(), own, rtol=0, atol=1e-6), "not the model's angles"
    tables.qk, tables.v = exact[0], exact[-1]


def _layer(model: Any, number: int, x: Tensor, y: Tensor) -> Layer:
    """Return a layer with A from q and k at relative offsets, by a route of its own."""
    config, attn = model.config, model.transformer.h[number].attn
    T, C, H, D = *x.shape, config.n_head, config.head_dim
    pos = model.tables.at(0, T, CPU)
    weight, bias = attn.c_attn.weight.view(3, H, D, C), torch.zeros(3, H, D, dtype=x.dtype)
    if attn.c_attn.bias is not None:
        bias = attn.c_attn.bias.view(3, H, D)
    q, k = (torch.einsum("hdc,tc->htd", weight[n], x) + bias[n, :, None] for n in (0, 1))
    scale = config.mscale**2 / math.sqrt(D)
    att = mixer.attention(q, k, mixer.make_turns(pos.qk), scale)
    turns = torch.eye(D, dtype=x.dtype).expand(T, D, D)
    if config.value_path == "rove":
        turns = mixer.make_turns(pos.v)
    w_o = attn.c_proj.weight.view(C, H, D).transpose(0, 1)
    return Layer(att, weight[2], bias[2], w_o, turns, x, y.view(T, H, D).transpose(0, 1))


@torch.no_grad()
def measure(layers: list[Layer], layer: int, head: int) -> tuple[Tensor, dict[str, Any]]:
    """Return the explicit mixer of a head as blocks (T, T, D, C), and what to write of all."""
    own = layers[layer]
    blocks = mixer.make_blocks(own.att[head], own.turns @ own.w_v[head])
    y = mixer.apply(blocks, own.x, own.turns @ own.b_v[head], own.att[head])
    values = mixer.schmidt_values(blocks)
    found: dict[str, Any] = {
        "max_deviation": float((y - own.y[head]).abs().max()),
        "max_output": float(own.y[head].abs().max()),
        "schmidt_rank": mixer.schmidt_rank(values),
        "singular_values": values[:KEPT].tolist(),
    }
    by_layer: dict[str, list[Any]] = {
        key: [] for key in ("attention_mean", "cosine", "kernel_norm", "kernel_norm_unrotated")
    }
    for at in layers:
        mean, maps = mixer.mean_by_offset(at.att), (at.w_o, at.w_v)
        still = at.turns[:1].expand_as(at.turns)  # R_0 = 1 at every offset
        for key, x in (
            ("attention_mean", mean),
            ("cosine", mixer.cosines(*maps, at.turns)),
            ("kernel_norm", mixer.kernel_norms(*maps, at.turns, mean)),
            ("kernel_norm_unrotated", mixer.kernel_norms(*maps, still, mean)),
        ):
            by_layer[key].append(x.tolist())
    return blocks, found | by_layer


def _say(e: Session, found: dict[str, Any], layer: int, head: int) -> None:
    deviation = f"{found['max_deviation']:.1e} of outputs up to {found['max_output']:.2g}"
    e.say(f"  layer {layer}, head {head}: explicit mixer and model differ by {deviation}; "
          f"operator-Schmidt rank {found['schmidt_rank']}")  # fmt: skip
    groups = {
        "cosine, mean of heads": [torch.tensor(x).mean(0).tolist() for x in found["cosine"]],
        "norm of the kernel": found["kernel_norm"],
        "the same with R = 1": found["kernel_norm_unrotated"],
    }
    offsets = [n for n in SHOWN if n < len(found["kernel_norm"][0])]
    e.say("  layer " + " | ".join(f"{name:>{9 * len(offsets)}s}" for name in groups))
    e.say(" offset " + " | ".join("".join(f"{-n:9d}" for n in offsets) for _ in groups))
    for number, rows in enumerate(zip(*groups.values(), strict=True)):
        shown = ("".join(f"{row[n]:9.3g}" for n in offsets) for row in rows)
        e.say(f"  {number:5d} {' | '.join(shown)}")


def _draw(e: Session, path: Path, blocks: Tensor, title: str) -> None:
    if why := why_no_plots():
        e.say(f"notice: no picture: {why}")
    elif e.world.is_main:
        png = draw(blocks, f"Mixer of {title}")
        write_atomic(path, lambda file: file.write(png))
        e.say(f"wrote {path}")

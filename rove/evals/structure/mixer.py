"""The mixer of an attention head, as one matrix and by offset.

With its weights A held fixed, a head maps x (T, C) to y_i = sum_j A_ij R_(j-i) W_V x_j. On the
flattened sequence that is one matrix with blocks A_ij R_(j-i) W_V: under rope, where R is 1, the
Kronecker product of A and W_V; under rove a convolution with the kernels R_delta W_V, gated by A
(arXiv 2606.11275). Offsets delta = j - i are 0 or less: row n of a tensor belongs to delta = -n.

Tensors are float64: att (H, T, T) or of one head (T, T), turns (T, D, D) the matrices R_-n,
w_v (H, D, C), w_o (H, C, D) the head's columns of c_proj. Channel m turns with channel m + D / 2.
"""

import math

import torch
from torch import Tensor

RELATIVE = 1e-9  # of the largest: singular values below are rounding
TINY = torch.finfo(torch.float64).tiny  # keeps 0 / 0 of maps that are 0 from being NaN


def make_turns(table: Tensor) -> Tensor:
    """Return R_-n, (T, D, D), of cos and sin of the angles n * omega, (2, T, D / 2)."""
    cos, sin = table.diag_embed()
    return torch.cat((torch.cat((cos, sin), -1), torch.cat((-sin, cos), -1)), -2)


def attention(q: Tensor, k: Tensor, turns: Tensor, scale: float) -> Tensor:
    """Return A (H, T, T), the softmax over j <= i of scale * q_i . R_(j-i) k_j; q, k: (H, T, D)."""
    i = torch.arange(q.shape[1])[:, None]
    j = i.T
    turned = torch.einsum("nde,hje->hnjd", turns, k)[:, (i - j).clamp(min=0), j]  # (H, T, T, D)
    scores = scale * torch.einsum("hid,hijd->hij", q, turned)
    return scores.masked_fill(i < j, -math.inf).softmax(-1)


def make_blocks(att: Tensor, kernels: Tensor) -> Tensor:
    """Return A_ij psi_(j-i), (T, T, D, C), 0 for j > i; att: (T, T), kernels psi: (T, D, C)."""
    blocks = att.new_zeros(*att.shape, *kernels.shape[1:])
    for i, row in enumerate(att):
        blocks[i, : i + 1] = row[: i + 1, None, None] * kernels[: i + 1].flip(0)
    return blocks


def as_matrix(blocks: Tensor) -> Tensor:
    """Return blocks (T, T, D, C) as the matrix (T * D, T * C) that acts on a flattened sequence."""
    return blocks.transpose(1, 2).flatten(2).flatten(0, 1)


def apply(blocks: Tensor, x: Tensor, turned_bias: Tensor, att: Tensor) -> Tensor:
    """Return what a head gives (T, D) for x (T, C); turned_bias: R_-n b_V, (T, D)."""
    y = (as_matrix(blocks) @ x.flatten()).view(len(x), -1)
    return y + make_blocks(att, turned_bias[..., None]).sum(1)[..., 0]


def schmidt_values(blocks: Tensor) -> Tensor:
    """Return the operator-Schmidt values, descending, divided by the largest.

    They are the singular values of the matrix whose row (i, j) is the flattened block, (T * T,
    D * C); as many as are not 0 are the Kronecker products needed to sum to the mixer.
    """
    past = torch.ones(blocks.shape[:2], dtype=torch.bool).tril()  # the other rows are 0
    values = torch.linalg.svdvals(blocks[past].flatten(1))
    return values / values[0].clamp(min=TINY)


def schmidt_rank(values: Tensor) -> int:
    """Return how many of the operator-Schmidt values are more than rounding: at most T and D."""
    return int((values > RELATIVE).sum())


def mean_by_offset(att: Tensor) -> Tensor:
    """Return the mean of A_(i, i-n) over i, (H, T)."""
    T = att.shape[-1]
    return torch.stack([att.diagonal(-n, -2, -1).mean(-1) for n in range(T)], dim=-1)


def cosines(w_o: Tensor, w_v: Tensor, turns: Tensor) -> Tensor:
    """Return the Frobenius cosine of W_O R_-n W_V and W_O W_V, (H, T); 0 where a map is 0.

    Of these maps (C, C) only the Gram matrices (D, D) enter: <W_O R W_V, W_O S W_V> is the trace
    of R^T (W_O^T W_O) S (W_V W_V^T), the sum over the entries of R times those of what follows.
    """
    of_o, of_v = w_o.mT @ w_o, w_v @ w_v.mT  # (H, D, D)
    turns = turns[:, None]  # (T, 1, D, D)
    crossed = (turns * (of_o @ of_v)).sum((-2, -1))
    squared = (turns * (of_o @ turns @ of_v)).sum((-2, -1))  # entry 0: of R_0 = 1
    return (crossed / (squared * squared[0]).clamp(min=TINY).sqrt()).T


def kernel_norms(w_o: Tensor, w_v: Tensor, turns: Tensor, mean: Tensor) -> Tensor:
    """Return the Frobenius norm of sum_h mean_hn W_O^h R_-n W_V^h, (T,); mean: (H, T).

    As in `cosines`, over all pairs of heads: <W_O R W_V, W_O' R W_V'> is the trace of
    R^T (W_O^T W_O') R (W_V' W_V^T).
    """
    of_o = torch.einsum("hca,gcb->hgab", w_o, w_o)
    of_v = torch.einsum("hac,gbc->hgab", w_v, w_v)
    squares = []
    for turn, a in zip(turns, mean.T, strict=True):
        products = ((turn.mT @ of_o @ turn) * of_v).sum((-2, -1))  # (H, H)
        squares.append(a @ products @ a)
    return torch.stack(squares).clamp(min=0).sqrt()

"""A mixer as a heat map: one block for each pair of positions."""

import io

import numpy as np
from torch import Tensor

from rove.evals.structure.mixer import as_matrix
from rove.report.plots import STYLE

TOKENS, OUTPUTS, INPUTS = 8, 16, 32  # shown at most, the latter two of each block


def draw(blocks: Tensor, title: str) -> bytes:
    """Return a PNG of the first blocks (T, T, D, C): red above 0, blue below, borders drawn.

    Of wide models the first inputs and every nth output, so that all frequencies are there.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    D, C = blocks.shape[2:]
    step = max(1, D // OUTPUTS)
    shown = blocks[:TOKENS, :TOKENS, ::step, :INPUTS]
    T, _, height, width = shown.shape
    values, names = as_matrix(shown).numpy(), [str(n) for n in range(T)]
    sizes = np.abs(values[values != 0])
    limit = float(np.quantile(sizes, 0.9)) if sizes.size else 1.0
    with rc_context(STYLE):
        figure = Figure(figsize=(6.4, 5.6), layout="constrained")
        ax = figure.subplots()
        image = ax.imshow(values, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
        for n in range(1, T):
            ax.axhline(n * height - 0.5, color="#666666", linewidth=0.6)
            ax.axvline(n * width - 0.5, color="#666666", linewidth=0.6)
        ax.set_xticks([(n + 0.5) * width - 0.5 for n in range(T)], labels=names)
        ax.set_yticks([(n + 0.5) * height - 0.5 for n in range(T)], labels=names)
        ax.grid(False)
        ax.set(title=title, xlabel=f"position j, {width} of {C} inputs each")
        ax.set_ylabel(f"position i, {height} of {D} outputs each")
        figure.colorbar(image, ax=ax, extend="both", label="weight; colours end at the 90 % mark")
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=150, metadata={"Software": "rove eval.py"})
    return file.getvalue()

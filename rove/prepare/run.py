"""The work itself: what a source has goes through the tokenizing processes into both splits."""

import glob
import os
import shlex
import time
from contextlib import closing
from typing import Any

import numpy as np

from rove.prepare.output import Output
from rove.prepare.pool import encode_units
from rove.prepare.sources import Source
from rove.prepare.units import SPLITS, describe_invalid
from rove.tokenizer import Tokenizer

SAVE_INTERVAL_S = 20.0


def write_shards(
    output: Output,
    source: Source,
    tokenizer: Tokenizer,
    num_workers: int,
    val_fraction: float,
    n_expected: int,
) -> dict[str, Any]:
    """Tokenize what the source still has, complete all shards, return what the manifest says.

    n_expected: tokens, for the progress bar; 0 when unknown. Raises ValueError when a split holds
    nothing.
    """
    from tqdm import tqdm

    names, val = sorted(source.sizes), output.splits["val"]
    fraction = 0.0 if source.n_val_tokens else val_fraction
    units = source.units(output.position)
    encoded, saved = encode_units(tokenizer, units, fraction, num_workers), time.monotonic()
    bar = tqdm(total=n_expected or None, initial=output.tokens, unit="tok", unit_scale=True,
               disable=None)  # fmt: skip
    with closing(encoded), bar:
        for position, unit in encoded:
            n_complete = output.n_complete
            for split in SPLITS:
                n_head = max(0, source.n_val_tokens - val.tokens)
                head, rest = np.split(unit.ids[split], [n_head])
                val.write(head)
                output.splits[split].write(rest)
                bar.update(unit.ids[split].size)
            if val.tokens == source.n_val_tokens > 0:
                val.finish()
            output.note_invalid(unit.invalid)
            if position[1] == 0 and source.downloads is not None:
                output.note_end(names[position[0] - 1])
            is_late = time.monotonic() - saved > SAVE_INTERVAL_S
            if is_late or output.n_complete > n_complete:
                output.save(position)
                saved = time.monotonic()
                _free(source, output.take_complete())
    if not output.tokens:
        why = describe_invalid(output.invalid) or "no rows"
        other = "--dataset" if source.dataset != "files" else "--files"
        raise ValueError(f"{source.single or source.dataset}: no text ({why}); give other {other}")
    output.finish(_why_empty(source, val_fraction))
    _free(source, names)
    keys = ("name", "vocab_size", "sha256")
    return {
        "dataset": source.dataset,
        "revision": source.revision,
        "tokenizer": {key: getattr(tokenizer, key) for key in keys},
        "eot_id": tokenizer.eot_id,
        "documents": {split: output.splits[split].documents for split in SPLITS},
        "invalid_rows": output.invalid,
        "shards": [entry for split in SPLITS for entry in output.splits[split].entries],
    }


def _why_empty(source: Source, val_fraction: float) -> str:
    """Return why a split can be empty and what helps, the end of a message."""
    if source.n_val_tokens:
        return f"the first {source.n_val_tokens:,} tokens are for val); give more files"
    if source.single.endswith(".txt"):
        parts = os.path.join(os.path.dirname(source.single), "part_")
        cut = shlex.join(["split", "-nl/20", "--additional-suffix=.txt", source.single, parts])
        files = shlex.quote(f"{glob.escape(parts)}*.txt")
        return f"a .txt file is one document); cut it, `{cut}`, and give --files {files}"
    return f"--val_fraction {val_fraction}); give more documents or another --val_fraction"


def _free(source: Source, names: list[str]) -> None:
    if source.downloads is not None:
        for name in names:
            source.downloads.free(name)

"""A split of the long validation documents alone: what perplexity at 16k tokens is measured on."""

import shutil
from pathlib import Path

import numpy as np

from rove import shards
from rove.files import write_json
from rove.prepare.checks import document_lengths, document_starts, tokenizer_of
from rove.prepare.writer import SplitWriter


def write_long_docs(folder: Path, min_tokens: int, shard_tokens: int) -> None:
    """Write the validation documents of at least min_tokens tokens to FOLDER/long_docs_MIN.

    The new folder has the split `val`, in the order of the old one; it appears when it is whole.
    """
    data = shards.open_split(folder, "val")
    target = folder / f"long_docs_{min_tokens}"
    settings = {"long_docs": min_tokens, "of": data.sha256}
    if target.exists():
        manifest = shards.read_manifest(target)
        if manifest is None or manifest.get("settings") != settings:
            raise ValueError(f"{target}: made from other documents; remove it first")
        print(f"{target}: already there")
        return
    starts, lengths = document_starts(data), document_lengths(data)
    if is_cut_at_end(folder):
        starts, lengths = starts[:-1], lengths[:-1]
    chosen = np.flatnonzero(lengths >= min_tokens)
    if not chosen.size:
        longest = f"the longest has {lengths.max(initial=0):,}"
        print(f"notice: no validation document has {min_tokens:,} tokens ({longest})")
        return
    temporary = target.with_name(f"{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    match = shards.SHARD_NAME.fullmatch(data.files[0].name)
    assert match is not None
    tokenizer = tokenizer_of(data)
    sizes = None if tokenizer is None else tokenizer.token_bytes()
    eot_id = data.tokenizer["eot_id"]
    writer = SplitWriter(temporary, match["name"], "val", shard_tokens, eot_id, sizes)
    for start, length in zip(starts[chosen].tolist(), lengths[chosen].tolist(), strict=True):
        writer.write(data.read(start, start + length + 1).astype(np.uint16))
    writer.finish()
    keys = ("name", "vocab_size", "sha256")
    write_json(
        temporary / shards.MANIFEST,
        {
            "dataset": f"documents of {min_tokens} tokens or more",
            "tokenizer": {key: data.tokenizer[key] for key in keys},
            "eot_id": eot_id,
            "documents": {"val": writer.documents},
            "shards": writer.entries,
            "settings": settings,
        },
    )
    temporary.replace(target)
    print(f"{target}: {chosen.size:,} of {lengths.size:,} documents, {writer.tokens:,} tokens")


def is_cut_at_end(folder: Path) -> bool:
    """Say whether the last validation document goes on in the training split."""
    settings = (shards.read_manifest(folder) or {}).get("settings", {})
    return settings.get("source") in ("fineweb-edu", "pretokenized")

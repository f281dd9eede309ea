"""Shard files, what is refused of them, and the order in which training reads their windows."""

import json

import numpy as np
import pytest
from helpers import shard_bytes

from rove import shards
from rove.shards import BatchOrder, open_split, read_shard, window_order

SIZES = (997, 1, 1511, 64, 403)  # odd, one token, several windows, exactly one window
T = 32


def write(folder, sizes=SIZES, split="train", top=50257, name="x"):
    rng = np.random.default_rng(7)
    parts = [rng.integers(0, top, size) for size in sizes]
    for number, part in enumerate(parts):
        (folder / f"{name}_{split}_{number:06d}.bin").write_bytes(shard_bytes(part))
    return np.concatenate(parts)


def write_manifest(folder, vocab_size=50257, **changes):
    entries = [
        {"file": p.name, "split": "train", "tokens": read_shard(p).size, **changes}
        for p in sorted(folder.glob("*.bin"))
    ]
    tokenizer = {"name": "gpt2", "vocab_size": vocab_size, "sha256": "0"}
    manifest = {"tokenizer": tokenizer, "eot_id": 0, "shards": entries}
    (folder / shards.MANIFEST).write_text(json.dumps(manifest))


def test_shard_is_header_and_little_endian_uint16(tmp_path):
    ids = np.array([0, 1, 258, 65535])
    data = shard_bytes(ids)
    assert data[:12] == b"\x88\xd8\x34\x01\x01\0\0\0\x04\0\0\0" and not any(data[12:1024])
    assert data[1024:] == b"\0\0\x01\0\x02\x01\xff\xff"
    (tmp_path / "x.bin").write_bytes(data)
    assert (read_shard(tmp_path / "x.bin") == ids).all()


def test_windows_cross_shard_boundaries(tmp_path):
    tokens = write(tmp_path)
    data = open_split(tmp_path, "train")
    assert data.n_tokens == sum(SIZES) and data.n_windows(T) == (sum(SIZES) - 1) // T
    windows = data.windows(range(data.n_windows(T)), T)
    assert windows.dtype == np.int64 and windows.shape == (data.n_windows(T), T + 1)
    for i, window in enumerate(windows):
        assert (window == tokens[i * T : i * T + T + 1]).all()
    assert (data.read(990, 2600) == tokens[990:2600]).all()  # four shards at once


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_ranks_share_an_epoch_without_gap_or_repeat(tmp_path, world_size):
    write(tmp_path)
    data = open_split(tmp_path, "train")
    n_windows, per_step = data.n_windows(T), 16
    assert 0 <= data.n_tokens - 1 - n_windows * T < T  # the unused tail
    order, single, share = BatchOrder(n_windows, 5), [], per_step // world_size
    for step in range(-(-n_windows // per_step)):
        start = step * per_step
        ranks = [
            list(order.indices(start + r * share, start + (r + 1) * share))
            for r in range(world_size)
        ]
        alone = list(BatchOrder(n_windows, 5).indices(start, start + per_step))
        assert sum(ranks, []) == alone
        single += alone
    assert sorted(single[:n_windows]) == list(range(n_windows))


def test_order_depends_on_seed_and_epoch_alone():
    first = window_order(1000, 1, 0)
    window_order.cache_clear()
    assert (first == window_order(1000, 1, 0)).all()
    assert (first != window_order(1000, 2, 0)).any()
    assert (first != window_order(1000, 1, 1)).any()
    assert sorted(window_order(1000, 1, 1)) == list(range(1000))
    epochs = list(BatchOrder(1000, 1).indices(0, 2000))
    assert epochs == [*first, *window_order(1000, 1, 1)]
    assert list(BatchOrder(1000, 1).indices(990, 1010)) == epochs[990:1010]
    assert BatchOrder(1000, 1).fingerprint() != BatchOrder(1000, 2).fingerprint()


def test_order_is_frozen():
    """The order of saved runs; it must never change."""
    assert window_order(100, 1337, 0)[:8].tolist() == [98, 47, 44, 60, 95, 90, 55, 92]
    assert window_order(100, 1337, 3)[:8].tolist() == [54, 61, 23, 13, 22, 71, 16, 15]
    fingerprint = "b9828f1817a1c79336cf610d47dd59f12c85413dde7169613a98a54c46da4e5a"
    assert BatchOrder(100, 1337).fingerprint() == fingerprint


def philox4x64(counter, key):
    """Philox4x64-10 from its paper, in Python integers."""
    mask = 2**64 - 1
    for i in range(10):
        a, b = counter[0] * 0xD2E7470EE14C6C93, counter[2] * 0xCA5A826395121157
        keys = (key[0] + i * 0x9E3779B97F4A7C15) & mask, (key[1] + i * 0xBB67AE8584CAA73B) & mask
        counter = [
            (b >> 64) ^ counter[1] ^ keys[0],
            b & mask,
            (a >> 64) ^ counter[3] ^ keys[1],
            a & mask,
        ]
    return counter


def test_order_is_that_of_philox_as_published():
    words = [word for n in range(1, 26) for word in philox4x64([n, 0, 0, 0], (1337, 2))]
    assert window_order(100, 1337, 2).tolist() == sorted(range(100), key=words.__getitem__)


@pytest.mark.parametrize("kept", [-2, 0.5, 100])
def test_truncated_shard_is_refused_with_both_sizes(tmp_path, kept):
    write(tmp_path)
    path = tmp_path / "x_train_000002.bin"
    data = path.read_bytes()
    size = int(len(data) * kept) if isinstance(kept, float) else kept
    path.write_bytes(data[:size])
    with pytest.raises(ValueError) as caught:
        open_split(tmp_path, "train")
    message = str(caught.value)
    assert path.name in message and str(len(data[:size])) in message and "\n" not in message
    assert kept == 100 or str(len(data)) in message


def test_temporary_files_are_never_read(tmp_path):
    tokens = write(tmp_path)
    plain = open_split(tmp_path, "train").sha256
    for name in ("x_train_000005.bin.tmp", "x_train_000005.tmp", ".x_train_000005.bin.tmp"):
        (tmp_path / name).write_bytes(shard_bytes(np.arange(100)))
    data = open_split(tmp_path, "train")
    assert data.n_tokens == len(tokens) and data.sha256 == plain


def test_unfinished_folder_is_refused(tmp_path):
    write(tmp_path)
    (tmp_path / shards.UNFINISHED).touch()
    with pytest.raises(ValueError, match="did not finish"):
        open_split(tmp_path, "train")


def test_id_outside_the_vocabulary_is_refused_by_file_name(tmp_path):
    write(tmp_path, top=300)
    write_manifest(tmp_path, vocab_size=257)
    with pytest.raises(ValueError, match=r"x_train_000000\.bin.*outside the vocabulary"):
        open_split(tmp_path, "train").read(0, 900)
    write_manifest(tmp_path, vocab_size=257, max_id=299)
    with pytest.raises(ValueError, match=r"x_train_000000\.bin.*299.*257"):
        open_split(tmp_path, "train")
    with pytest.raises(AssertionError):
        shard_bytes(np.array([70000]))


def test_manifest_and_files_must_agree(tmp_path):
    write(tmp_path)
    write_manifest(tmp_path)
    assert open_split(tmp_path, "train").n_tokens == sum(SIZES)
    extra = tmp_path / "x_train_000005.bin"
    extra.write_bytes(shard_bytes(np.arange(9)))
    with pytest.raises(ValueError, match=r"000005\.bin: not listed"):
        open_split(tmp_path, "train")
    extra.unlink()
    (tmp_path / "x_train_000003.bin").unlink()
    with pytest.raises(ValueError, match=r"000003\.bin: listed in manifest.json but missing"):
        open_split(tmp_path, "train")
    (tmp_path / shards.MANIFEST).write_text("{}")
    with pytest.raises(ValueError, match="not a manifest"):
        open_split(tmp_path, "train")


def test_folder_without_manifest_is_gpt2_and_one_data_set(tmp_path):
    write(tmp_path)
    lines = []
    data = open_split(tmp_path, "train", log=lines.append)
    assert len(lines) == 1 and data.tokenizer["vocab_size"] == 50257
    with pytest.raises(ValueError, match="val"):
        open_split(tmp_path, "val")
    write(tmp_path, name="y")
    with pytest.raises(ValueError, match="several data sets"):
        open_split(tmp_path, "train")
    with pytest.raises(ValueError, match="does not exist"):
        open_split(tmp_path / "nowhere", "train")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no NAME_train"):
        open_split(tmp_path / "empty", "train", log=lines.append)
    assert len(lines) == 1, "no word on the ids of shards that are not there"


def test_data_hash_follows_contents_not_place(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    write(tmp_path / "a")
    write(tmp_path / "b", name="other")
    assert open_split(tmp_path / "a", "train").sha256 == open_split(tmp_path / "b", "train").sha256
    changed = shard_bytes(np.zeros(SIZES[0]))
    (tmp_path / "b" / "other_train_000000.bin").write_bytes(changed)
    assert open_split(tmp_path / "a", "train").sha256 != open_split(tmp_path / "b", "train").sha256


def broken(manifest):
    """Manifests with one thing wrong."""
    yield manifest | {"eot_id": 10**9}
    yield manifest | {"shards": []}
    yield manifest | {"shards": manifest["shards"] * 2}
    yield manifest | {"settings": "text"}
    yield manifest | {"tokenizer": manifest["tokenizer"] | {"vocab_size": 257.5}}
    yield manifest | {"tokenizer": {"vocab_size": 257}}
    yield manifest | {"shards": [manifest["shards"][0] | {"max_id": "299"}]}
    yield manifest | {"shards": [{"file": "x_train_000000.bin"}]}
    yield manifest | {"shards": [manifest["shards"][0] | {"file": "../../x_train_000000.bin"}]}
    yield [1]


def test_a_broken_manifest_is_refused_by_name(tmp_path):
    write(tmp_path)
    write_manifest(tmp_path)
    path = tmp_path / shards.MANIFEST
    for content in broken(json.loads(path.read_text())):
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match="manifest.json"):
            open_split(tmp_path, "train")
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="manifest.json: not a manifest"):
        open_split(tmp_path, "train")

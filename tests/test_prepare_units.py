"""Units of work, what is written from them, and what can be read off a finished folder."""

import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import ROOT, make_data, refused, run_script, shard_bytes

from prepare_fineweb import main
from rove.prepare import checks, pool, sources, units
from rove.prepare.long_docs import write_long_docs
from rove.prepare.output import Output
from rove.prepare.writer import SplitWriter
from rove.shards import open_split, read_manifest
from rove.tokenizer import load_tokenizer

BYTE = load_tokenizer("byte")


def write_parquet(path, texts, **options):
    pq.write_table(pa.table({"id": list(range(len(texts))), "text": texts}), path, **options)


def read(found):
    return [row for unit in found for row in unit.read()]


@pytest.mark.parametrize("unit_bytes", [1, 50, 500, 10**9])
@pytest.mark.parametrize("group", [1, 7, 1000])
def test_row_groups_cut_at_rows_give_every_row_once(tmp_path, monkeypatch, unit_bytes, group):
    monkeypatch.setattr(units, "UNIT_BYTES", unit_bytes)
    texts = [None if n % 9 == 4 else "x" * n for n in range(150)]
    write_parquet(tmp_path / "a.parquet", texts, row_group_size=group)
    found = list(units.units_of("a.parquet", tmp_path / "a.parquet"))
    assert read(found) == [(f"a.parquet#{n}", text) for n, text in enumerate(texts)]
    if unit_bytes == 1:
        assert len(found) == 150
    if unit_bytes == 10**9:
        assert len(found) == -(-150 // group)


def test_units_of_one_group_are_read_on_from_each_other_or_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(units, "UNIT_ROWS", 10)
    write_parquet(tmp_path / "a.parquet", [f"text {n}" for n in range(95)], row_group_size=95)
    found = list(units.units_of("a", tmp_path / "a.parquet"))
    opened = []
    real = units.open_parquet
    monkeypatch.setattr(units, "open_parquet", lambda path: opened.append(path) or real(path))
    assert len(read(found[0:1] + found[2:3] + found[3:9])) > 70
    assert len(opened) == 1, "a unit further on is reached by reading on"
    assert [text for _, text in read(found[4:5])] == [f"text {n}" for n in range(38, 47)]
    assert len(opened) == 2


@pytest.mark.parametrize("repeated", [True, False])
def test_units_stay_small_whatever_the_column_looks_like(tmp_path, repeated):
    """Dictionaries hide how much text there is; few long documents are decoded one by one."""
    texts = ["x" * 10_000] * 20_000 if repeated else [str(n) * 2_000_000 for n in range(20)]
    write_parquet(tmp_path / "a.parquet", texts, row_group_size=len(texts))
    found = list(units.units_of("a", tmp_path / "a.parquet"))
    sizes = [sum(len(text) for _, text in unit.read()) for unit in found]
    assert max(sizes) <= 40_000_000 and sum(sizes) == sum(map(len, texts))
    assert repeated or {unit.batch_rows for unit in found} == {1}


def test_only_the_text_is_read(tmp_path):
    """Another column whose pages are damaged does no harm."""
    table = {
        "junk": ["j" * 500 + str(n) for n in range(200)],
        "text": [f"t{n}" for n in range(200)],
    }
    pq.write_table(pa.table(table), tmp_path / "a.parquet", compression="none")
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[100:20_000] = b"\xff" * 19_900
    (tmp_path / "a.parquet").write_bytes(data)
    found = units.units_of("a", tmp_path / "a.parquet")
    assert [text for _, text in read(found)] == table["text"]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_any_position_continues_where_the_unit_ended(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(units, "UNIT_CHARS", 40)
    for number in range(3):
        texts = [f"{number} {row} " * 3 for row in range(20)]
        if kind == "parquet":
            write_parquet(tmp_path / f"{number}.parquet", texts, row_group_size=6)
        else:
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
            (tmp_path / f"{number}.jsonl").write_text(lines)
    (tmp_path / f"1b.{kind}").write_bytes(b"")
    if kind == "parquet":
        write_parquet(tmp_path / "1b.parquet", pa.array([], pa.string()))
    source = sources.local_files(f"{tmp_path}/*.{kind}")
    everything = list(source.units((0, 0)))
    assert len(everything) > 9
    for done, (position, _) in enumerate(everything, 1):
        rest = [u for _, u in source.units(position)]
        assert read(rest) == read([u for _, u in everything[done:]])
    ends = [position for position, _ in everything if position[1] == 0]
    assert ends == [(1, 0), (2, 0), (4, 0)], "an empty file is passed by"


def test_spawned_and_forked_workers_and_none_give_the_same(tmp_path):
    texts = [f"{n} <|endoftext|> \u4e16" * (n % 7) for n in range(90)]
    write_parquet(tmp_path / "a.parquet", texts, row_group_size=10)
    source = sources.local_files(f"{tmp_path}/a.parquet")

    def encoded(num_workers, method="spawn"):
        found = pool.encode_units(BYTE, source.units((0, 0)), 0.3, num_workers, method)
        return [(p, {s: i.tolist() for s, i in e.ids.items()}, e.invalid) for p, e in found]

    alone = encoded(1)
    assert len(alone) == 9 and alone == encoded(2) == encoded(2, "fork") == encoded(5)
    assert sum(e["a.parquet"]["rows"] for _, _, e in alone if e) == 13, "n % 7 == 0 is empty"


def test_one_document_larger_than_several_shards(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["a" * 5000, *["b" * 10] * 40])
    main(["--source", "files", "--files", f"{tmp_path}/a.parquet", "--tokenizer", "byte",
          "--num_workers", "1", "--shard_tokens", "999", "--out_dir", f"{tmp_path}/out",
          "--val_fraction", "0.2"])  # fmt: skip
    sizes = [[s.size for s in open_split(tmp_path / "out", n).shards] for n in ("train", "val")]
    assert any(len(own) >= 6 and set(own[:-1]) == {999} for own in sizes)
    for split in ("train", "val"):
        data = open_split(tmp_path / "out", split)
        assert checks.document_lengths(data).max() in (10, 5000)


def test_a_disk_that_returns_other_bytes_is_noticed(tmp_path):
    writer = SplitWriter(tmp_path, "x", "train", 100, BYTE.eot_id, None)
    writer.write(np.arange(50, dtype=np.uint16))
    path = tmp_path / "x_train_000000.bin.tmp"
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"x_train_000000\.bin\.tmp: holds other bytes"):
        writer.finish()
    assert not (tmp_path / "x_train_000000.bin").exists()


def test_state_is_cut_back_even_when_a_shard_was_completed_since(tmp_path):
    settings = {"shard_tokens": 100}
    output = Output(tmp_path / "out", "x", settings, BYTE)
    output.open({}, None)
    ids = np.arange(250, dtype=np.uint16) % 256
    output.splits["train"].write(ids[:130])
    output.save((0, 1))
    record = json.loads((tmp_path / "out/manifest.json.unfinished").read_text())
    output.splits["train"].write(ids[130:])  # completes the second shard, begins the third
    again = Output(tmp_path / "out", "x", settings, BYTE)
    again.open(record, None)
    assert again.position == (0, 1) and again.tokens == 130
    assert sorted(p.name for p in (tmp_path / "out").glob("x*")) == [
        "x_train_000000.bin",
        "x_train_000001.bin.tmp",
    ]
    again.splits["train"].write(ids[130:])
    again.splits["train"].finish()
    found = [np.fromfile(p, "<u2")[512:] for p in sorted((tmp_path / "out").glob("x*.bin"))]
    assert np.concatenate(found).tolist() == ids.tolist()


def write_documents(folder, lengths, shard_tokens=300, vocab_size=257):
    """A folder whose validation documents have these lengths, cut into several shards."""
    make_data(folder, vocab_size=vocab_size, manifest=False)
    for path in folder.glob("walk_val*"):
        path.unlink()
    rng = np.random.default_rng(1)
    parts = [[256, *rng.integers(0, 256, length)] for length in lengths]
    ids = np.array([i for part in parts for i in part])
    entries = [{"file": p.name, "split": "train"} for p in sorted(folder.glob("walk_train*"))]
    for number, part in enumerate(np.split(ids, range(shard_tokens, ids.size, shard_tokens))):
        name = f"walk_val_{number:06d}.bin"
        (folder / name).write_bytes(shard_bytes(part))
        entries.append({"file": name, "split": "val"})
    tokenizer = {"name": "byte", "vocab_size": vocab_size, "sha256": None}
    manifest = {"tokenizer": tokenizer, "eot_id": 256, "shards": entries}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return [part[1:] for part in parts]


LENGTHS = [0, 1, 2, 3, 299, 300, 301, 700, 5, 1024, 0]


def test_lengths_and_histogram_of_documents_that_cross_shards(tmp_path, capsys):
    write_documents(tmp_path / "data", LENGTHS)
    data = open_split(tmp_path / "data", "val")
    assert checks.document_lengths(data).tolist() == LENGTHS
    lines = [line.split() for line in checks.histogram(np.array(LENGTHS))]
    table = {(row[0], row[2]): (int(row[3]), row[4], row[5]) for row in lines}
    assert table[("0", "0")] == (2, "18.18%", "0.00%")
    assert table[("256", "511")] == (3, "27.27%", f"{900 / sum(LENGTHS):.2%}")
    assert table[("1,024", "2,047")][0] == 1 and sum(n for n, _, _ in table.values()) == 11
    main(["stats", str(tmp_path / "data")])
    out = capsys.readouterr().out
    assert "val: 9 shards, 11 documents, 2,646 tokens, 0.996 bytes/token" in out
    assert "most frequent: " in out and out.count("tokens of a document") == 2


def test_most_frequent_tokens_are_decoded(tmp_path, capsys):
    write_documents(tmp_path / "data", [10])
    counts = np.zeros(257, dtype=np.int64)
    counts[[65, 66, 256]] = 6, 3, 1
    assert checks._frequent(counts, BYTE) == ["'A' 60.00%", "'B' 30.00%", "'<|endoftext|>' 10.00%"]
    assert checks._frequent(counts, None)[0] == "65 60.00%"


def test_long_documents_alone_in_a_folder_of_their_own(tmp_path, capsys):
    texts = write_documents(tmp_path / "data", LENGTHS)
    write_long_docs(tmp_path / "data", 300, 500)
    target = tmp_path / "data/long_docs_300"
    data = open_split(target, "val")
    wanted = [i for text in texts if len(text) >= 300 for i in (256, *text)]
    assert data.read(0, data.n_tokens).tolist() == wanted
    assert "4 of 11 documents" in capsys.readouterr().out
    manifest = read_manifest(target)
    assert manifest["settings"]["long_docs"] == 300 and manifest["documents"] == {"val": 4}
    write_long_docs(tmp_path / "data", 300, 500)
    assert "already there" in capsys.readouterr().out
    write_long_docs(tmp_path / "data", 5000, 500)
    assert "the longest has 1,024" in capsys.readouterr().out
    assert not (tmp_path / "data/long_docs_5000").exists()
    for command in ("verify", "stats"):
        main([command, str(target)])
    (tmp_path / "data/walk_val_000008.bin").write_bytes(shard_bytes(np.full(246, 7)))
    with pytest.raises(ValueError, match="made from other documents"):
        write_long_docs(tmp_path / "data", 300, 500)


def test_long_documents_are_written_with_a_data_set_and_for_a_finished_one(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["x" * n for n in range(1, 200)])
    argv = ["--source", "files", "--files", f"{tmp_path}/a.parquet", "--tokenizer", "byte"]
    argv += ["--num_workers", "1", "--out_dir", f"{tmp_path}/out", "--val_fraction", "0.5"]
    main([*argv, "--long_docs", "100"])
    main([*argv, "--long_docs", "150"])
    for least in (100, 150):
        lengths = checks.document_lengths(open_split(tmp_path / f"out/long_docs_{least}", "val"))
        assert lengths.size > 3 and lengths.min() >= least
    result = run_script("prepare_fineweb.py", *argv, "--long_docs", "0")
    assert "give 1 or more" in refused(result)


def test_a_long_document_split_is_what_eval_reads(tmp_path):
    """eval.py opens only the split val, so a folder without training shards will do."""
    write_documents(tmp_path / "data", [400, 10])
    write_long_docs(tmp_path / "data", 300, 500)
    assert open_split(tmp_path / "data/long_docs_300", "val").n_tokens == 401
    with pytest.raises(ValueError, match="NAME_train"):
        open_split(tmp_path / "data/long_docs_300", "train")


def test_imports_need_neither_torch_nor_the_hub():
    code = "import sys, prepare_fineweb;"
    code += "print({'torch', 'huggingface_hub', 'pyarrow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr

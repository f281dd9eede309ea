"""Preparing data: what is written, that it is always the same, and what is check_refused."""

import gzip
import hashlib
import json
import platform
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import prepare_fineweb
from prepare_fineweb import main
from rove import shards
from rove.files import lock_folder
from rove.prepare import hub, plan, sources, units
from rove.prepare.output import Output
from rove.shards import open_split
from rove.tokenizer import Tokenizer, load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
SMALL = ("--tokenizer", "byte", "--num_workers", "1", "--shard_tokens", "1000")
FINEWEB_COLUMNS = ("text", "id", "dump", "url", "file_path", "language", "language_score")
FINEWEB_COLUMNS += ("token_count", "score", "int_score")


def documents(n, seed=0):
    rng = np.random.default_rng(seed)
    words = ["rotary", "value", "caf\u00e9", "\u4e16\u754c", "<|endoftext|>", "line\u2028two", "\n"]
    return [" ".join(words[i] for i in rng.integers(0, 7, rng.integers(1, 60))) for _ in range(n)]


def write_jsonl(path, texts):
    lines = (json.dumps({"text": t}, ensure_ascii=False) for t in texts)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_parquet(path, texts):
    columns = {name: texts if name == "text" else [name] * len(texts) for name in FINEWEB_COLUMNS}
    pq.write_table(pa.table(columns), path, row_group_size=7)


def rows(source):
    """Every row of a source: (key, value)."""
    return [row for _, unit in source.units((0, 0)) for row in unit.read()]


def prepare(folder, pattern, *more):
    main(["--source", "files", "--files", str(pattern), "--out_dir", str(folder), *SMALL, *more])


def hashes(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def decoded(folder, split):
    """The documents of a split, read back by another route than the tokenizer's."""
    data = open_split(folder, split)
    ids = data.read(0, data.n_tokens)
    assert ids[0] == 256
    return [
        bytes(part[1:].tolist()).decode() for part in np.split(ids, np.flatnonzero(ids == 256))[1:]
    ]


def is_val(key, fraction=0.1):
    return int(hashlib.sha256(key.encode()).hexdigest()[:16], 16) / 2**64 < fraction


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", documents(120, seed=1))
    return folder


@pytest.fixture
def check_refused(capsys):
    """Run main, expect one line on stderr that matches, and exit code 2."""

    def run(pattern, *argv):
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main([str(a) for a in argv])
        stderr = capsys.readouterr().err
        assert caught.value.code == 2 and stderr.count("\n") == 1, stderr
        assert stderr.startswith("error: ") and re.search(pattern, stderr), stderr

    return run


def test_every_document_once_in_order_and_in_full_shards(corpus, tmp_path):
    prepare(tmp_path / "out", corpus / "*.jsonl")
    texts = documents(120, seed=1)
    for split in ("train", "val"):
        wanted = [t for i, t in enumerate(texts) if is_val(f"a.jsonl#{i}") == (split == "val")]
        assert decoded(tmp_path / "out", split) == wanted
        *full, last = open_split(tmp_path / "out", split).shards
        assert [s.size for s in full] == [1000] * len(full) and 1 <= last.size <= 1000
    assert len(full) + 1 < len(open_split(tmp_path / "out", "train").shards)


def test_manifest_says_what_the_shards_hold(corpus, tmp_path, capsys):
    prepare(tmp_path / "out", corpus / "*.jsonl")
    text = (tmp_path / "out" / "manifest.json").read_text()
    manifest = json.loads(text)
    assert text == json.dumps(manifest, indent=2, sort_keys=True) + "\n"
    assert str(tmp_path) not in text and manifest["dataset"] == "files"
    assert manifest["tokenizer"]["name"] == "byte" and manifest["eot_id"] == 256
    assert manifest["tokenizer"]["vocab_size"] == 257 and manifest["invalid_rows"] == {}
    assert sum(manifest["documents"].values()) == 120
    for entry in manifest["shards"]:
        path = tmp_path / "out" / entry["file"]
        ids = shards.read_shard(path)
        assert re.fullmatch(rf"files_{entry['split']}_\d{{6}}\.bin", entry["file"])
        assert hashlib.sha256(path.read_bytes()).hexdigest() == entry["sha256"]
        assert (entry["tokens"], entry["max_id"]) == (ids.size, ids.max())
        assert entry["text_bytes"] == np.count_nonzero(ids < 256)
    capsys.readouterr()
    main(["stats", str(tmp_path / "out")])
    train = capsys.readouterr().out.splitlines()[0]
    n_tokens = open_split(tmp_path / "out", "train").n_tokens
    assert f"{manifest['documents']['train']} documents, {n_tokens:,} tokens" in train
    files = {p.name for p in (tmp_path / "out").iterdir()} - {".lock"}
    assert files == {"manifest.json"} | {entry["file"] for entry in manifest["shards"]}


def test_all_formats_read_the_same_texts(tmp_path):
    texts = documents(40, seed=2)
    half = (
        "".join(json.dumps({"text": t}) + "\n" for t in part) for part in (texts[:9], texts[9:])
    )
    first, second = (part.encode() for part in half)
    zstd = pa.Codec("zstd")
    inputs = {
        "jsonl": first + b"\n" + second.rstrip(b"\n"),
        "jsonl.gz": gzip.compress(first) + gzip.compress(second),
        "jsonl.zst": zstd.compress(first, asbytes=True) + zstd.compress(second, asbytes=True),
    }
    for extension, data in inputs.items():
        (tmp_path / f"x.{extension}").write_bytes(data)
        assert [t for _, t in rows(sources.local_files(f"{tmp_path}/x.{extension}"))] == texts
    write_parquet(tmp_path / "x.parquet", texts)
    found = rows(sources.local_files(f"{tmp_path}/x.parquet"))
    assert found == [(f"x.parquet#{i}", t) for i, t in enumerate(texts)]
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "x.txt").write_bytes("a\r\nb\u2028c".encode())
    (tmp_path / "deep" / "y.txt").write_text("y")
    found = rows(sources.local_files(f"{tmp_path}/deep/**/*.txt"))
    assert found == [("er/x.txt#0", "a\r\nb\u2028c"), ("y.txt#0", "y")]


def test_moved_input_and_any_number_of_workers_give_the_same_bytes(tmp_path, monkeypatch):
    for place in ("in", "elsewhere/moved"):
        (tmp_path / place).mkdir(parents=True)
        write_parquet(tmp_path / place / "a.parquet", documents(300, seed=3))
        write_jsonl(tmp_path / place / "b.jsonl", documents(100, seed=4))
    monkeypatch.setattr(units, "UNIT_CHARS", 2000)
    prepare(tmp_path / "1", tmp_path / "in" / "*")
    prepare(tmp_path / "2", tmp_path / "elsewhere" / "moved" / "*", "--num_workers", "2")
    prepare(tmp_path / "3", tmp_path / "in" / "*", "--num_workers", "3")
    assert len(hashes(tmp_path / "1")) > 20
    assert hashes(tmp_path / "1") == hashes(tmp_path / "2") == hashes(tmp_path / "3")


def test_eight_workers_on_three_documents(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["one", "two", "three"])
    prepare(tmp_path / "out", tmp_path / "a.jsonl", "--num_workers", "8", "--val_fraction", "0.6")
    both = [decoded(tmp_path / "out", split) for split in ("train", "val")]
    assert sorted(both[0] + both[1]) == ["one", "three", "two"]


def test_rows_without_text_are_counted(tmp_path, capsys):
    texts = ["a", None, "", "b", 7, "c \ud800", "d"] * 4
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    prepare(tmp_path / "out", tmp_path / "*.jsonl", "--val_fraction", "0.5")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["invalid_rows"] == {"a.jsonl": {"rows": 12, "first": 1}}
    assert "a.jsonl: 12 rows without text, the first is row 1" in capsys.readouterr().out
    both = decoded(tmp_path / "out", "train") + decoded(tmp_path / "out", "val")
    assert sorted(both) == sorted(["a", "b", "c \ufffd", "d"] * 4)


STOPPED = """
import os, pathlib, sys, prepare_fineweb
from rove.prepare import run, units
units.UNIT_CHARS, run.SAVE_INTERVAL_S = 600, 0.0
name, left, signal = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
real = getattr(pathlib.Path, name)
def stops(self, *args, **kwargs):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal)
    return real(self, *args, **kwargs)
setattr(pathlib.Path, name, stops)
prepare_fineweb.main(sys.argv[4:])
"""


def stopped(method, count, number, argv):
    """Run prepare and send it a signal at the count-th call of a method of Path.

    Workers hold the pipes of stdout and stderr, so this returns only when none is left.
    """
    command = [sys.executable, "-c", STOPPED, method, str(count), str(int(number)), *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def finished(argv):
    """Let a run that was stopped go on to its end, with units of the same size."""
    done = stopped("replace", 10**9, 0, argv)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("workers", ["2"])
def test_killed_again_and_again_it_gives_the_same_bytes(corpus, tmp_path, workers):
    prepare(tmp_path / "whole", corpus / "*.jsonl")
    argv = ["--source", "files", "--files", f"{corpus}/*.jsonl", "--out_dir", f"{tmp_path}/out"]
    argv += [*SMALL, "--num_workers", workers]
    positions = []
    # Renamed are records, shards and the manifest. Each run gets a little further.
    for number in range(40):
        done = stopped("replace", 7 + number % 3, signal.SIGKILL, argv)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        with pytest.raises(ValueError):
            open_split(tmp_path / "out", "train")
        record = json.loads((tmp_path / "out" / shards.UNFINISHED).read_text())
        positions.append(record["position"])
    assert positions == sorted(positions) and len({tuple(p) for p in positions}) > 2, positions
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")


def test_killed_before_its_mark_goes_it_is_finished_by_the_same_command(corpus, tmp_path):
    prepare(tmp_path / "whole", corpus / "*.jsonl")
    argv = ["--source", "files", "--files", f"{corpus}/*.jsonl", "--out_dir", f"{tmp_path}/out"]
    done = stopped("unlink", 1, signal.SIGKILL, [*argv, *SMALL])
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (tmp_path / "out" / "manifest.json").exists()
    with pytest.raises(ValueError, match="did not finish"):
        open_split(tmp_path / "out", "train")
    finished([*argv, *SMALL])
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")


def test_what_was_lost_or_cut_is_told_and_the_rest_kept(corpus, tmp_path):
    argv = ["--source", "files", "--files", f"{corpus}/*.jsonl", "--out_dir", f"{tmp_path}/out"]
    done = stopped("replace", 9, signal.SIGKILL, [*argv, *SMALL])
    assert done.returncode == -signal.SIGKILL, done.stderr
    before = hashes(tmp_path / "out")
    record = json.loads((tmp_path / "out" / shards.UNFINISHED).read_text())
    open_ones = [e for s in record["splits"].values() for e in s["entries"] if "crc32" in e]
    last = next(p for e in open_ones for p in (tmp_path / "out").glob(f"{e['file']}*"))
    for path in (tmp_path / "out" / "files_train_000000.bin", last):
        data = path.read_bytes()
        flipped = data[:1026] + b"\xff\xff" + data[1028:]
        # complete shards are trusted by their size; `verify` reads them
        for damaged in (None, data[:1030], *([flipped] if path == last else [])):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            done = stopped("replace", 10**9, 0, [*argv, *SMALL])
            assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
            assert re.search(f"cannot go on .*{path.name}.*complete shards", done.stderr)
            path.write_bytes(data)
    assert hashes(tmp_path / "out") == before, "nothing was touched"
    finished([*argv, *SMALL])
    prepare(tmp_path / "whole", corpus / "*.jsonl")
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"splits": {}}', '{"name": "x", "splits": {}, "settings": null}']
)
def test_a_damaged_record_is_one_line(corpus, tmp_path, check_refused, content):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / shards.UNFINISHED).write_text(content)
    argv = ["--source", "files", "--files", f"{corpus}/*.jsonl", "--out_dir", f"{tmp_path}/out"]
    check_refused("damaged.*remove the folder", *argv, *SMALL)


def test_a_record_with_a_missing_key_is_one_line(corpus, tmp_path):
    argv = ["--source", "files", "--files", f"{corpus}/*.jsonl", "--out_dir", f"{tmp_path}/out"]
    done = stopped("replace", 9, signal.SIGKILL, [*argv, *SMALL])
    assert done.returncode == -signal.SIGKILL, done.stderr
    path = tmp_path / "out" / shards.UNFINISHED
    whole = json.loads(path.read_text())
    cuts = [(key,) for key in whole] + [("splits", "val", "documents"), ("splits", "train")]
    for cut in cuts:
        record = json.loads(json.dumps(whole))
        inner = record
        for key in cut[:-1]:
            inner = inner[key]
        del inner[cut[-1]]
        path.write_text(json.dumps(record))
        done = stopped("replace", 10**9, 0, [*argv, *SMALL])
        assert done.returncode == 2 and done.stderr.startswith("error: "), (cut, done.stderr)
        assert "Traceback" not in done.stderr


def test_many_small_files_are_saved_by_time_not_one_by_one(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    for number in range(300):
        (tmp_path / "in" / f"{number}.txt").write_text(f"text {number}")
    saves = []
    monkeypatch.setattr(Output, "save", lambda self, position: saves.append(position))
    with pytest.raises(SystemExit):  # the record that was not written is not removed
        prepare(tmp_path / "out", tmp_path / "in/*.txt", "--shard_tokens", "100000")
    assert len(saves) == 1, "the first"


def test_unfinished_work_is_not_thrown_away_for_other_settings(corpus, tmp_path, check_refused):
    argv = ["--source", "files", "--files", f"{corpus}/*.jsonl", "--out_dir", f"{tmp_path}/out"]
    done = stopped("replace", 9, signal.SIGKILL, [*argv, *SMALL])
    assert done.returncode == -signal.SIGKILL, done.stderr
    before = hashes(tmp_path / "out")
    other = [*argv, *SMALL, "--val_fraction", "0.2"]
    check_refused(r"unfinished data set with val_fraction 0\.1", *other)
    assert hashes(tmp_path / "out") == before
    (tmp_path / "out" / shards.UNFINISHED).write_text("{")
    check_refused("damaged", *argv, *SMALL)


def test_two_at_once_in_one_folder_are_refused(corpus, tmp_path, check_refused):
    argv = ["--source", "files", "--files", f"{corpus}/*.jsonl", "--out_dir", f"{tmp_path}/out"]
    with lock_folder(tmp_path / "out", "preparing"):
        check_refused("another process is preparing here", *argv, *SMALL)
    main([*argv, *SMALL])


def test_a_disk_without_room_is_refused_before_any_work(corpus, tmp_path, monkeypatch, capsys):
    usage = SimpleNamespace(total=10**9, used=10**9 - 1000, free=1000)
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda path: usage)
    argv = ["--source", "files", "--files", f"{corpus}/*.jsonl", "--out_dir", f"{tmp_path}/out"]
    with pytest.raises(SystemExit):
        main([*argv, *SMALL])
    line = capsys.readouterr().err
    assert line.endswith("0.0 MB are free; make room, or set --out_dir to another disk\n")
    assert "are needed" in line
    assert not (tmp_path / "out").exists()


def test_interrupt_is_one_line_and_leaves_no_child(corpus, tmp_path):
    argv = ["--source", "files", "--files", f"{corpus}/*.jsonl", "--out_dir", f"{tmp_path}/out"]
    done = stopped("replace", 3, signal.SIGINT, [*argv, *SMALL, "--num_workers", "2"])
    assert done.returncode == 130 and done.stderr.count("\n") == 1, done.stderr
    assert (tmp_path / "out" / shards.UNFINISHED).exists()


def test_full_disk_is_one_line(corpus, tmp_path):
    code = "import resource as r, sys; r.setrlimit(r.RLIMIT_FSIZE, (1500, 1500));"
    code += "sys.dont_write_bytecode = True; import prepare_fineweb as p; p.main(sys.argv[1:])"
    argv = ["--source", "files", "--files", f"{corpus}/*.jsonl", "--out_dir", f"{tmp_path}/out"]
    command = [sys.executable, "-c", code, *argv, *SMALL]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert re.search(r"error: File too large: .*_train_000000\.bin\.tmp", done.stderr)


def test_a_finished_folder_may_be_read_only_and_an_unfinished_one_not(
    corpus, tmp_path, capsys, check_refused, monkeypatch
):
    prepare(tmp_path / "out", corpus / "*.jsonl")
    monkeypatch.setattr("rove.files.os.access", lambda *_: False)
    prepare(tmp_path / "out", corpus / "*.jsonl")
    assert "already prepared" in capsys.readouterr().out
    argv = ["--source", "files", "--files", f"{corpus}/*.jsonl", *SMALL, "--out_dir"]
    check_refused("new: may not write in", *argv, tmp_path / "new")


def test_finished_folder_is_kept(corpus, tmp_path, capsys, check_refused):
    prepare(tmp_path / "out", corpus / "*.jsonl")
    before, inode = hashes(tmp_path / "out"), (tmp_path / "out" / "manifest.json").stat().st_ino
    prepare(tmp_path / "out", corpus / "*.jsonl", "--num_workers", "2")
    assert "already prepared" in capsys.readouterr().out
    argv = ["--source", "files", "--files", f"{corpus}/*.jsonl", "--out_dir", f"{tmp_path}/out"]
    check_refused(
        "out holds .*val_fraction 0.1 .asked: 0.2", *argv, *SMALL, "--val_fraction", "0.2"
    )
    check_refused("shard_tokens 1000 .asked: 999", *argv, *SMALL, "--shard_tokens", "999")
    check_refused("source files .asked: python-stdlib", "--out_dir", tmp_path / "out")
    write_jsonl(corpus / "b.jsonl", ["new"])
    check_refused("input.files 1 .asked: 2", *argv, *SMALL)
    assert hashes(tmp_path / "out") == before
    assert (tmp_path / "out" / "manifest.json").stat().st_ino == inode
    (tmp_path / "out" / "manifest.json").unlink()
    check_refused(r"000000\.bin belongs to no known data set", *argv, *SMALL)


def test_verify_finds_a_flipped_byte(corpus, tmp_path, capsys, check_refused):
    prepare(tmp_path / "out", corpus / "*.jsonl")
    main(["verify", str(tmp_path / "out")])
    assert "shards are as" in capsys.readouterr().out
    path = tmp_path / "out" / "files_train_000001.bin"
    data = bytearray(path.read_bytes())
    data[1500] ^= 1
    path.write_bytes(data)
    check_refused(r"files_train_000001\.bin: contents differ", "verify", tmp_path / "out")
    path.write_bytes(data[:-2])
    check_refused(r"files_train_000001\.bin: expected 3024 bytes.*3022", "verify", tmp_path / "out")
    check_refused("no NAME_train", "verify", corpus)
    check_refused("give one folder", "verify")
    check_refused("does not exist", "stats", tmp_path / "nowhere")


BAD_INPUTS = {
    "no match": (None, b"", "matches no file"),
    "extension": ("a.csv", b"text\n", r"a\.csv: extension is none of"),
    "no parquet": ("a.parquet", b"text", r"a\.parquet: no complete parquet"),
    "empty parquet": ("a.parquet", b"", r"a\.parquet: no complete parquet"),
    "no text": ("a.jsonl", b'{"id": 1, "body": "x"}\n', r"line 1: no column 'text'.* id, body"),
    "not JSON": ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl, line 2: invalid JSON"),
    "no object": ("a.jsonl", b'["x"]\n', "line 1: not a JSON object"),
    "latin-1 jsonl": ("a.jsonl", b'{"text": "x"}\n{"text": "\xe9"}', "line 2: not UTF-8"),
    "latin-1 txt": ("a.txt", b"caf\xe9", r"a\.txt: not UTF-8 at byte 3"),
    "no gzip": ("a.jsonl.gz", b"plain", r"a\.jsonl\.gz: .*; get the file again, or leave it out"),
    "cut gzip": ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 99)[:-9], r"gz: Truncated"),
    "no zstd": ("a.jsonl.zst", b"plain", r"a\.jsonl\.zst: .*; get the file again, or leave it out"),
    "empty text": ("a.txt", b"", r"/a\.txt: no text \(a\.txt: is empty\); give other --files"),
    "no rows": ("a.jsonl", b"", r"/a\.jsonl: no text \(no rows\)"),
    "only nulls": ("a.jsonl", b'{"text": null}\n', "1 rows without text, the first is row 0"),
    "one side": ("a.jsonl", b'{"text": "x"}\n', "no document fell .*another --val_fraction"),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_input_is_one_line(case, tmp_path, check_refused):
    name, data, pattern = BAD_INPUTS[case]
    if name:
        (tmp_path / name).write_bytes(data)
    argv = ["--source", "files", "--files", f"{tmp_path}/a*", "--out_dir", tmp_path / "out"]
    check_refused(pattern, *argv, *SMALL)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_bad_parquet_is_one_line(tmp_path, check_refused):
    argv = ["--source", "files", "--files", f"{tmp_path}/a*", "--out_dir", tmp_path / "out"]
    write_parquet(tmp_path / "a.parquet", documents(50))
    data = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(data[: len(data) // 2])
    check_refused(r"a\.parquet: no complete parquet file", *argv, *SMALL)
    (tmp_path / "a.parquet").write_bytes(data[:10] + b"\xff" * 40 + data[50:])
    check_refused(r"a\.parquet, row 0: ", *argv, *SMALL)
    pq.write_table(pa.table({"id": [1], "content": ["x"]}), tmp_path / "a.parquet")
    check_refused(r"a\.parquet: no column 'text'; columns are id, content", *argv, *SMALL)


@pytest.mark.parametrize(
    ("pattern", "argv"),
    [
        ("--files has no effect", ["--files", "x"]),
        ("--dataset has no effect", ["--source", "files", "--files", "x", "--dataset", "y"]),
        ("--revision has no effect", ["--revision", "v1"]),
        ("--val_fraction has no effect", ["--source", "fineweb-edu", "--val_fraction", "0.2"]),
        ("needs --files", ["--source", "files"]),
        ("needs --dataset", ["--source", "hub"]),
        ("--val_fraction 0.0", ["--val_fraction", "0"]),
        ("--val_fraction 1.0", ["--val_fraction", "1"]),
        ("--shard_tokens 0", ["--shard_tokens", "0"]),
        ("--num_workers 0", ["--num_workers", "0"]),
        ("source", ["--source", "web"]),
        ("tokenizer", ["--tokenizer", "llama"]),
        ("out_dri", ["--out_dri", "x"]),
    ],
)  # fmt: skip
def test_bad_settings_are_one_line(pattern, argv, check_refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_refused(pattern, *argv)
    assert not list(tmp_path.iterdir())


def test_output_folder_and_tokenizer_that_cannot_be_used(
    corpus, tmp_path, check_refused, monkeypatch
):
    argv = ["--source", "files", "--files", f"{corpus}/*.jsonl", *SMALL, "--out_dir"]
    file, link = corpus / "a.jsonl", tmp_path / "link"
    link.symlink_to("nowhere")
    check_refused(f"--out_dir {file}/out: {file} is a file; name", *argv, file / "out")
    check_refused(f"--out_dir {file}: is a file; name a folder", *argv, file)
    check_refused(f"--out_dir {link}: is a link to nothing; name a folder", *argv, link)
    check_refused(f"--out_dir {file}: is a file; name a folder", *argv, file, "--dry_run")
    check_refused("--out_dir '': is empty", *argv, "")
    too_many = lambda *args, **kwargs: Tokenizer("big", 70000, 69999, "0")  # noqa: E731
    monkeypatch.setattr(prepare_fineweb, "load_tokenizer", too_many)
    check_refused("70000 ids do not fit", *argv, tmp_path / "out")


def test_dry_run_writes_nothing(corpus, tmp_path, capsys):
    prepare(tmp_path / "out", corpus / "*.jsonl", "--dry_run=true")
    assert not (tmp_path / "out").exists()
    out = capsys.readouterr().out
    size = (corpus / "a.jsonl").stat().st_size / 1e6
    for part in ("files: 1 files", f"{size:.1f} MB", "M tokens", "on disk", "1 workers", "dry run"):
        assert part in out


def test_a_single_text_is_told_to_be_cut(tmp_path, check_refused):
    (tmp_path / "mine.txt").write_text("a word or two\n" * 50)
    argv = ["--source", "files", "--files", tmp_path / "mine.txt", "--out_dir", tmp_path / "out"]
    check_refused("a .txt file is one document.*split -nl/20 .*/mine.txt .*/part_`", *argv)


@pytest.mark.parametrize("folder", ["", "my b[oo]ks"])
def test_what_it_is_told_works_where_it_is_told(tmp_path, monkeypatch, capsys, folder):
    monkeypatch.chdir(tmp_path)
    Path(folder).mkdir(exist_ok=True)
    text = Path(folder, "it's.txt")
    text.write_text("a word or two\n" * 50)
    argv = ["--source", "files", "--out_dir", "out put", *SMALL, "--val_fraction", "0.5", "--files"]
    with pytest.raises(SystemExit):
        main([*argv, str(text)])
    told = re.search(r"cut it, `(.*)`, and give --files (.*)", capsys.readouterr().err)
    subprocess.run(["bash", "-c", told[1]], check=True)
    (pattern,) = shlex.split(told[2])
    main([*argv, pattern])
    both = decoded(Path("out put"), "train") + decoded(Path("out put"), "val")
    assert len(both) == 20 and "".join(sorted(both, key=len)).count("a word or two\n") == 50
    assert capsys.readouterr().out.endswith("--data.dir 'out put'\n")


def test_a_folder_is_answered_with_a_pattern(tmp_path, check_refused):
    (tmp_path / "my books").mkdir()
    argv = ["--source", "files", "--files", tmp_path / "my books", "--out_dir", tmp_path / "out"]
    check_refused(f"my books: is a folder; give '{tmp_path}/my books/\\*'$", *argv)


def test_gpt2_on_documents_that_are_hard(tmp_path):
    try:
        gpt2 = load_tokenizer("gpt2")
    except ValueError:
        pytest.skip("GPT-2's vocabulary is not on this machine")
    texts = ["^" * 1_000_000, "a" * 1_000_000, "a <|endoftext|> b", *documents(50, seed=5)]
    write_jsonl(tmp_path / "a.jsonl", texts)
    start = time.monotonic()
    argv = ["--source", "files", "--files", f"{tmp_path}/a.jsonl", "--num_workers", "2"]
    main([*argv, "--out_dir", str(tmp_path / "out")])
    assert time.monotonic() - start < 60
    for split in ("train", "val"):
        data = open_split(tmp_path / "out", split)
        wanted = [t for i, t in enumerate(texts) if is_val(f"a.jsonl#{i}") == (split == "val")]
        row = [[50256, *gpt2.encode(text).tolist()] for text in wanted]
        assert data.read(0, data.n_tokens).tolist() == sum(row, [])
        assert data.tokenizer["sha256"] == gpt2.sha256


def test_standard_library(tmp_path, monkeypatch, capsys, check_refused):
    main(["--tokenizer", "byte", "--out_dir", str(tmp_path / "out")])
    assert "next: python train.py" in capsys.readouterr().out
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["revision"] == platform.python_version()
    n_bytes = sum(entry["text_bytes"] for entry in manifest["shards"])
    assert 5e6 < n_bytes < 50e6 and sum(manifest["documents"].values()) > 300
    assert {e["file"] for e in manifest["shards"]} == {
        "stdlib_train_000000.bin",
        "stdlib_val_000000.bin",
    }
    monkeypatch.setattr(platform, "python_version", lambda: "3.99.0")
    check_refused("input.revision .*3.99.0", "--tokenizer", "byte", "--out_dir", tmp_path / "out")


def test_standard_library_leaves_out_tests_and_reads_coding_cookies(tmp_path, monkeypatch):
    files = {
        "os.py": b"x = 1\n",
        "json/decoder.py": "# -*- coding: latin-1 -*-\n# caf\u00e9\n".encode("latin-1"),
        "json/tool.py": b"x = 2\n",
        "json/__init__.py": b"",
        "json/data.txt": b"no module",
    }
    left_out = ("test", "json/tests", "idlelib/idle_test", "site-packages", "json/__pycache__")
    files |= {f"{folder}/x.py": b"x = 3\n" for folder in left_out}
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    found = rows(sources.python_stdlib())
    cookie = "# -*- coding: latin-1 -*-\n# caf\u00e9\n"
    assert found == [("json", cookie), ("json", "x = 2\n"), ("os.py", "x = 1\n")]
    (tmp_path / "bad.py").write_bytes(b"# \xff\n")
    with pytest.raises(ValueError, match=r"bad\.py"):
        rows(sources.python_stdlib())


def test_hub_data_set_is_streamed_at_a_resolved_revision(tmp_path, monkeypatch, check_refused):
    asked, rows = [], [{"text": text} for text in documents(60, seed=6)]

    def load_dataset(name, **options):
        asked.append((name, options))
        return iter(rows)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr(hub, "resolve", lambda repo, revision: f"{revision}-resolved")
    argv = ["--source", "hub", "--dataset", "some one/text-1.0", "--revision", "v2", *SMALL]
    main([*argv, "--out_dir", str(tmp_path / "out")])
    options = {"revision": "v2-resolved", "split": "train", "streaming": True}
    assert asked == [("some one/text-1.0", options)]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["dataset"], manifest["revision"]) == ("some one/text-1.0", "v2-resolved")
    assert manifest["shards"][0]["file"] == "some_one_text-1.0_train_000000.bin"
    assert sum(manifest["documents"].values()) == 60
    rows[:] = [{"body": "x"}]
    check_refused("no column 'text'; columns are body", *argv, "--out_dir", tmp_path / "other")

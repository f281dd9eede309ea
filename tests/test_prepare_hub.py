"""Data from the hub: the real client against a local server that redirects, limits and drops."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_hub import COMMITS, Hub, serving
from helpers import ROOT, shard_bytes

from rove.prepare.sources import FINEWEB_EDU
from rove.shards import open_split

N_VAL = 1234
COLUMNS = ("text", "id", "dump", "url", "file_path", "language", "language_score", "token_count")
PRETOKENIZED = "kjj0/finewebedu10B-gpt2"

RUN = f"""
import os, sys, prepare_fineweb
from rove.prepare import downloads, hub, run, sources
sources.FINEWEB_VAL_TOKENS = {N_VAL}
hub.FIRST_WAIT_S, downloads.BLOCK_BYTES = 0.01, 1000
run.SAVE_INTERVAL_S = 0.0
if stop_at := int(os.environ.get("STOP_AT", 0)):
    from rove.prepare import output
    real, calls = output.Output.save, []
    def save(self, position):
        real(self, position)
        calls.append(position)
        if len(calls) == stop_at:
            os.kill(os.getpid(), int(os.environ["SIGNAL"]))
    output.Output.save = save
if watched := os.environ.get("WATCHED"):
    import pathlib
    real_get = downloads.Downloads.get
    def get(self, name):
        path = real_get(self, name)
        with open(watched, "a") as file:
            print(len(list(pathlib.Path(os.environ["HF_HOME"]).rglob("*.parquet"))), file=file)
        return path
    downloads.Downloads.get = get
prepare_fineweb.main(sys.argv[1:])
"""


def texts_of(number):
    rng = np.random.default_rng(number)
    words = ["rotary", "value", "caf\u00e9", "\u4e16\u754c", "<|endoftext|>", "\n"]
    return [" ".join(words[i] for i in rng.integers(0, 6, rng.integers(1, 60))) for _ in range(40)]


@pytest.fixture
def fineweb(tmp_path):
    """Four parquet files as FineWeb-Edu's lie on the hub, and their documents."""
    files, path = {}, tmp_path / "x.parquet"
    for number in range(4):
        texts = texts_of(number)
        columns = {name: texts if name == "text" else [name] * 40 for name in COLUMNS}
        pq.write_table(pa.table(columns), path, row_group_size=7)
        files[f"sample/10BT/00{number}_00000.parquet"] = path.read_bytes()
    path.unlink()
    return files, [text for number in range(4) for text in texts_of(number)]


def run(hub, tmp_path, *argv, out="out", **environment):
    """Run prepare_fineweb.py against a hub, with a hub cache of its own."""
    plain = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()}
    plain |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": "hf_key"}
    plain |= {"HF_HUB_OFFLINE": "0"} | environment
    command = [sys.executable, "-c", RUN, *argv, "--out_dir", str(tmp_path / out)]
    return subprocess.run(
        command, cwd=ROOT, env=plain, capture_output=True, text=True, timeout=120
    )  # fmt: skip


SMALL = ("--tokenizer", "byte", "--num_workers", "1", "--shard_tokens", "1000")
EDU = ("--source", "fineweb-edu", *SMALL)


def hashes(folder):
    files = (p for p in sorted(folder.iterdir()) if p.is_file())
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def ids_of(folder):
    splits = [open_split(folder, split) for split in ("val", "train")]
    return np.concatenate([data.read(0, data.n_tokens) for data in splits]).tolist()


def one_line(done):
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_a_hub_that_limits_fails_drops_and_damages_gives_every_byte(fineweb, tmp_path):
    files, texts = fineweb
    faults = {
        "revision/main": [429, 503],
        "tree/" + COMMITS[0] + "/sample/10BT": [429],
        "000_00000.parquet": [429],
        "cdn/" + FINEWEB_EDU + "/sample/10BT/001_00000.parquet": ["drop", 503, "drop"],
        "cdn/" + FINEWEB_EDU + "/sample/10BT/002_00000.parquet": ["damage"],
    }
    with serving(Hub({FINEWEB_EDU: files}, faults=faults)) as hub:
        done = run(hub, tmp_path, *EDU)
    assert done.returncode == 0, done.stderr
    assert not any(hub.faults.values()), hub.faults
    assert hub.keys == {"Bearer hf_key"}
    resumed = [wanted for _, route, wanted in hub.requests if "001_" in route and wanted]
    assert any(not wanted.startswith("bytes=0-") for wanted in resumed), "went on, not anew"
    assert "arrived damaged" in done.stderr and "trying again" in done.stderr
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert (manifest["dataset"], manifest["revision"]) == (FINEWEB_EDU, COMMITS[0])
    val = open_split(tmp_path / "out", "val")
    assert val.n_tokens == N_VAL and [s.size for s in val.shards] == [1000, 234]
    assert ids_of(tmp_path / "out") == [i for text in texts for i in (256, *text.encode())]
    assert str(tmp_path) not in (tmp_path / "out/manifest.json").read_text()


def test_killed_it_goes_on_at_the_commit_that_it_had_begun_with(fineweb, tmp_path):
    files, _ = fineweb
    with serving(Hub({FINEWEB_EDU: files})) as hub:
        assert run(hub, tmp_path, *EDU, out="whole").returncode == 0
        shutil.rmtree(tmp_path / "hf")
        n_before = len(hub.requests)
        for stop_at, number in [(2, signal.SIGKILL), (9, signal.SIGKILL), (3, signal.SIGINT)]:
            done = run(hub, tmp_path, *EDU, STOP_AT=str(stop_at), SIGNAL=str(int(number)))
            wanted = -number if number == signal.SIGKILL else 130
            assert done.returncode == wanted, done.stderr
            hub.commit = COMMITS[1]  # the branch moves on
        again = run(hub, tmp_path, *EDU)
        assert again.returncode == 0, again.stderr
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")
    later = [route for _, route, _ in hub.requests[n_before:]]
    assert sum("revision/" in route for route in later) == 1, "resolved once, at the start"
    assert not any(COMMITS[1] in route for route in later)
    hub.commit = COMMITS[0]


def test_downloads_are_freed_on_the_way(fineweb, tmp_path):
    files, texts = fineweb
    watched = tmp_path / "watched"
    with serving(Hub({FINEWEB_EDU: files})) as hub:
        done = run(hub, tmp_path, *EDU, "--delete_downloads", WATCHED=str(watched))
    assert done.returncode == 0, done.stderr
    assert ids_of(tmp_path / "out") == [i for text in texts for i in (256, *text.encode())]
    assert max(map(int, watched.read_text().split())) <= 3
    left = [p for p in (tmp_path / "hf").rglob("*") if p.is_file() and p.stat().st_size > 1000]
    assert not left
    n_requests = len(hub.requests)
    assert n_requests and max(hub.counts().values()) <= 2, "a HEAD and a GET of each"


def test_freed_files_are_not_fetched_again_after_a_kill(fineweb, tmp_path):
    files, texts = fineweb
    kill = {"STOP_AT": "14", "SIGNAL": str(int(signal.SIGKILL))}
    with serving(Hub({FINEWEB_EDU: files})) as hub:
        done = run(hub, tmp_path, *EDU, "--delete_downloads", **kill)
        assert done.returncode == -signal.SIGKILL, done.stderr
        record = json.loads((tmp_path / "out/manifest.json.unfinished").read_text())
        assert record["position"][0] >= 1
        hub.requests.clear()
        assert run(hub, tmp_path, *EDU, "--delete_downloads").returncode == 0
    assert "000_00000.parquet" not in hub.counts()
    assert ids_of(tmp_path / "out") == [i for text in texts for i in (256, *text.encode())]
    assert not list((tmp_path / "hf").rglob("*.parquet"))


def test_plan_says_what_will_be_fetched_and_writes_nothing(fineweb, tmp_path):
    files, _ = fineweb
    with serving(Hub({FINEWEB_EDU: files})) as hub:
        done = run(hub, tmp_path, *EDU, "--dry_run")
    assert done.returncode == 0, done.stderr
    size = sum(map(len, files.values())) / 1e6
    for part in (
        COMMITS[0],
        "4 files",
        f"{size:.1f} MB",
        "needed on disk",
        "tokenizing",
        "dry run",
    ):
        assert part in done.stdout, done.stdout
    assert not hub.counts() and not (tmp_path / "out").exists()


def test_a_hub_without_the_data_is_one_line(fineweb, tmp_path):
    files, _ = fineweb
    with serving(Hub({FINEWEB_EDU: files, "some/other": {"a.txt": b"x"}})) as hub:
        line = one_line(run(hub, tmp_path, *EDU, "--revision", "v9"))
        assert FINEWEB_EDU in line and "RevisionNotFound" in line.replace(" ", "")
        hub.repos = {}
        assert "404" in one_line(run(hub, tmp_path, *EDU))
    assert not (tmp_path / "out").exists()


def test_no_network_is_one_line_at_once(tmp_path):
    line = one_line(run(Hub({}, endpoint="http://127.0.0.1:9"), tmp_path, *EDU))
    assert FINEWEB_EDU in line and not (tmp_path / "out").exists()


def test_files_that_are_there_need_no_network(fineweb, tmp_path):
    files, texts = fineweb
    for name, data in files.items():
        (tmp_path / "there" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "there" / name).write_bytes(data)
    hub = Hub({}, endpoint="http://127.0.0.1:9")
    for number, folder in enumerate([tmp_path / "there", tmp_path / "there/sample/10BT"]):
        done = run(hub, tmp_path, *EDU, "--local_dir", str(folder), out=f"out{number}")
        assert done.returncode == 0, done.stderr
        wanted = [i for text in texts for i in (256, *text.encode())]
        assert ids_of(tmp_path / f"out{number}") == wanted
    assert "no parquet files" in one_line(run(hub, tmp_path, *EDU, "--local_dir", str(ROOT)))


@pytest.fixture
def ready_made():
    """Shards as others publish them: one for validation, three for training, the last short."""
    rng = np.random.default_rng(0)
    files = {".gitattributes": b"x", "README.md": b"x"}
    for number in range(4):
        ids = rng.integers(0, 50257, 400 if number == 3 else 1000)
        ids[0] = 50256
        name = f"finewebedu_{'train' if number else 'val'}_{number:06d}.bin"
        files[name] = shard_bytes(ids)
    return files


READY = ("--source", "pretokenized")


def test_pretokenized_shards_are_fetched_checked_and_described(ready_made, tmp_path):
    faults = {f"cdn/{PRETOKENIZED}/finewebedu_train_000001.bin": ["drop", "damage", 503]}
    with serving(Hub({PRETOKENIZED: ready_made}, faults=faults)) as hub:
        done = run(hub, tmp_path, *READY, "--num_shards", "2")
        assert done.returncode == 0, done.stderr
        counts = hub.counts()
        again = run(hub, tmp_path, *READY, "--num_shards", "2")
        assert again.returncode == 0 and "already prepared" in again.stdout
        assert hub.counts() == counts, "nothing is fetched twice"
    out = tmp_path / "out"
    assert sorted(p.name for p in out.iterdir() if p.name[0] != ".") == [
        "finewebedu_train_000001.bin",
        "finewebedu_train_000002.bin",
        "finewebedu_val_000000.bin",
        "manifest.json",
    ]
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["revision"] == COMMITS[0] and manifest["dataset"] == PRETOKENIZED
    assert open_split(out, "train").n_tokens == 2000 and open_split(out, "val").n_tokens == 1000
    for command in ("verify", "stats"):
        script = [sys.executable, "prepare_fineweb.py", command, str(out)]
        assert subprocess.run(script, cwd=ROOT, capture_output=True).returncode == 0
    assert not (out / ".cache").exists()


def test_pretokenized_shards_that_are_none_are_refused_by_name(ready_made, tmp_path):
    name = "finewebedu_train_000002.bin"
    bad = {
        "not a token shard": b"\x00" * 2048,
        "expected .* bytes": ready_made[name][:-2],
        "id 60000": ready_made[name][:-2] + (60000).to_bytes(2, "little"),
    }
    for number, (pattern, data) in enumerate(bad.items()):
        with serving(Hub({PRETOKENIZED: {**ready_made, name: data}})) as hub:
            line = one_line(run(hub, tmp_path, *READY, out=f"out{number}", HF_HOME=str(number)))
        assert name in line and pattern.split(" .* ")[0] in line, line
        with pytest.raises(ValueError, match="did not finish"):
            open_split(tmp_path / f"out{number}", "train")
    with serving(Hub({PRETOKENIZED: ready_made})) as hub:
        assert "has 3" in one_line(run(hub, tmp_path, *READY, "--num_shards", "9"))
        del hub.repos[PRETOKENIZED]["finewebedu_val_000000.bin"]
        assert "no NAME_val" in one_line(run(hub, tmp_path, *READY))


def test_pretokenized_goes_on_at_its_commit(ready_made, tmp_path):
    faults = {f"cdn/{PRETOKENIZED}/finewebedu_train_000003.bin": [404]}
    with serving(Hub({PRETOKENIZED: ready_made}, faults=faults)) as hub:
        one_line(run(hub, tmp_path, *READY))
        hub.commit = COMMITS[1]
        hub.requests.clear()
        done = run(hub, tmp_path, *READY)
        assert done.returncode == 0, done.stderr
    assert not any("revision/" in route for _, route, _ in hub.requests)
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["revision"] == COMMITS[0] and len(manifest["shards"]) == 4
    assert Path(tmp_path / "out/finewebedu_train_000003.bin").exists()


def test_a_file_that_a_killed_run_had_begun_goes_on_where_it_was_cut(fineweb, tmp_path):
    files, texts = fineweb
    name = "sample/10BT/000_00000.parquet"
    repo = f"datasets--{FINEWEB_EDU.replace('/', '--')}"
    blob = tmp_path / "hf/hub" / repo / "blobs" / hashlib.sha256(files[name]).hexdigest()
    blob.parent.mkdir(parents=True)
    blob.with_name(f"{blob.name}.part").write_bytes(files[name][:5000])
    with serving(Hub({FINEWEB_EDU: files})) as hub:
        assert run(hub, tmp_path, *EDU).returncode == 0
    ranges = [asked for _, route, asked in hub.requests if "/cdn/" in route and name in route]
    assert ranges == ["bytes=5000-"]
    assert ids_of(tmp_path / "out") == [i for text in texts for i in (256, *text.encode())]
    assert blob.read_bytes() == files[name] and not list((tmp_path / "hf").rglob("*.part"))


def test_the_users_files_are_left_alone(ready_made, tmp_path):
    out = tmp_path / "out"
    (out / ".cache/huggingface").mkdir(parents=True)
    (out / ".cache/huggingface/token").write_text("precious")
    name = "finewebedu_train_000001.bin"
    (out / name).write_text("my notes")
    with serving(Hub({PRETOKENIZED: ready_made})) as hub:
        assert "no known data set" in one_line(run(hub, tmp_path, *READY))
        assert (out / name).read_text() == "my notes"
        (out / name).unlink()
        assert run(hub, tmp_path, *READY).returncode == 0
    assert (out / ".cache/huggingface/token").read_text() == "precious"


def test_shards_of_another_unfinished_data_set_are_not_overwritten(ready_made, tmp_path):
    faults = {f"cdn/{PRETOKENIZED}/finewebedu_train_000003.bin": [404]}
    with serving(Hub({PRETOKENIZED: ready_made, "a/b": ready_made}, faults=faults)) as hub:
        one_line(run(hub, tmp_path, *READY))
        before = hashes(tmp_path / "out")
        line = one_line(run(hub, tmp_path, *READY, "--dataset", "a/b"))
        assert "shards of an unfinished data set" in line and hashes(tmp_path / "out") == before


def test_splits_are_read_from_where_names_have_them(tmp_path):
    rng = np.random.default_rng(0)
    files = {
        f"my_val_set_{split}_000000.bin": shard_bytes(rng.integers(0, 50257, n))
        for split, n in (("val", 100), ("train", 300))
    }
    with serving(Hub({"a/b": files})) as hub:
        assert run(hub, tmp_path, *READY, "--dataset", "a/b").returncode == 0
    assert open_split(tmp_path / "out", "train").n_tokens == 300
    assert open_split(tmp_path / "out", "val").n_tokens == 100

"""Preparing data under faults: kills at random times, a full disk, Ctrl-C, huge row groups."""

import hashlib
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import ROOT, command_of, refused, run_script, small_disk

from rove.shards import open_split

pytestmark = pytest.mark.faults


def write_corpus(folder, n_files=3, n_documents=600):
    folder.mkdir()
    rng = np.random.default_rng(0)
    words = np.array(
        ["rotary", "value", "caf\u00e9", "the", "attention", "\u4e16\u754c", "of", "\n"]
    )
    for number in range(n_files):
        sizes = rng.integers(50, 1200, n_documents)
        texts = [" ".join(rng.choice(words, size)) for size in sizes]
        pq.write_table(pa.table({"text": texts}), folder / f"{number}.parquet", row_group_size=50)
    return folder / "*.parquet"


def arguments(pattern, out, workers=2):
    return ["prepare_fineweb.py", "--source", "files", "--files", str(pattern), "--out_dir",
            str(out), "--tokenizer", "byte", "--shard_tokens", "400000", "--num_workers",
            str(workers)]  # fmt: skip


def hashes(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def test_killed_at_random_times_and_run_again(tmp_path, count):
    pattern = write_corpus(tmp_path / "in")
    start = time.monotonic()
    assert run_script(*arguments(pattern, tmp_path / "whole", 1)).returncode == 0
    seconds = time.monotonic() - start
    rng = random.Random(0)
    for round_number in range(3):
        out, kills = tmp_path / f"out{round_number}", 0
        while kills < 3:
            process = subprocess.Popen(
                command_of(arguments(pattern, out)), cwd=ROOT, stdout=subprocess.DEVNULL
            )
            try:
                process.wait(timeout=rng.uniform(0.1, 0.9) * seconds)
                break  # it was faster than that
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                kills += 1
                count("prepare killed")
        assert run_script(*arguments(pattern, out)).returncode == 0
        assert hashes(out) == hashes(tmp_path / "whole")


def children_of(pid):
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True)
    return [int(word) for word in found.stdout.split()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_its_parent(tmp_path, count, number):
    """A unit is 30 MB of text here, many seconds of work: nobody waits for it."""
    text = "the rotation of values by the matrices of the keys " * 40_000
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"text": [text] * 60}), tmp_path / "in/a.parquet", row_group_size=15)
    command = arguments(tmp_path / "in/*.parquet", tmp_path / "out", workers=3)
    command[command.index("byte")] = "gpt2"
    process = subprocess.Popen(
        command_of(command), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    end = time.monotonic() + 60
    while len(workers := children_of(process.pid)) < 4:  # three and the resource tracker
        assert process.poll() is None and time.monotonic() < end, process.stderr.read()
        time.sleep(0.1)
    time.sleep(2)  # they are at work
    process.send_signal(number)
    process.wait(timeout=5)
    time.sleep(max(0, 1.0))
    assert not [pid for pid in workers if os.path.exists(f"/proc/{pid}/status") and alive(pid)]
    count(f"prepare ended by {number.name} with workers")


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_full_disk_is_one_line_and_goes_on_once_there_is_room(tmp_path, count):
    pattern = write_corpus(tmp_path / "in")
    assert run_script(*arguments(pattern, tmp_path / "whole", 1)).returncode == 0
    size = sum(p.stat().st_size for p in (tmp_path / "whole").iterdir())
    with small_disk(tmp_path / "disk", size // 1024 // 2) as disk:
        # the plan refuses before any work
        line = refused(run_script(*arguments(pattern, disk / "out")))
        assert "are needed" in line and "are free" in line
        # a disk that fills up on the way: the plan is told that there is room
        code = (
            "import sys; from rove.prepare import plan; plan.Plan.check_room = lambda self: None;"
        )
        code += "import prepare_fineweb; prepare_fineweb.main(sys.argv[1:])"
        command = [sys.executable, "-c", code, *arguments(pattern, disk / "out")[1:]]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert "No space left" in refused(done)
        with pytest.raises(ValueError, match="did not finish"):
            open_split(disk / "out", "train")
        subprocess.run(["mount", "-o", f"remount,size={4 * size}", str(disk)], check=True)
        done = run_script(*arguments(pattern, disk / "out"))
        assert done.returncode == 0, done.stderr
        assert hashes(disk / "out") == hashes(tmp_path / "whole")
    count("prepare on a full disk")


WRITE = """
import sys
import numpy as np, pyarrow as pa, pyarrow.parquet as pq
rng = np.random.default_rng(0)
words = np.array(["rotary", "value", "the", "attention", "of", "is", "turned\\n", "42"])
texts = [" ".join(rng.choice(words, 4000)) for _ in range(50)]
texts = texts * (2_000_000_000 // sum(map(len, texts)) + 1)
table = pa.table({"text": pa.array(texts, pa.large_string())})
with pq.ParquetWriter(sys.argv[1], table.schema, use_dictionary=False, compression="zstd") as file:
    file.write_table(table, row_group_size=len(texts))
"""
READ = """
import sys
from pathlib import Path
from rove.prepare import units
from rove.tokenizer import load_tokenizer
tokenizer = load_tokenizer("gpt2")
found = list(units.units_of("a", Path(sys.argv[1])))
n_tokens = []
for unit in (found[0], found[-1]):
    encoded = units.encode_unit(tokenizer, unit, 0.1)
    n_tokens.append(sum(ids.size for ids in encoded.ids.values()))
status = Path("/proc/self/status").read_text().splitlines()
peak_kib = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
print(len(found), min(n_tokens), peak_kib // 1024)
"""


def test_row_groups_of_two_gigabytes_take_less_than_one(tmp_path):
    """One worker reads the first and the last part of such a row group.

    Each part runs in a process of its own.
    """
    path = tmp_path / "a.parquet"
    subprocess.run([sys.executable, "-c", WRITE, str(path)], check=True)
    metadata = pq.read_metadata(path)
    assert metadata.num_row_groups == 1
    assert metadata.row_group(0).column(0).total_uncompressed_size > 2e9
    done = subprocess.run(
        [sys.executable, "-c", READ, str(path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    n_units, n_tokens, peak_mib = map(int, done.stdout.split())
    assert n_units > 50 and n_tokens > 3_000_000
    assert peak_mib < 1000, peak_mib

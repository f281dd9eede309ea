"""The study's runner, stopped from outside: nothing is left running, and it goes on."""

import os
import signal
import subprocess
import sys
import time

import pytest
from helpers import ROOT

pytestmark = pytest.mark.faults


def trainings(out):
    """Ids of the processes that train below a folder."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read().decode().split("\0")
        except OSError:
            continue
        if any("train.py" in word for word in words) and any(str(out) in word for word in words):
            found.append(int(pid))
    return found


def wait_for(holds, seconds):
    start = time.monotonic()
    while not holds():
        assert time.monotonic() - start < seconds
        time.sleep(0.2)


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_study_leaves_nothing_running_and_goes_on(tmp_path, count, number):
    argv = [sys.executable, ROOT / "studies/run.py", "--experiments", "E1", "--seeds", "1"]
    study = subprocess.Popen(
        [*argv, "--out", tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(lambda: len(list((tmp_path / "runs").glob("E1/*/*/checkpoints"))) > 0, 240)
    study.send_signal(number)
    out, err = study.communicate(timeout=60)
    assert study.returncode == 130 and err.strip().splitlines()[-1].startswith("interrupted")
    assert "Traceback" not in err
    wait_for(lambda: not trainings(tmp_path), 10)
    (tmp_path / "runs/E1/k1-h1").is_dir()
    count("stopped study")

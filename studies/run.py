"""Run the study's experiments through train.py and eval.py; the same command goes on.

    python studies/run.py                              # all of them: a night on two cores
    python studies/run.py --experiments E1,E2 --seeds 6

Runs and text lie in OUT/runs and OUT/data, results in OUT/E1.json, ...; studies/report.py makes
tables and figures of these. A run is done when its entry.json is there or its entry stands in OUT's
results; a failed one is named, the others go on, and the exit code is 1.
"""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from tqdm import tqdm  # noqa: E402

from rove.config import load  # noqa: E402
from rove.errors import user_errors  # noqa: E402
from rove.files import check_folder, write_json  # noqa: E402
from rove.words import names_in  # noqa: E402
from studies import tasks  # noqa: E402
from studies.entries import GRID, collect, key_of, make_entry, read_entries  # noqa: E402
from studies.experiments import EXPERIMENTS, STDLIB, Experiment, Trial  # noqa: E402

TARGETS = 131072  # of each length
N_DOCUMENTS, DOCUMENT = 500, 10_000  # of an ordered window's text, bytes


@dataclass(frozen=True)
class Settings:
    experiments: str = ",".join(EXPERIMENTS)
    """which to run"""
    seeds: int | None = None
    """seeds of each arm; null: as many as the method says"""
    workers: int = 2
    """runs at once, of one thread each"""
    out: str = "out/studies"
    """folder of texts, runs and results"""


class FailedError(Exception):
    """A script of the project stopped; the log says why."""


RUNNING: set[subprocess.Popen[bytes]] = set()
STOPPING = threading.Event()  # no further script begins


def script(log: Path, name: str, *arguments: object) -> None:
    """Run a script of the project in one thread; its output goes to the end of a log.

    FailedError if it fails, or is not to begin any more.
    """
    if STOPPING.is_set():
        raise FailedError(f"{name} was not begun")
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(ROOT / name), *map(str, arguments)]
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {name} {' '.join(command[2:])}\n")
        file.flush()
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        child = subprocess.Popen(command, stdout=file, stderr=file, cwd=ROOT, env=env)
        RUNNING.add(child)
        if STOPPING.is_set():
            child.terminate()
        code = child.wait()
        RUNNING.discard(child)
    if code:
        raise FailedError(f"{name} ended with {code}, see {log}")


def prepare(data: str, out: Path) -> Path:
    """Make a text's shards, or find them there; return their folder."""
    folder, log = out / "data" / data, out / "data" / f"{data}.log"
    if data == STDLIB:
        source: list[object] = ["--source", "python-stdlib"]
    else:
        _, k, seed = data.split("-")
        text = out / "data" / f"{data}.jsonl"
        if not folder.exists():
            tasks.write_window_task(text, int(k[1:]), int(seed), N_DOCUMENTS, DOCUMENT)
        source = ["--source", "files", "--files", text, "--val_fraction", 0.15]
    if not (folder / "manifest.json").exists():
        script(log, "prepare_fineweb.py", *source, "--tokenizer", "byte", "--out_dir", folder)
    return folder


def flags_of(settings: dict[str, Any]) -> list[str]:
    """Return settings as flags of a script."""
    return [f"--{key}={value}" for key, value in settings.items()]


def run_trial(trial: Trial, out: Path) -> None:
    """Train, evaluate and write entry.json, as far as that is not done."""
    run, log = out / "runs" / trial.name, out / "runs" / f"{trial.name}.log"
    if (run / "entry.json").exists():
        return
    data = out / "data" / trial.data
    where: dict[str, Any] = {"seed": trial.seed}
    settings = {key: x for key, x in trial.flags.items() if not key.startswith("start.")}
    weights = {
        key.removeprefix("start."): x for key, x in trial.flags.items() if key not in settings
    }
    if weights:
        file = out / "start" / f"{trial.name}.pt"
        weights |= {key: x for key, x in settings.items() if key.startswith("model.")} | where
        script(log, "studies/start.py", *flags_of(weights | {"file": file}))
        settings["train.init_from"] = file
    where |= {"data.dir": data, "out_dir": run, "train.resume": "auto"}
    script(log, "train.py", *flags_of(settings | where))
    if trial.data.startswith("window"):
        task = ["--checkpoint", run, "--data", data, "--out", run / "eval/window.json"]
        script(log, "studies/window.py", *task, "--max_tokens", TARGETS)
    else:
        measure(trial, run, log)
    write_json(run / "entry.json", make_entry(trial, run))


def measure(trial: Trial, run: Path, log: Path) -> None:
    """Measure perplexities by length, with and without YaRN, and over a grid if asked to."""
    block_size, mode = int(trial.flags["model.block_size"]), str(trial.flags["model.pos_mode"])
    lengths = ",".join(str(block_size * times) for times in (1, 2, 4, 8))
    common = ["--checkpoint", run, "--lengths", lengths, "--max_tokens", TARGETS]
    common += ["--batch_size", 8]
    readings = ["yarn", "orig"] if mode == "rove" else ["yarn"]
    modes = ["--pos_mode", f"{mode},{mode}+yarn", "--yarn_values", ",".join(readings)]
    script(log, "eval.py", "perplexity", *common, *modes)
    for values in readings if trial.has_grid else ():
        grid = ["--yarn_values", values, "--out", run / f"eval/{GRID}_{values}.json"]
        grid += ["--pos_mode", f"{mode}+yarn", "--yarn_factor", "2,4,8,16"]
        script(log, "eval.py", "perplexity", *common, *grid)


def run_all(experiments: list[Experiment], n_seeds: int | None, workers: int, out: Path) -> int:
    """Run all trials of these experiments; return how many failed."""
    known = {(e.name, *key_of(entry)) for e in experiments
             for entry in read_entries(out / f"{e.name}.json")}  # fmt: skip
    trials = [trial for e in experiments for trial in e.trials(n_seeds)
              if (e.name, trial.variant, trial.seed, trial.arm) not in known]  # fmt: skip
    failed = 0
    with ThreadPoolExecutor(workers) as pool:
        try:
            texts = dict.fromkeys(trial.data for trial in trials)
            for data in tqdm(texts, desc="texts", disable=None):
                prepare(data, out)
            for n, (trial, work) in enumerate(
                [(t, pool.submit(run_trial, t, out)) for t in trials]
            ):
                try:
                    work.result()
                    print(f"done: {trial.name} ({n + 1} of {len(trials)})", flush=True)
                except FailedError as error:
                    failed += 1
                    print(f"failed: {trial.name}: {error}", file=sys.stderr, flush=True)
                collect(trial.experiment, out)
        except BaseException:  # Ctrl-C or SIGTERM: a training saves and ends
            STOPPING.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for child in list(RUNNING):
                child.terminate()
            raise
    for e in experiments:
        n = collect(e.name, out)
        print(f"{out / e.name}.json: {n} runs of {e.what}", flush=True)
    return failed


def main(argv: list[str]) -> None:
    """Run what the command line names."""
    s = load(Settings, argv, prog="studies/run.py", description="Run the study's experiments.")
    with user_errors():
        names = names_in("experiments", s.experiments)
        for name in names:
            if name not in EXPERIMENTS:
                raise ValueError(f"experiments={name!r}: must be among {', '.join(EXPERIMENTS)}")
        for key, value in (("seeds", s.seeds), ("workers", s.workers)):
            if value is not None and value < 1:
                raise ValueError(f"{key}={value}: must be at least 1")
        check_folder("--out", Path(s.out))
        chosen = [EXPERIMENTS[name] for name in names]
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        STOPPING.clear()
        try:
            failed = run_all(chosen, s.seeds, s.workers, Path(s.out))
        except FailedError as error:
            raise SystemExit(f"error: {error}") from None
    if failed:
        raise SystemExit(f"error: {failed} runs failed; the same command tries them again")


if __name__ == "__main__":
    main(sys.argv[1:])

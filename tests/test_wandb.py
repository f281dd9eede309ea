"""The real wandb, offline: what a trained and resumed run and its report leave for `wandb sync`,
what a server gets of it, and that nothing is asked of the network before."""

import gzip
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import warnings
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import yaml
from helpers import make_data, run_script, tiny_flags
from test_report import core, lm_eval, make_run, perplexity, positions, ruler

import report
import train
from rove import tracking
from rove.checkpoint import load_checkpoint
from rove.metrics import read_metrics

PARTS = [range(1, 9), range(5, 13)]  # steps before and after a kill behind the checkpoint of step 4


# ---------------------------------------------------------------- reading .wandb files


def records(file):
    """Every record of a .wandb file: a log in blocks of 32 KiB, each fragment with its checksum."""
    from wandb.proto.wandb_internal_pb2 import Record

    content = file.read_bytes()
    assert content.startswith(b":W&B")
    found, whole, at = [], b"", 7
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        checksum, size = (int.from_bytes(content[at + i : at + i + n], "little") for i, n in SPAN)
        kind, body = content[at + 6], content[at + 7 : at + 7 + size]
        assert zlib.crc32(bytes([kind]) + body) == checksum
        whole, at = whole + body, at + 7 + size
        if kind in (1, 4):  # a whole record, or its last fragment
            found.append(Record.FromString(whole))
            whole = b""
    return found


SPAN = ((0, 4), (4, 2))


def values(items):
    """Items of a history, summary or config record as a dict."""
    return {i.key or "|".join(i.nested_key): json.loads(i.value_json) for i in items}


def read_part(folder):
    """What one offline folder tells: its run, config, rows, x axes, summary, kinds of records."""
    (file,) = folder.glob("*.wandb")
    part = SimpleNamespace(files=folder / "files", rows=[], axes={}, summary={}, config={})
    part.kinds = set()
    for record in records(file):
        part.kinds.add(kind := record.WhichOneof("record_type"))
        if kind == "run":
            part.run, part.config = record.run, values(record.run.config.update)
        elif kind == "history":
            part.rows.append(values(record.history.item))
        elif kind == "metric" and record.metric.step_metric:
            name = record.metric.name or record.metric.glob_name
            part.axes[name] = record.metric.step_metric
        elif kind == "summary":
            part.summary |= values(record.summary.update)
    return part


def parts_of(run):
    return [read_part(folder) for folder in sorted(run.glob("wandb/offline-run-*"))]


def end_wandb():
    """Wait until wandb's own process has written its files and ended, as it does at exit."""
    import wandb

    wandb.teardown()


# ---------------------------------------------------------------- a run, killed and resumed


@pytest.fixture(scope="module")
def own_folders(tmp_path_factory):
    """wandb's folders outside the runs, and the environment as it was, put back at the end."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("DATA", "CACHE", "CONFIG"):
            patch.setenv(f"WANDB_{name}_DIR", str(tmp_path_factory.mktemp(name.lower())))
        for name in ("ERROR_REPORTING", "API_KEY", "MODE", "BASE_URL"):
            patch.setenv(f"WANDB_{name}", "")
            patch.delenv(f"WANDB_{name}")
        yield


@pytest.fixture(scope="module")
def proxied():
    """A proxy that never answers, and the environment that leads every request to it."""
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.setblocking(False)
        url = f"http://127.0.0.1:{trap.getsockname()[1]}"
        env = {name: url for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
        yield trap, env | {"no_proxy": "", "NO_PROXY": ""}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, own_folders, proxied):
    """A run with two offline parts: stopped at step 8, its last checkpoint that of step 4."""
    folder = tmp_path_factory.mktemp("trained")
    run, data = folder / "run", make_data(folder / "data")
    changes = {"train__checkpoint_interval": 4, "log__wandb": "offline"}
    changes |= {"model__pos_mode": "rove", "log__wandb_project": "trial"}
    result = run_script("train.py", *tiny_flags(data, run, **changes), env=proxied[1])
    assert result.returncode == 0 and "wandb is off" not in result.stderr, result.stderr
    shutil.copy(run / "metrics.jsonl", folder / "before.jsonl")
    (run / "checkpoints/step_00000008.pt").unlink()
    changes |= {"train__max_steps": 12, "train__resume": "auto"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that checkpoint is gone
        train.main(tiny_flags(data, run, **changes))
    end_wandb()
    return run


def test_offline_training_asks_nothing_of_the_network(trained, proxied):
    with pytest.raises(BlockingIOError):
        proxied[0].accept()


def test_the_parts_of_a_resumed_run_hold_every_step(trained):
    parts, run_id = parts_of(trained), load_checkpoint(trained)["wandb_run_id"]
    assert [part.run.run_id for part in parts] == [run_id] * 2 and all(p.run.resume for p in parts)
    assert [[row["step"] for row in p.rows] for p in parts] == [[*steps] for steps in PARTS]
    before = [json.loads(line) for line in (trained.parent / "before.jsonl").open()]
    for part, rows in zip(parts, (before, read_metrics(trained)[4:]), strict=True):
        own = [{k: v for k, v in row.items() if not k.startswith("_")} for row in part.rows]
        assert own == rows, "each row as it stands in metrics.jsonl"
        assert all(row["tokens"] == 256 * row["step"] for row in own)


def test_a_run_tells_its_settings_its_commit_its_kind_and_its_axes(trained):
    settings = yaml.safe_load((trained / "config.yaml").read_text())
    for part in parts_of(trained):
        assert part.config.pop("git_commit") == tracking.git_commit()
        del part.config["_wandb"]
        assert set(part.config) == set(settings) and part.config["model"] == settings["model"]
        assert (part.run.project, part.run.display_name) == ("trial", "run")
        assert list(part.run.tags) == ["rove", "2/2/32"] and part.run.run_group == "rove 2/2/32"
        axes = {"train/loss": "tokens", "val/loss": "tokens"}
        axes |= {"lr": "step", "grad_norm": "step", "perf/*": "step"}
        assert part.axes.items() >= axes.items()
        assert not part.kinds & {"output", "output_raw"}, "the console is left alone"
    assert part.config == settings


def test_the_commit_is_that_of_the_checkout_itself(tmp_path, monkeypatch):
    def git(*arguments):
        name = ("-c", "user.name=n", "-c", "user.email=e@x")
        command = ["git", "-C", str(tmp_path / "outer"), *name, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    inner = tmp_path / "outer/inner"
    inner.mkdir(parents=True)
    assert tracking.git_commit(inner.parent) is None, "no checkout"
    git("init", "-q")
    assert tracking.git_commit(inner.parent) is None, "no commit"
    (inner / "file").write_text("1")
    git("add", ".")
    git("commit", "-qm", "one")
    git("tag", "-am", "v1", "v1")
    commit = git("rev-parse", "HEAD")
    (inner / "untracked").write_text("2")
    assert tracking.git_commit(inner.parent) == commit
    assert tracking.git_commit(inner) is None, "another project's"
    (inner / "file").write_text("2")
    assert tracking.git_commit(inner.parent) == f"{commit}-dirty"
    hanging = tmp_path / "bin/git"
    hanging.parent.mkdir()
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o755)
    monkeypatch.setattr(tracking, "GIT_S", 0.2)
    monkeypatch.setenv("PATH", f"{hanging.parent}{os.pathsep}{os.environ['PATH']}")
    assert tracking.git_commit(inner.parent) is None, "too slow"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tracking.git_commit(inner.parent) is None, "no git"


def test_a_logged_out_wandb_without_a_terminal_is_one_warning(tmp_path, own_folders, proxied):
    changes = {"log__wandb": "online", "train__max_steps": 4}
    flags = tiny_flags(make_data(tmp_path / "data"), tmp_path / "run", **changes)
    home = {"HOME": str(tmp_path), "MPLCONFIGDIR": str(tmp_path)}
    result = run_script("train.py", *flags, env=proxied[1] | home)
    assert result.returncode == 0 and result.stderr.count("wandb is off from here on") == 1
    assert "Traceback" not in result.stderr and len(read_metrics(tmp_path / "run")) == 4


# ---------------------------------------------------------------- the report


@pytest.fixture(scope="module")
def published(trained):
    """The run evaluated and, beside one that never met wandb, its report published offline."""
    for mode in ("rove", "rove+yarn"):
        perplexity(trained, mode, step=12)
    perplexity(trained, "rove", "tail", step=12)
    positions(trained, "rove", step=12)
    core(trained, "rove", step=12)
    ruler(trained, "rove+yarn", step=12)
    lm_eval(trained, "rove", step=12)
    (trained / "samples_1.txt").write_text("Once upon\na time")
    other, out = make_run(trained.parent / "other"), trained.parent / "report"
    flags = ["--out", out, "--wandb", "offline", "--wandb_project", "trial"]
    report.main([str(argument) for argument in (trained, other, *flags)])
    end_wandb()
    return SimpleNamespace(run=trained, other=other, out=out)


def table_file(part, key):
    (row,) = part.rows
    assert row[f"{key}|_type"] == "table-file"
    table = json.loads((part.files / row[f"{key}|path"]).read_text())
    return [dict(zip(table["columns"], line, strict=True)) for line in table["data"]]


def test_a_report_goes_on_with_the_trainings_run(published):
    *before, part = parts_of(published.run)
    assert len(before) == 2 and part.run.run_id == before[0].run.run_id and part.run.resume
    assert part.axes == before[0].axes, "wandb forgets them otherwise"
    assert part.run.display_name == "" and "git_commit" not in part.config, "left as they are"
    (other,) = parts_of(published.other)
    assert other.run.display_name == "other" and other.run.run_id != part.run.run_id
    assert {key.split("|")[0] for key in other.rows[0] if key[0] != "_"} > {"report/loss"}
    assert all(key.startswith(("report/", "_")) for key in other.rows[0]), "nothing was measured"


def test_results_are_tables_and_numbers(published):
    part = parts_of(published.run)[-1]
    packed = json.loads((published.run / "eval/perplexity_packed_rove+yarn.json").read_text())
    found = table_file(part, "eval/perplexity_packed_rove+yarn")
    keys = ("length", "nll", "ppl", "bits_per_byte", "yarn_factor", "tokens")
    want = [{"mode": "rove+yarn"} | {key: row[key] for key in keys} for row in packed["results"]]
    assert found == want and len(found) == 4
    of = json.loads((published.run / "eval/core_crop_rove.json").read_text())
    for row in table_file(part, "eval/core_crop_rove"):
        assert row["accuracy"] == of["tasks"][row["task"]]["accuracy"]
        assert row["centered_v1"] == of["tasks"][row["task"]]["centered_v1"]
    rows = table_file(part, "eval/ruler_stratified_rove+yarn")
    assert [(r["task"], r["length"], r["exact"]) for r in rows][1] == ("cwe", 64, 0.5)
    assert table_file(part, "eval/perplexity_positions_rove")[2]["to"] == 256
    text = {"file": "samples_1.txt", "text": "Once upon\na time"}
    assert table_file(part, "samples") == [text]
    by_length = {row["length"]: row["nll"] for row in packed["results"]}
    for length, nll in by_length.items():
        assert part.summary[f"eval/perplexity/rove+yarn/{length}/nll"] == nll
    assert "eval/perplexity_tail/rove/32/nll" in part.summary
    assert part.summary["eval/core/rove/core_v1"] == of["core_v1"]
    assert part.summary["eval/ruler/rove+yarn/64/cwe/exact"] == 0.5
    first = {"mode": "rove", "task": "toy", "metric": "acc", "value": 0.5, "stderr": 0.05}
    assert table_file(part, "eval/lm_eval_rove")[0] == first
    assert part.summary["eval/lm_eval/rove/words/word_perplexity"] == 31.5
    assert part.summary["val/loss"] == read_metrics(published.run)[-1]["val/loss"]


def test_a_report_is_there_with_its_plots(published):
    for run in (published.run, published.other):
        part = parts_of(run)[-1]
        assert not (part.files / "report.md").is_symlink(), "it stays as it was sent"
        assert (part.files / "report.md").read_bytes() == (published.out / "report.md").read_bytes()
        plots = list(published.out.glob("*.png"))
        for plot in plots:
            image = part.files / part.rows[0][f"report/{plot.stem}|path"]
            assert image.read_bytes() == plot.read_bytes()
        assert len(plots) == 8


def test_numbers_have_names_apart(tmp_path):
    from rove.report.publish import scalars
    from rove.report.read import read_runs

    run = make_run(tmp_path / "run", "rove")
    rows = json.loads(perplexity(run, "rove+yarn").read_text())["results"]
    perplexity(run, "rove+yarn", name="fixed", rows=[row | {"yarn_factor": 4.0} for row in rows])
    perplexity(run, "rove+yarn", yarn_values="orig", name="orig")
    perplexity(run, "rove+yarn", mask_eot=True, name="masked")
    found = list(scalars(read_runs([str(run)])[1]))
    assert len(dict(found)) == len(found) == 4 * 4 * 3
    names = {name.rsplit("/", 2)[0] for name, _ in found}
    assert names == {
        *("eval/perplexity/rove+yarn, values orig", "eval/perplexity_no_eot/rove+yarn"),
        *("eval/perplexity/rove+yarn (fixed), s=4", "eval/perplexity/rove+yarn (fixed)"),
        "eval/perplexity/rove+yarn (perplexity_packed_rove+yarn)",
    }


FAULTS = {
    "missing": (None, "install"),
    "not logged in": ({"init": "no API key"}, "no API key"),
    "lost on the way": ({"log": "connection lost"}, "connection lost"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_wandb_is_one_line_after_the_report(tmp_path, monkeypatch, capsys, fault):
    calls, word = [], FAULTS[fault][1]

    def act(name):
        def call(*_, **__):
            calls.append(name)
            if name in FAULTS[fault][0]:
                raise RuntimeError(FAULTS[fault][0][name])
            return SimpleNamespace(
                log=act("log"), finish=act("finish"), define_metric=act("define")
            )

        return call

    fake = SimpleNamespace(init=act("init"), Image=str, Table=dict)
    monkeypatch.setitem(sys.modules, "wandb", None if fault == "missing" else fake)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    run, out = make_run(tmp_path / "run"), tmp_path / "out"
    with pytest.raises(SystemExit) as stop:
        report.main([str(run), "--out", str(out), "--wandb", "online"])
    shown = capsys.readouterr()
    assert stop.value.code == 2 and shown.err.count("\n") == 1 and word in shown.err
    assert shown.err.startswith("error: --wandb online: ") and "wrote" in shown.out
    assert (out / "report.md").exists() and (out / "loss.png").exists()
    assert ("finish" in calls) == (fault == "lost on the way"), "what was begun is ended"
    n_calls = len(calls)
    report.main([str(run), "--out", str(out)])
    assert len(calls) == n_calls, "nothing unless asked for"


# ---------------------------------------------------------------- a server that takes it


class Server(BaseHTTPRequestHandler):
    """As much of wandb's server as `wandb sync` asks for: runs, their lines and their files."""

    protocol_version = "HTTP/1.1"
    runs, uploads = {}, []

    def log_message(self, *_):
        pass

    def do_PUT(self):  # noqa: N802
        self.body()
        self.uploads.append(self.path.removeprefix("/file/"))
        self.reply({})

    def do_POST(self):  # noqa: N802
        body = json.loads(self.body())
        if self.path.endswith("/file_stream"):
            run = self.runs[self.path.split("/")[-2]]
            for name, part in (body.get("files") or {}).items():
                if name == "wandb-history.jsonl":
                    assert part["offset"] == len(run["rows"]), "lines are appended"
                    run["rows"] += map(json.loads, part["content"])
                elif name == "wandb-summary.json":
                    run["summary"] = part["content"][-1]
            return self.reply({})
        answer = getattr(self, str(body.get("operationName")), lambda **_: {})
        return self.reply({"data": answer(**(body.get("variables") or {}))})

    def body(self):
        raw = self.rfile.read(int(self.headers["Content-Length"] or 0))
        return gzip.decompress(raw) if self.headers["Content-Encoding"] == "gzip" else raw

    def reply(self, content):
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def Viewer(self, **_):  # noqa: N802
        return {"viewer": {"id": "u", "entity": "me", "username": "me", "flags": "{}"}}

    def RunResumeStatus(self, name, **_):  # noqa: N802
        run = self.runs.get(name)
        if run is None:
            return {"model": {"bucket": None}}
        tail = json.dumps([json.dumps(row) for row in run["rows"][-1:]])
        counts = {"historyLineCount": len(run["rows"]), "eventsLineCount": 0, "logLineCount": 0}
        told = {"historyTail": tail, "eventsTail": "[]", "summaryMetrics": run["summary"]}
        told |= {"config": run["config"], "tags": [], "wandbConfig": '{"t": 1}'}
        return {"model": {"bucket": {"id": "r", "name": name, "displayName": "", **counts, **told}}}

    def UpsertBucket(self, name, config=None, **_):  # noqa: N802
        run = self.runs.setdefault(name, {"rows": [], "summary": "{}", "config": "{}"})
        run["config"] = config or run["config"]
        project = {"id": "p", "name": "trial", "entity": {"id": "e", "name": "me"}}
        bucket = {"id": "r", "name": name, "config": run["config"], "project": project}
        return {"upsertBucket": {"bucket": bucket | {"historyLineCount": len(run["rows"])}}}

    def CreateRunFiles(self, files, **_):  # noqa: N802
        host = self.headers["Host"]
        urls = [{"name": name, "uploadUrl": f"http://{host}/file/{name}"} for name in files]
        return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": urls}}

    def CreateArtifact(self, **_):  # noqa: N802
        latest = {"id": "s", "latestArtifact": {"id": "a", "versionIndex": 0}}
        artifact = {"id": "a", "state": "COMMITTED", "artifactSequence": latest}
        return {"createArtifact": {"artifact": artifact}}


@pytest.fixture
def with_server(own_folders, tmp_path):
    """Run Python with these arguments in a process that knows the server; return its stderr."""
    Server.runs.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        known = {"WANDB_BASE_URL": url, "WANDB_API_KEY": "0" * 40, "WANDB_ERROR_REPORTING": "false"}
        known["WANDB_DIR"] = str(tmp_path)  # wandb sync makes a folder, by default where it is
        yield lambda *arguments: run_script(*arguments, env=known)
        server.shutdown()


ONLINE = """
import sys
from pathlib import Path
from types import SimpleNamespace
from rove.metrics import Wandb

run, run_id = Path(sys.argv[1]), None
log = SimpleNamespace(wandb="online", wandb_project="trial", run_name=None)
model = {"pos_mode": "rope", "n_layer": 2, "n_head": 2, "n_embd": 32}
for steps in (range(1, 9), range(5, 13)):
    wandb = Wandb(log, run, run_id, {"model": model})
    for step in steps:
        wandb.log({"step": step, "tokens": 256 * step, "train/loss": 1 / step})
    wandb.finish()
    run_id = wandb.id
"""


def test_a_run_resumed_online_is_told_its_steps_again_without_a_warning(with_server, tmp_path):
    result = with_server("-c", ONLINE, tmp_path)
    assert result.returncode == 0 and "WARNING" not in result.stderr, result.stderr
    assert "Resuming run" in result.stderr and "wandb is off" not in result.stderr
    (run,) = Server.runs.values()
    assert [row["step"] for row in run["rows"]] == [*PARTS[0], *PARTS[1]]


def test_sync_sends_training_and_report_as_one_run(published, with_server):
    result = with_server("-m", "wandb", "sync", published.run / "wandb")
    assert result.returncode == 0 and result.stderr.count("Finished syncing") == 3, result.stderr
    (run,) = Server.runs.values()
    assert [row.get("step") for row in run["rows"]] == [*PARTS[0], *PARTS[1], None]
    steps = [row["_step"] for row in run["rows"]]
    assert steps == sorted(set(steps)), "wandb's own count rises all the same"
    summary, config = json.loads(run["summary"]), json.loads(run["config"])
    assert summary["step"] == 12 and "eval/perplexity/rove+yarn/128/nll" in summary
    assert config["git_commit"]["value"] == tracking.git_commit()
    axes = config["_wandb"]["value"]["m"]
    (loss,) = (metric for metric in axes if metric.get("1") == "train/loss")
    assert axes[loss["5"] - 1]["1"] == "tokens"
    assert {"report.md"} < set(Server.uploads)
    assert sum(".table.json" in name for name in Server.uploads) == 8

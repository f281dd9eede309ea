"""Settings: precedence, one-line errors, files that stay data, round trips."""

import os
import random
import subprocess
import sys
from dataclasses import FrozenInstanceError, dataclass, field, replace
from pathlib import Path
from typing import Literal

import pytest
import torch
import yaml

from rove.config import flatten, load, to_dict, to_yaml
from rove.errors import import_package, user_errors

REPO = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Model:
    n_layer: int = 12
    """Number of blocks."""
    vocab_size: int | None = 50257
    """Rows of the embedding;
    null takes 100% of the data's."""
    dropout: float = 0.0
    pos_mode: Literal["rope", "rove", "rope+yarn"] = "rope"
    """Position mode."""

    def __post_init__(self) -> None:
        if self.n_layer < 1:
            raise ValueError(f"model.n_layer is {self.n_layer}:\n  give 1 or more")


@dataclass(frozen=True)
class Deep:
    rate: float | None = 0.5
    """Rate at depth three."""


@dataclass(frozen=True)
class Optim:
    lr: float = 6e-4
    """Peak learning rate."""
    deep: Deep = field(default_factory=lambda: Deep(rate=0.25))


@dataclass(frozen=True)
class Log:
    wandb: bool = False
    run_name: str | None = None
    compile: bool | Literal["auto"] = "auto"
    items: str = "x"  # also the name of a method of jsonargparse's Namespace


@dataclass(frozen=True)
class Config:
    model: Model = field(default_factory=lambda: Model(vocab_size=None))
    """The model."""
    optim: Optim = field(default_factory=Optim)
    log: Log = field(default_factory=Log)
    out_dir: str = "out"
    """Folder of the run."""
    seed: int = 1


@dataclass(frozen=True)
class Required:
    checkpoint: str
    """Run folder or file."""
    prompt: str = ""
    top_k: int | None = None


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]):
    """Return a function that gives the one line with which `load` refuses its arguments."""

    def line(argv: list[str], root: type = Config) -> str:
        with pytest.raises(SystemExit) as stop:
            load(root, argv)
        out, err = capsys.readouterr()
        assert stop.value.code == 2 and out == ""
        assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n")
        return err

    return line


@pytest.fixture
def write(tmp_path: Path):
    """Return a function that writes a config file and gives its path."""

    def file(text: str | bytes, name: str = "config.yaml") -> str:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return file


# ---- values ----


def test_defaults_of_factories_hold() -> None:
    config = load(Config, [])
    assert config == Config()
    assert config.model.vocab_size is None and config.optim.deep.rate == 0.25


def test_a_group_given_in_part_keeps_its_other_defaults(write) -> None:
    file = write("model: {n_layer: 3}\noptim: {lr: 1}\n")
    for config in (
        load(Config, ["--config", file]),
        load(Config, ["--model.n_layer", "3", "--optim.lr=1"]),
    ):
        assert config.model == Model(n_layer=3, vocab_size=None)
        assert config.optim == Optim(lr=1.0)
        assert type(config.optim.lr) is float


def test_the_result_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        load(Config, []).seed = 3  # type: ignore[misc]


def test_defaults_then_files_in_order_then_flags_wherever_they_stand(write) -> None:
    a = write("seed: 10\nout_dir: a\nmodel: {n_layer: 10, dropout: 0.1}\n", "a.yaml")
    b = write("seed: 20\nmodel: {n_layer: 20}\n", "b.yaml")
    files = (["--config", a], [f"--config={b}"])
    flag = ["--seed", "30"]
    for argv in (
        [*flag, *files[0], *files[1]],
        [*files[0], *flag, *files[1]],
        [*files[0], *files[1], *flag],
    ):
        config = load(Config, argv)
        assert (config.seed, config.out_dir) == (30, "a")
        assert (config.model.n_layer, config.model.dropout) == (20, 0.1)
    assert load(Config, [*files[1], *files[0]]).seed == 10
    assert load(Config, ["--seed", "4", "--seed=5"]).seed == 5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("optim: {lr: 6e-4}", {"optim.lr": 6e-4}),
        ("optim: {lr: 1.5E+3}", {"optim.lr": 1500.0}),
        ("optim: {lr: -.inf}", {"optim.lr": float("-inf")}),
        ("seed: 1_000", {"seed": 1000}),
        ("model: {vocab_size: null}", {"model.vocab_size": None}),
        ("model: {vocab_size: 5}", {"model.vocab_size": 5}),
        ("optim: {deep: {rate: }}", {"optim.deep.rate": None}),
        ("log: {compile: true}", {"log.compile": True}),
        ("log: {compile: auto, wandb: True}", {"log.compile": "auto", "log.wandb": True}),
        ("log: {run_name: 2020-01-01}", {"log.run_name": "2020-01-01"}),
        ("log: {run_name: 'null'}", {"log.run_name": "null"}),
        ("log: {run_name: 12:30}", {"log.run_name": "12:30"}),
        ("out_dir: |\n  a\n  b\n", {"out_dir": "a\nb\n"}),
        ("model.n_layer: 3", {"model.n_layer": 3}),
        ("seed: &s 3\nmodel: {n_layer: *s}", {"seed": 3, "model.n_layer": 3}),
        ("\ufeffout_dir: é", {"out_dir": "é"}),
        ("{}", {}),
    ],
)
def test_values_of_files(write, text: str, expected: dict[str, object]) -> None:
    got = flatten(to_dict(load(Config, ["--config", write(text)])))
    assert {key: got[key] for key in expected} == expected
    assert [type(got[key]) for key in expected] == [type(v) for v in expected.values()]


@pytest.mark.parametrize(
    ("argv", "key", "expected"),
    [
        (["--optim.lr", "6e-4"], "optim.lr", 6e-4),
        (["--optim.lr", "1"], "optim.lr", 1.0),
        (["--seed", "-3"], "seed", -3),
        (["--optim.lr=-1e-3"], "optim.lr", -1e-3),
        (["--model.vocab_size", "null"], "model.vocab_size", None),
        (["--log.run_name", "null"], "log.run_name", None),
        (["--log.run_name", "# not a comment"], "log.run_name", "# not a comment"),
        (["--log.run_name", "123"], "log.run_name", "123"),
        (["--out_dir", "null"], "out_dir", "null"),
        (["--out_dir", "- a: {b"], "out_dir", "- a: {b"),
        (["--out_dir=--seed"], "out_dir", "--seed"),
        (["--out_dir", "a=b"], "out_dir", "a=b"),
        (["--log.compile", "false"], "log.compile", False),
        (["--log.compile", "auto"], "log.compile", "auto"),
        (["--log.wandb", "True"], "log.wandb", True),
        (["--log.items", "y"], "log.items", "y"),
        (["--model.pos_mode", "rope+yarn"], "model.pos_mode", "rope+yarn"),
    ],
)
def test_values_of_flags(argv: list[str], key: str, expected: object) -> None:
    got = flatten(to_dict(load(Config, argv)))[key]
    assert got == expected and type(got) is type(expected)


def test_required_fields(refused) -> None:
    assert load(Required, ["--checkpoint", "out/run"]) == Required("out/run")
    assert "--checkpoint is required: str" in refused([], Required)


def test_text_is_empty_only_where_it_is_by_default(refused, write) -> None:
    assert "--out_dir '': is empty; give str" in refused(["--config", write("out_dir: ''")])
    assert load(Required, ["--checkpoint", "x", "--prompt="]) == Required("x", "")
    assert "--checkpoint '': is empty; give str" in refused(["--checkpoint", ""], Required)
    assert "--out_dir '': is empty; give str" in refused(["--out_dir="])
    assert "--log.run_name '': is empty; give str or null" in refused(["--log.run_name", ""])


def test_the_environment_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEFAULT_ENV", "true")
    for prefix in ("", "PYTEST_", "__MAIN___", "APP_"):
        monkeypatch.setenv(f"{prefix}SEED", "77")
    assert load(Config, [], prog="app").seed == 1


# ---- faults ----


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["'key: value'", "nothing"]),
        ("# seed: 3\n", ["'key: value'", "nothing"]),
        ("- seed\n- 3\n", ["'key: value'", "a list"]),
        ("seed", ["'key: value'", "text"]),
        ("seed: 1: 2", ["line 1"]),
        ("seed: 1\n---\nseed: 2", ["single document"]),
        ("seed: {a: [", ["line 1"]),
        ("seed: \x01", ["no YAML text", "unacceptable character"]),
        (b"seed: 1\nout_dir: \xff\xfe\n", ["no YAML text", "utf-8", "0xff"]),
        ("{a: " * 2000, ["recursion"]),
        ("m: &m {m: *m}", ["recursion"]),
        ("seed: 1\nseed: 2", ["seed: stands twice"]),
        ("model:\n  n_layer: 1\n  n_layer: 2", ["model.n_layer: stands twice"]),
        ("model: {n_layer: 1}\nmodel: {dropout: 0}", ["model: stands twice"]),
        ("model: {n_layer: 1}\nmodel.n_layer: 2", ["model.n_layer: stands twice"]),
        ("model: 3", ["model (value 3)", "group", "model.n_layer"]),
        ("model:", ["model (value null)", "group", "model.n_layer"]),
        ("optim: {deep: [1]}", ["optim.deep", "group", "optim.deep.rate"]),
        ("sede: 3", ["sede (value 3)", "unknown key", "did you mean seed?"]),
        ("model: {pos_mod: rove}", ['model.pos_mod (value "rove")', "mean model.pos_mode?"]),
        ("pos_mode: rove", ["pos_mode", "did you mean model.pos_mode?"]),
        ("modle: {n_layer: 3}", ["modle.n_layer", "did you mean model.n_layer?"]),
        ("optim: {deep: {rat: 1}}", ["optim.deep.rat", "did you mean optim.deep.rate?"]),
        ("seed: {a: 1}", ["seed.a (value 1)", "unknown key"]),
        ("zzz: 1", ["zzz (value 1)", "unknown key", "--help"]),
        ("3: 1", ["3 (value 1)", "unknown key"]),
        ("? [a]\n: 1", ["unknown key"]),
        ("<<: {seed: 3}", ["<<.seed", "unknown key"]),
        ("model: {n_layer: true}", ["model.n_layer: expected int, got true"]),
        ("model: {n_layer: 1.5}", ["model.n_layer: expected int, got 1.5"]),
        ("model: {n_layer: 2.0}", ["model.n_layer: expected int, got 2.0"]),
        ('model: {n_layer: "3"}', ['model.n_layer: expected int, got "3"']),
        ("model: {n_layer: 010}", ['model.n_layer: expected int, got "010"']),
        ("model: {n_layer: null}", ["model.n_layer: expected int, got null"]),
        ("model: {n_layer: [1, {a: 2}]}", ["model.n_layer: expected int, got ["]),
        ("model: {vocab_size: x}", ['model.vocab_size: expected int or null, got "x"']),
        ("optim: {lr: abc}", ['optim.lr: expected float, got "abc"']),
        ("optim: {lr: .nan}", ['optim.lr: expected float, got ".nan"']),
        ("optim: {lr: 1:30}", ['optim.lr: expected float, got "1:30"']),
        ("optim: {lr: true}", ["optim.lr: expected float, got true"]),
        (f"optim: {{lr: 1{'0' * 400}}}", ["optim.lr: expected float, got 1000"]),
        (f"seed: {'9' * 5000}", ["limit"]),
        ("log: {wandb: yes}", ['log.wandb: expected bool (true, false), got "yes"']),
        ("log: {wandb: 1}", ["log.wandb: expected bool (true, false), got 1"]),
        ("log: {compile: maybe}", ["log.compile", "true, false", '"auto"', '"maybe"']),
        (
            "model: {pos_mode: yarn}",
            ["model.pos_mode", '"rope" or "rove" or "rope+yarn"', '"yarn"'],
        ),
        ("log: {run_name: 123}", ["log.run_name: expected str or null, got 123; quote it"]),
        ("out_dir: null", ["out_dir: expected str, got null"]),
        ("model.n_layer: x\nseed: 1", ["model.n_layer"]),
    ],
)
def test_bad_files_are_refused_in_one_line(refused, write, text: str | bytes, parts) -> None:
    file = write(text)
    line = refused(["--seed", "3", "--config", file])
    assert file in line
    assert all(part in line for part in parts), line


def test_files_that_cannot_be_read(refused, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.yaml")
    assert f"--config {missing}: No such file or directory" in refused(["--config", missing])
    assert f"--config {tmp_path}: Is a directory" in refused([f"--config={tmp_path}"])
    assert "No such file" in refused(["--config="])


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--model.n_layers", "3"], ["--model.n_layers: unknown", "did you mean --model.n_layer?"]),
        (["--model.n_layers=3"], ["--model.n_layers: unknown", "did you mean --model.n_layer?"]),
        (["--lr", "3"], ["--lr: unknown", "did you mean --optim.lr?"]),
        (["--n_layer", "3"], ["--n_layer: unknown", "did you mean --model.n_layer?"]),
        (["--out-dir", "x"], ["--out-dir: unknown", "did you mean --out_dir?"]),
        (["--out", "x"], ["--out: unknown"]),
        (["--conf", "x"], ["--conf: unknown", "did you mean --config?"]),
        (["--print_confi"], ["did you mean --print_config?"]),
        (["--zzz"], ["--zzz: unknown", "--help"]),
        (["-seed", "3"], ["-seed: unknown", "did you mean --seed?"]),
        (["-seed=3"], ["-seed: unknown", "did you mean --seed?"]),
        (["--seed"], ["--seed: expected one argument; give int, as --seed=VALUE if"]),
        (["--seed", "--out_dir", "x"], ["--seed: expected one argument; give int"]),
        (["--log.wandb", "maybe"], ["--log.wandb", "bool (true, false)", '"maybe"']),
        (["--config"], ["--config: expected one argument; give FILE"]),
        (["--print_config=x"], ["--print_config", "'x'; give no value"]),
        (["--seed="], ['--seed: expected int, got ""']),
        (["--seed", "# 3"], ['--seed: expected int, got "# 3"']),
        (["--seed", "null"], ["--seed: expected int, got null"]),
        (["--seed", "1.5"], ["--seed: expected int, got 1.5"]),
        (["--seed", "true"], ["--seed: expected int, got true"]),
        (["--seed", "[1]"], ['--seed: expected int, got "[1]"']),
        (["--seed", "!!int 3"], ['--seed: expected int, got "!!int 3"']),
        (["--optim.lr", "abc"], ['--optim.lr: expected float, got "abc"']),
        (["--optim.lr", "nan"], ['--optim.lr: expected float, got "nan"']),
        (["--log.wandb", "1"], ["--log.wandb: expected bool (true, false), got 1"]),
        (["--model", "{n_layer: 3}"], ["--model: a group", "--model.n_layer"]),
        (["--model=model.yaml"], ["--model: a group", "--model.n_layer"]),
        (["--optim.deep", "3"], ["--optim.deep: a group", "--optim.deep.rate"]),
        (["x"], ["unexpected argument 'x'; quote patterns such as 'dir/*.parquet'"]),
        (["--seed", "3", "4"], ["unexpected argument '4'; quote patterns"]),
        (["--out_dir", "a", "b c"], ["unexpected argument 'b c'; quote patterns"]),
        (["--model.n_layer", "0"], ["model.n_layer is 0: give 1 or more"]),
    ],
)
def test_bad_flags_are_refused_in_one_line(refused, argv: list[str], parts: list[str]) -> None:
    line = refused(argv)
    assert all(part in line for part in parts), line


def test_a_fault_of_post_init_in_a_file_is_one_line(refused, write) -> None:
    assert "model.n_layer is -1: give 1" in refused(["--config", write("model: {n_layer: -1}")])


def test_other_ranks_leave_the_line_to_rank_0(refused, monkeypatch, capsys) -> None:
    monkeypatch.setenv("RANK", "0")
    assert "sede" in refused(["--sede", "3"])
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit) as stop:
        load(Config, ["--sede", "3"])
    assert stop.value.code == 2
    assert capsys.readouterr() == ("", "")
    assert load(Config, ["--seed", "3"]).seed == 3


# ---- files are data ----


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put a module on sys.path that leaves a mark when imported; check that none is left."""
    marker = tmp_path / "imported"
    (tmp_path / "evil_module.py").write_text(
        f"open({str(marker)!r}, 'w').close()\nclass Evil: ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "evil_module.Evil"
    assert not marker.exists() and "evil_module" not in sys.modules


@pytest.mark.parametrize(
    "text",
    [
        "class_path: {0}",
        "{{class_path: {0}, init_args: {{a: 1}}}}",
        "model: {{class_path: {0}}}",
        "model: {{class_path: {0}, init_args: {{n_layer: 3}}}}",
        "model: {{n_layer: {{class_path: {0}}}}}",
        "model: {0}",
        "optim: {{deep: {{class_path: {0}}}}}",
        "optim: {{deep: {{rate: {{class_path: {0}, init_args: {{}}}}}}}}",
        "log: {{run_name: {{class_path: {0}}}}}",
        "out_dir: {{class_path: {0}}}",
        "out_dir: [{{class_path: {0}}}]",
        "seed: {0}",
        "seed: !!python/name:{0} ''",
        "seed: !!python/object/new:{0} []",
        "out_dir: !!python/object/apply:{0} []",
        "!!python/object:{0} {{seed: 3}}",
        "config: {{class_path: {0}}}",
        "__class__: {0}",
    ],
)
def test_a_file_cannot_import(refused, write, trap: str, text: str) -> None:
    assert refused(["--config", write(text.format(trap))])


@pytest.mark.parametrize("key", ["model", "model.n_layer", "optim.deep", "optim.deep.rate", "seed"])
def test_a_flag_cannot_import(refused, write, trap: str, key: str) -> None:
    spec = f'{{"class_path": "{trap}", "init_args": {{}}}}'
    file = write(spec, "spec.json")
    for value in (trap, spec, file, f"!!python/name:{trap}"):
        assert refused([f"--{key}", value])
    for below in ("class_path", "init_args.a", "__class__"):
        assert refused([f"--{key}.{below}", trap])
    assert refused([f"--{key}+", trap]) and refused([f"--{key}.help", trap])


def test_text_that_names_a_class_stays_text(trap: str) -> None:
    spec = f'{{"class_path": "{trap}"}}'
    config = load(Config, ["--out_dir", spec, "--log.run_name", spec, "--log.items", trap])
    assert (config.out_dir, config.log.run_name, config.log.items) == (spec, spec, trap)


@pytest.mark.parametrize(
    "text",
    [
        "seed: !!python/object/apply:os.system ['touch {0}']",
        "!!python/object/apply:os.system ['touch {0}']",
        "model: {{n_layer: !!python/object/apply:pathlib.Path.touch [{0}]}}",
        "model: !!python/object/new:os.system ['touch {0}']",
        "? !!python/object/apply:os.system ['touch {0}']\n: 3",
        "seed: !x 3",
        "seed: !!int 3",
        "out_dir: !!binary aGk=",
        "!!python/dict {{seed: 3}}",
    ],
)
def test_tags_are_refused_and_not_executed(refused, write, tmp_path: Path, text: str) -> None:
    marker = tmp_path / "executed"
    assert refused(["--config", write(text.format(marker))])
    assert not marker.exists()


# ---- output ----


def test_help_shows_docstrings_types_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--help"], ["--seed", "x", "-h"]):
        with pytest.raises(SystemExit) as stop:
            load(Config, argv, prog="train.py", description="Train a model.")
        out, err = capsys.readouterr()
        text = " ".join(out.split())
        assert stop.value.code == 0 and err == ""
        assert text.startswith("usage: train.py [--config FILE ...]")
        assert "Train a model." in text
        for part in (
            "--model.n_layer N_LAYER Number of blocks. (type: int, default: 12)",
            "null takes 100% of the data's. (type: int | null, default: null)",
            "{rope,rove,rope+yarn} Position mode.",
            "Peak learning rate. (type: float, default: 0.0006)",
            "Rate at depth three. (type: float | null, default: 0.25)",
            "--out_dir OUT_DIR Folder of the run. (type: str, default: out)",
            "--config FILE YAML file",
            "--print_config Print the complete settings",
            "The model:",
            " log: --log.wandb",  # a group that nothing documents
        ):
            assert part in text
        assert "--model CONFIG" not in text and "Unset" not in text
        assert all(f"--{key}" in text for key in flatten(to_dict(Config())))


@pytest.mark.parametrize("place", [0, 2, 4])
def test_print_config_prints_what_would_run(write, capsys, place: int) -> None:
    argv = ["--config", write("seed: 9\nlog: {run_name: a}"), "--model.n_layer", "3"]
    argv.insert(place, "--print_config")
    with pytest.raises(SystemExit) as stop:
        load(Config, argv)
    out, err = capsys.readouterr()
    expected = Config(seed=9, log=Log(run_name="a"), model=Model(n_layer=3, vocab_size=None))
    assert stop.value.code == 0 and err == ""
    assert out == to_yaml(expected)
    assert load(Config, ["--config", write(out, "printed.yaml")]) == expected


def test_print_config_refuses_what_would_not_run(refused) -> None:
    assert "model.n_layer is 0" in refused(["--print_config", "--model.n_layer", "0"])
    assert "--sede" in refused(["--print_config", "--sede", "0"])


def test_flatten_and_to_dict() -> None:
    assert flatten({"a": {"b": {"c": 1}, "d": None}, "e": {}}) == {"a.b.c": 1, "a.d": None, "e": {}}
    d = to_dict(Config())
    assert d["optim"] == {"lr": 6e-4, "deep": {"rate": 0.25}}
    assert flatten(d)["optim.deep.rate"] == 0.25
    assert list(d) == ["model", "optim", "log", "out_dir", "seed"]


def test_yaml_round_trip(write) -> None:
    words = """null ~ true Yes off 1 010 1_000 0x10 6e-4 1E5 1. .5 -.inf .nan 1:30 2020-01-01 = <<
    {a} [1] &a *a !x %x @x ` | > ? - -- --- ... a: #x é 'q' "q" \\n"""
    texts = words.split()
    texts += [" ", " a", "a ", "- a", "a: b", "a #b", "a\nb\n", "\n", "a\tb", "\x85", "\u2028"]
    texts += ["long text " * 30, "\U0001f600", "\x1b[31m", "\ufeff"]
    rng = random.Random(0)
    texts += ["".join(rng.choices("ab01.-+e:#{}[]!*\n'\"~ ", k=8)) for _ in range(40)]
    numbers = [1e-5, 1e20, 0.1, 3.0, -1e-300, float("inf"), 123456789.125]
    for i, text in enumerate(texts):
        config = replace(
            Config(seed=-i, optim=Optim(lr=numbers[i % len(numbers)])),
            out_dir=text,
            log=Log(run_name=text or None, compile=rng.choice([True, False, "auto"])),
        )
        loaded = load(Config, ["--config", write(to_yaml(config))])
        assert loaded == config
        assert type(loaded.log.compile) is type(config.log.compile)
    assert yaml.safe_load(to_yaml(config)) == to_dict(config)


# ---- user_errors ----


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("data.dir is x:\n   give a folder"), "data.dir is x: give a folder"),
        (
            FileNotFoundError(2, "No such file or directory", "a/b"),
            "No such file or directory: a/b",
        ),
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError("only a message"), "only a message"),
        (ValueError(), "ValueError()"),
    ],
)
def test_user_errors_are_one_line(capsys, monkeypatch, error: Exception, message: str) -> None:
    for rank, prefix in ((None, ""), ("0", ""), ("2", "[rank 2] ")):
        if rank:
            monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as stop, user_errors():
            raise error
        assert stop.value.code == 2
        assert capsys.readouterr() == ("", f"{prefix}error: {message}\n")


def test_user_errors_know_ctrl_c_and_memory_that_cannot_be_had(capsys) -> None:
    with pytest.raises(SystemExit) as stop, user_errors():
        raise KeyboardInterrupt
    assert stop.value.code == 130 and capsys.readouterr().err == "interrupted\n"
    with pytest.raises(SystemExit) as stop, user_errors():
        torch.empty(2**60, dtype=torch.uint8)
    line = capsys.readouterr().err
    assert stop.value.code == 2 and line.startswith("error: not enough memory (")
    assert line.count("\n") == 1 and "batch or the length smaller" in line


def test_what_a_terminal_cannot_show_is_escaped(tmp_path: Path) -> None:
    code = "from rove.errors import user_errors\nwith user_errors():\n    print('\u00fc'); 1 / 0"
    env = {**os.environ, "PYTHONPATH": str(REPO), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout == "\\xfc\n" and "ZeroDivisionError" in done.stderr


def test_user_errors_pass_the_rest() -> None:
    for error in (KeyError("k"), RuntimeError("r"), AssertionError("a"), SystemExit(5)):
        with pytest.raises(type(error)) as caught, user_errors():
            raise error
        assert caught.value is error
    with user_errors():
        done = True
    assert done


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("import a_package_that_is_not_here", "ModuleNotFoundError"),
        ("raise RuntimeError('of another\\nlibrary')", "RuntimeError('of another"),
        ("def f(:", "SyntaxError"),
    ],
)
def test_a_package_that_does_not_load_is_one_line(tmp_path, monkeypatch, capsys, content, what):
    (tmp_path / "broken_package.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as stop, user_errors():
        import_package("broken_package", "requirements-x.txt")
    line = capsys.readouterr().err
    assert stop.value.code == 2 and line.count("\n") == 1
    assert line.startswith(f"error: broken_package does not load ({what}")
    assert line.endswith("; pip install -r requirements-x.txt -c constraints.txt\n")


def test_a_script_prints_no_traceback(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom dataclasses import dataclass\nfrom rove.config import load\n"
        "@dataclass(frozen=True)\nclass C:\n    seed: int = 1\n    'Seed of it all.'\n"
        "print(load(C, sys.argv[1:]))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    command = [sys.executable, str(script)]
    bad = subprocess.run([*command, "--seed", "x"], env=env, capture_output=True, text=True)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr == 'error: --seed: expected int, got "x"\n'
    usage = subprocess.run([*command, "--help"], env=env, capture_output=True, text=True)
    assert usage.returncode == 0 and usage.stdout.startswith("usage: script.py")
    assert "Seed of it all." in usage.stdout


def test_bool_flag_without_a_value_is_true() -> None:
    assert load(Config, ["--log.wandb"]).log.wandb is True
    assert load(Config, ["--log.wandb", "--seed", "3"]).log.wandb is True
    assert load(Config, ["--log.wandb", "false"]).log.wandb is False

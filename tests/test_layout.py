"""The house: who imports whom, sizes, names, and scripts that answer --help and do nothing else."""

import ast
import importlib
import sys
from pathlib import Path

import pytest
from helpers import ROOT

SCRIPTS = ["train", "prepare_fineweb", "sample", "eval", "report", "export_hf"]
SOURCES = [*ROOT.glob("*.py"), *ROOT.glob("rove/**/*.py")]


def imports(path):
    """Top-level package of every import in a file: (name, whether at the file's top level)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree):
        top = node in tree.body
        if isinstance(node, ast.Import):
            found |= {(alias.name, top) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add((node.module, top))
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_one_way(path):
    found = {(name.split(".")[0], top) for name, top in imports(path)}
    names = {name for name, _ in found}
    assert not names & set(SCRIPTS), "nothing imports a script"
    if path.parent != ROOT:
        assert "model" not in names, "rove/ knows nothing of the model"
    if path.name == "model.py":
        at_top = {name for name, top in found if top}
        assert at_top - set(sys.stdlib_module_names) == {"torch"}
        inside = {name for name, top in imports(path) if not top}
        assert {name for name in inside if name.startswith("rove")} == {"rove.checkpoint"}


def test_files_keep_to_their_size_and_do_not_shadow_packages():
    limits = {"model.py": 450, "train.py": 350}
    for path in SOURCES:
        n_lines = path.read_text(encoding="utf-8").count("\n")
        assert n_lines <= limits.get(path.name, 250), f"{path}: {n_lines} lines"
    packages = {"evaluate", "wandb", "datasets", "tokenizers", "transformers", "torch", "numpy"}
    ours = [*ROOT.glob("*.py"), *(path.parent for path in ROOT.glob("*/__init__.py"))]
    assert not {path.stem for path in ours} & packages
    assert not list(ROOT.glob("**/utils.py")) or all(
        ".venv" in str(p) for p in ROOT.glob("**/utils.py")
    )


@pytest.mark.parametrize("arguments", [[name] for name in SCRIPTS] + [["eval", "perplexity"]])
def test_help_has_no_side_effect(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    script = importlib.import_module(arguments[0])
    try:
        script.main([*arguments[1:], "--help"])
    except SystemExit as stop:
        assert stop.code in (0, None)
    shown = capsys.readouterr()
    assert len(shown.out) > 200 and not shown.err
    assert not list(tmp_path.iterdir())


def test_configs_load_and_are_the_papers_sizes():
    import train
    from model import GPT
    from rove.config import load

    sizes = {"gpt2_124m": (12, 12, 768), "gpt2_354m": (24, 16, 1024)}
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        config = load(train.Config, ["--config", str(path)])
        m = config.model
        assert m.vocab_size is None and m.dropout == 0 and not m.bias and m.pos_mode == "rope"
        if path.stem in sizes:
            assert (m.n_layer, m.n_head, m.n_embd) == sizes[path.stem] and m.block_size == 1024
            assert config.train.tokens_per_step == 524288 and config.train.max_steps == 18795
            one_epoch = config.train.tokens_per_step * config.train.max_steps
            assert abs(one_epoch / 9.854e9 - 1) < 1e-3
    assert GPT is not None


def test_no_module_works_at_import():
    for path in SOURCES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            assert not isinstance(node, ast.For | ast.While | ast.With), f"{path}:{node.lineno}"
            if isinstance(node, ast.Expr):
                assert isinstance(node.value, ast.Constant), f"{path}:{node.lineno} does something"


def test_torch_load_is_always_weights_only():
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        assert text.count("torch.load(") == text.count("weights_only=True"), path
        assert "pickle.load" not in text and "yaml.load(" not in text, path
    assert Path(ROOT / "rove/checkpoint.py").read_text().count("torch.load(") == 1

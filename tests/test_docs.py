"""README and docs: every command is one that the scripts understand, every link leads somewhere."""

import importlib
import re
import sys

import pytest
from documented import FILES, blocks, commands, script_calls
from helpers import ROOT

from rove.config import load
from rove.runs import split_names

sys.path.insert(0, str(ROOT / "bench"))

CALLS = [(file, script, argv) for file in FILES for script, argv in script_calls(file)]


def settings_of(script, argv):
    """The settings class that a call is parsed by, and its flags; None for other programs."""
    if script.startswith("bench/"):
        return importlib.import_module(script[6:-3]).Settings, argv
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    if script == "train.py":
        return module.Config, argv
    if script == "eval.py":
        kind, rest = argv[0], argv[1:]
        return (module.Compare if kind == "compare" else module.KINDS[kind][0]), rest
    return module.Settings, argv


@pytest.mark.parametrize(
    ("file", "script", "argv"), CALLS, ids=[f"{f}: {s} {' '.join(a)[:60]}" for f, s, a in CALLS]
)
def test_a_documented_command_is_understood(file, script, argv, monkeypatch):
    monkeypatch.chdir(ROOT)  # --config configs/...
    assert (ROOT / script).is_file(), f"{file} names {script}"
    if script.endswith(".sh") or argv[:1] in (["verify"], ["stats"]):
        return
    argv = [word.replace("RUN/", "").replace("SEED", "1") for word in argv]
    settings, flags = settings_of(script, argv)
    if script == "report.py" or argv[:1] == ["compare"]:
        names, flags = split_names(flags)
        assert names
    try:
        load(settings, flags)
    except SystemExit as stop:  # --help and --print_config end with 0
        assert stop.code == 0, f"{file}: {script} {' '.join(argv)}"


def test_the_documents_hold_as_many_commands_as_they_should():
    """A parser that finds nothing would agree with everything."""
    by_script = {}
    for _, script, _ in CALLS:
        by_script[script] = by_script.get(script, 0) + 1
    for script in ("train.py", "eval.py", "prepare_fineweb.py", "report.py", "sample.py"):
        assert by_script.get(script, 0) >= 1, by_script
    assert len(CALLS) > 40


@pytest.mark.parametrize("file", FILES)
def test_links_and_make_targets_exist(file):
    text = (ROOT / file).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if "://" not in target:
            assert ((ROOT / file).parent / target).exists(), f"{file}: {target}"
    makefile = (ROOT / "Makefile").read_text()
    for block in blocks(file):
        for line in commands(block):
            if match := re.match(r"make (\w+)", line):
                assert re.search(rf"^{match[1]}:", makefile, re.M), f"{file}: {line}"
    for name in re.findall(r"`((?:rove|tests|docs|bench|scripts|configs)/[\w/.-]+)`", text):
        name = name.rstrip("/")
        assert (ROOT / name).exists() or "NAME" in name, f"{file}: {name}"

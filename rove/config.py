"""Settings of a script: `load(Config, sys.argv[1:])` fills a dataclass tree from YAML and flags.
Defaults < files in order < flags, wherever they stand on the line. Files are data: tags are refused
and keys and types checked; jsonargparse, which can import what a `class_path` names, sees no file.
"""

import argparse
import dataclasses
import difflib
import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from math import inf
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentParser, Unset, set_parsing_settings

from rove.errors import fail

T = TypeVar("T")
CONFIG_HELP = "YAML file; repeatable, later files win, flags win over files"
PRINT_HELP = "Print the complete settings that these files and flags give, as YAML, and exit"
WORD = {"null": None, "~": None, "": None, "true": True, "false": False, ".inf": inf, "-.inf": -inf}
INT = re.compile(r"(?a)[-+]?(0|[1-9](_?\d)*)")
FLOAT = re.compile(r"(?ai)[-+]?(?!\d+$)(\d+\.?\d*|\.\d+)(e[-+]?\d+)?")


def load(
    root: type[T], argv: Sequence[str], prog: str | None = None, description: str | None = None
) -> T:
    """Build a `root` from its defaults, the YAML files and the flags in `argv`.

    root: dataclass of str, int, float, bool, Literal, unions of these and None, and dataclasses
    of the same; a string literal after a field is its help text. Text may be empty only where it
    is by default. Exit with 0 after --help and --print_config; with 2 and, on rank 0, one line at
    a fault, or a ValueError of `__post_init__`.
    """
    try:
        wants_help = "--help" in argv or "-h" in argv
        parser = _parser(root, wants_help, prog, description)
        if wants_help:
            print(parser.format_help())
            raise SystemExit(0)
        values = parser.get_defaults()
        usual = flatten(values.as_dict())
        options = {key: _options(_kind(root, key)) for key in usual}
        flags = _split(argv, options)
        files, print_config = flags.pop("config"), flags.pop("print_config")
        for file in files:
            for key, value in _read(file, options):
                values[key] = value
        for key, text in flags.items():
            values[key] = _typed(f"--{key}", options[key], _from_text(options[key], text))
        for key, kinds in options.items():
            if values[key] is Unset:
                raise ValueError(f"--{key} is required: {_expected(kinds)}")
            if values[key] == "" != usual[key]:  # as a path it would mean the folder one is in
                raise ValueError(f"--{key} '': is empty; give {_expected(kinds)}")
        config = root(**parser.instantiate(values).as_dict())
    except ValueError as error:
        if os.environ.get("RANK", "0") == "0":
            fail(error)
        raise SystemExit(2) from None
    if print_config:
        print(to_yaml(config), end="")
        raise SystemExit(0)
    return config


def to_dict(config: Any) -> dict[str, Any]:
    """Return the settings of a dataclass tree as a nested dict of plain values."""
    return dataclasses.asdict(config)


def to_yaml(config: Any) -> str:
    """Return YAML (ASCII) that `load` reads back, through --config, to an equal object."""
    return yaml.dump(to_dict(config), Dumper=_Dumper, sort_keys=False)


def flatten(d: dict[str, Any]) -> dict[str, Any]:
    """Return a nested dict as one level with dotted keys; an empty dict stays a value."""
    flat = {}
    for key, value in d.items():
        below = flatten(value) if isinstance(value, dict) else {}
        flat.update({f"{key}.{k}": v for k, v in below.items()} or {key: value})
    return flat


def _parser(root: Any, docs: bool, prog: str | None, description: str | None) -> ArgumentParser:
    """Return the parser that knows defaults and help text; it reads neither files nor flags."""
    set_parsing_settings(import_path_denylist=["*"], unset_sentinel=True)
    set_parsing_settings(docstring_parse_attribute_docstrings=docs)  # slow: it reads the source
    usage = "%(prog)s [--config FILE ...] [--print_config] [--KEY VALUE ...]"
    parser = ArgumentParser(prog=prog, usage=usage, description=description)
    no = argparse.SUPPRESS
    parser.add_argument("--config", metavar="FILE", default=no, help=CONFIG_HELP)
    parser.add_argument("--print_config", action="store_true", default=no, help=PRINT_HELP)
    parser.add_class_arguments(root, as_group=False)
    for action in parser._actions:
        if any(other.dest.startswith(f"{action.dest}.") for other in parser._actions):
            action.help = no  # jsonargparse offers --model FILE, `load` does not
    for group in parser._action_groups:  # titles are signatures, where nothing is documented
        group.title = getattr(group, "dest", None) if "(" in str(group.title) else group.title
    return parser


def _kind(cls: Any, key: str) -> Any:
    for name in key.split("."):
        cls = get_type_hints(cls)[name]
    return cls


def _options(kind: Any) -> list[Any]:
    """Return what a type admits: classes, and the values of literals."""
    if get_origin(kind) in (Union, UnionType):
        return [option for arg in get_args(kind) for option in _options(arg)]
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    assert kind in (str, int, float, bool, NoneType), f"no setting can be a {kind}"
    return [kind]


def _split(argv: Sequence[str], options: dict[str, list[Any]]) -> dict[str, Any]:
    """Return the text of each flag given, the list of config files, and print_config."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    parser.add_argument("--config", action="append", default=[])
    parser.add_argument("--print_config", action="store_true")
    for key, kinds in options.items():
        bare: dict[str, Any] = {"nargs": "?", "const": "true"} if kinds == [bool] else {}
        parser.add_argument(f"--{key}", default=argparse.SUPPRESS, **bare)
    try:
        flags, extra = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        flag = str(error.argument_name)
        named = {"--config": "FILE", "--print_config": "no value"}
        wanted = named.get(flag) or _expected(options[flag[2:]])
        remedy = f"give {wanted}, as {flag}=VALUE if it begins with a dash"
        raise ValueError(f"{flag}: {error.message}; {remedy}") from None
    for arg in extra:
        flag = arg.partition("=")[0]
        if flag.strip("-") and arg.startswith("-"):
            near = _unknown(flag.lstrip("-"), [*options, "config", "print_config", "help"], "--")
            raise ValueError(f"{flag}: {near}")
        raise ValueError(f"unexpected argument {arg!r}; quote patterns such as 'dir/*.parquet'")
    return vars(flags)


def _unknown(key: str, keys: Collection[str], dashes: str = "") -> str:
    inside = [k for k in keys if k.startswith(f"{key}.")]
    if inside:
        return f"a group of settings; set its keys, such as {dashes}{inside[0]}"
    same_end = [k for k in keys if k.rpartition(".")[2] == key.rpartition(".")[2]]
    close = same_end or difflib.get_close_matches(key, keys, n=1)
    hint = f"did you mean {dashes}{close[0]}?" if close else "--help lists what there is"
    return f"unknown {'flag' if dashes else 'key'}; {hint}"


def _read(file: str, options: dict[str, list[Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the settings in a YAML file by dotted key."""
    try:
        with open(file, encoding="utf-8") as stream:
            root = yaml.compose(stream, yaml.BaseLoader)
        if not isinstance(root, yaml.MappingNode):
            got = "a list" if isinstance(root, yaml.SequenceNode) else "text" if root else "nothing"
            raise ValueError(f"expected lines such as 'key: value', got {got}")
        for key, value in _items(root, "", set()):
            if key not in options:
                raise ValueError(f"{key} (value {_show(value)}): {_unknown(key, options)}")
            yield key, _typed(key, options[key], value)
    except OSError as error:
        raise ValueError(f"--config {file}: {error.strerror}; give a YAML file") from None
    except (UnicodeError, yaml.reader.ReaderError) as error:
        raise ValueError(f"{file}: no YAML text ({error})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: {error}") from None


def _items(node: yaml.Node, key: str, seen: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys and plain values under a YAML node; nothing is constructed."""
    if key in seen:
        raise ValueError(f"{key}: stands twice; keep one")
    seen.add(key)
    if node.tag.removeprefix("tag:yaml.org,2002:") not in ("str", "seq", "map"):
        raise ValueError(f"{key or 'top'}: tag {node.tag!r} is refused; write a plain value")
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            yield from _items(value, f"{key}.{name.value}".removeprefix("."), seen)
    elif isinstance(node, yaml.ScalarNode):
        yield key, node.value if node.style else _scalar(node.value)
    else:
        yield key, [i.value if isinstance(i, yaml.ScalarNode) else "..." for i in node.value]


def _scalar(text: str) -> Any:
    """Read unquoted text as YAML 1.2 does: null, true, 12, 1_000, 6e-4, .inf; the rest is text."""
    if INT.fullmatch(text):
        return int(text)
    return float(text) if FLOAT.fullmatch(text) else WORD.get(text.lower(), text)


def _from_text(options: list[Any], text: str) -> Any:
    """Read a flag's text; where text is admitted, null alone is special."""
    is_text = str in options and (text != "null" or NoneType not in options)
    return text if is_text or not text or text in options else _scalar(text)


def _typed(key: str, options: list[Any], value: Any) -> Any:
    """Return the value, an int as float where only that fits, or raise ValueError."""
    # jsonargparse would take "3" for an int, and "# a" for the null of str | None
    for option in options:
        if type(value) is option or (type(value) is type(option) and value == option):
            return value
    if float in options and type(value) is int:
        with suppress(OverflowError):
            return float(value)
    quote = "; quote it" if str in options and isinstance(value, int | float) else ""
    raise ValueError(f"{key}: expected {_expected(options)}, got {_show(value)}{quote}")


def _expected(options: list[Any]) -> str:
    names = [o.__name__ if isinstance(o, type) else _show(o) for o in options]
    return " or ".join(names).replace("NoneType", "null").replace("bool", "bool (true, false)")


def _show(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)[:100]


class _Dumper(yaml.SafeDumper):
    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        """Quote text such as 6e-4, which is a float for `_scalar` but not for YAML 1.1."""
        number = kind is yaml.ScalarNode and implicit[0] and FLOAT.fullmatch(value)
        return "tag:yaml.org,2002:float" if number else super().resolve(kind, value, implicit)

"""Users' errors: one line on stderr and exit code 2, with what helps against a missing package."""

import importlib
import io
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import NoReturn

NO_MEMORY = re.compile("allocate memory|out of memory")


@contextmanager
def user_errors() -> Iterator[None]:
    """Make ValueError, OSError and ImportError one line on stderr and exit code 2, so warnings.

    So too memory that cannot be had. Ctrl-C ends with 130, and what a terminal cannot show is
    escaped.
    """
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError
        if isinstance(error, RuntimeError) and not NO_MEMORY.search(str(error)):
            raise
        remedy = "make the model, its batch or the length smaller"
        fail(ValueError(f"not enough memory ({error!s:.200}); {remedy}"))
    except (ValueError, OSError, ImportError) as error:
        if isinstance(error, ImportError):
            error = ValueError(f"{error}; {how_to_install('requirements.txt')}")
        rank = os.environ.get("RANK", "0")
        fail(error, prefix="" if rank == "0" else f"[rank {rank}] ")


def fail(error: ValueError | OSError, prefix: str = "") -> NoReturn:
    """Print an error as one line and exit with 2."""
    message = str(error)
    if isinstance(error, OSError) and error.strerror:
        message = error.strerror + (f": {error.filename}" if error.filename is not None else "")
    print(f"{prefix}error: {' '.join(message.split()) or repr(error)}", file=sys.stderr)
    raise SystemExit(2)


def import_package(name: str, requirements: str = "requirements.txt") -> ModuleType:
    """Import a module of an optional package, which `requirements` lists.

    Raises ValueError, whatever a missing or broken package raises.
    """
    try:
        return importlib.import_module(name)
    except Exception as error:
        what = f"{name} does not load ({error!r:.200})"
        raise ValueError(f"{what}; {how_to_install(requirements)}") from error


def how_to_install(requirements: str) -> str:
    """Return the command that installs what a file lists, at versions that work together."""
    return f"pip install -r {requirements} -c constraints.txt"

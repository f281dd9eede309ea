"""Kill a run before each change that it makes to its folder, one after another, and resume each.

`python tests/faults/sweep.py FOLDER FLAGS`: FLAGS are train.py's; the straight run goes where they
say, run k to FOLDER/killed_k. A process forked from this one dies by SIGKILL before the k-th time
that it opens for writing, renames or removes a file there.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import train  # noqa: E402


def run(flags, out, die_at=None):
    """Train in a forked process; return its exit code, or minus the signal that ended it."""
    process = os.fork()
    if process == 0:
        seen = [0]

        def hook(event, arguments):
            writes = event == "open" and set(str(arguments[1])) & set("wax+")
            if not (writes or event in ("os.rename", "os.remove")):
                return
            if str(out) in str(arguments[0]):
                seen[0] += 1
                if seen[0] == die_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        if die_at is not None:
            sys.addaudithook(hook)
        with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
            train.main([*flags, f"--out_dir={out}", "--train.resume=auto"])
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def main(folder, *flags):
    straight = [flag.split("=")[1] for flag in flags if flag.startswith("--out_dir=")][0]
    assert run(flags, straight) == 0
    number = 1
    while (code := run(flags, Path(folder) / f"killed_{number:03d}", number)) != 0:
        assert code == -signal.SIGKILL, code
        assert run(flags, Path(folder) / f"killed_{number:03d}") == 0
        number += 1


if __name__ == "__main__":
    main(*sys.argv[1:])

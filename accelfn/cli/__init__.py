# SPDX-License-Identifier: Apache-2.0
"""The command `accelfn`, and what each of its words calls."""

from __future__ import annotations

import os
import select
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelfn.cli.words import parser
from accelfn.errors import CheckpointError, Error, LaunchError
from accelfn.launching.file import find, read
from accelfn.launching.machines import Plan
from accelfn.launching.options import COMMAND_LINE, OPTIONS, checked, flag
from accelfn.launching.script import launch_script, planned, say
from accelfn.launching.settings import DEFAULT, Settings

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default this process's own.

    Args:
        argv: the words after `accelfn`.

    Returns:
        The exit code: 2 for a mistake in the command line, 130 after Ctrl-C; 1 where
        checkpoints differ, or one is not what was saved; of `launch` and `test`, that of
        the rank that failed first; 141, as of SIGPIPE, where the reader of what is printed
        left before its end.

    Example:
        >>> main(["launch", "--nproc", "0", "train.py"])
        2
    """
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # here, and not at the interpreter's end
    except BrokenPipeError:
        if not _reader_left():
            raise
        return 128 + signal.SIGPIPE


def _reader_left() -> bool:
    """Return whether nobody reads what is printed; the rest of it then goes nowhere."""
    try:
        out = sys.stdout.fileno()
    except OSError:  # it is kept in this process
        return False
    asks = select.poll()
    asks.register(out, 0)  # errors are always told
    if not asks.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), out)
    return True


def _run(argv: Sequence[str] | None) -> int:
    words = parser().parse_args(argv)
    try:
        commands = {
            "replay": _replay,
            "launch": _launch,
            "config": _config,
            "env": _env,
            "test": _test,
            "checkpoint": _checkpoint,
            "traffic": _traffic,
        }
        return commands[words.command](words)
    except Error as error:
        sys.stderr.write(f"accelfn {words.command}: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


def _replay(words: argparse.Namespace) -> int:
    from accelfn.testing.bundle import replay  # noqa: PLC0415  seconds that only this needs

    sys.path.insert(0, "")  # as `python script.py` finds the script's neighbours
    replay(words.directory)
    return 0


def _checkpoint(words: argparse.Namespace) -> int:
    from accelfn.checkpoint import command  # noqa: PLC0415  as above
    from accelfn.track.progress import bar_of_bytes  # noqa: PLC0415  as above

    given = {k: v for k, v in vars(words).items() if k not in ("command", "act")}
    if words.act in ("verify", "export"):  # which read all of it
        given["bar"] = bar_of_bytes
    try:
        rows, code = getattr(command, words.act)(**given)
    except OSError as error:
        raise CheckpointError(str(error)) from error
    sys.stdout.writelines(f"{row}\n" for row in rows)
    return code


def _traffic(words: argparse.Namespace) -> int:
    from accelfn.testing.traffic.command import foresee  # noqa: PLC0415  as above

    given = {k: v for k, v in vars(words).items() if k != "command"}
    sys.stdout.writelines(f"{row}\n" for row in foresee(**given))
    return 0


def _launch(words: argparse.Namespace) -> int:
    chosen = _settings(words.config, vars(words))
    machines = chosen.machines()
    least, most = chosen.elastic
    nproc = _num_processes(chosen["nproc"] if most is None else most)
    # what other machines start is theirs to say; their ranks check the product
    axes = chosen.axes_of(nproc if machines.most == 1 else None)
    plan = Plan(
        nproc=nproc,
        machines=machines,
        max_restarts=chosen["max_restarts"],
        axes=axes,
        least=least,
    )
    if words.show:
        sys.stdout.writelines(f"{row}\n" for row in chosen.lines() + planned(plan))
        return 0
    if words.script is None:
        msg = "there is no script; name a Python file, or a module after -m."
        raise LaunchError(msg)
    _say_whose(words.args, words.script)
    _say_from_file(chosen)
    return launch_script(words.script, words.args, plan, module=words.module)


def _say_whose(args: Sequence[str], script: str) -> None:
    """Say that options of accelfn which stand behind the script are the script's."""
    flags = [flag(name) for name in OPTIONS]
    own = [word for word in args if word.partition("=")[0] in flags]
    if own:
        say(
            f"{script} gets {' and '.join(own)}, which stands behind it; options of"
            " accelfn stand before the script."
        )


def _say_from_file(chosen: Settings) -> None:
    """Say what a file has set: whoever wrote it says how this run starts, and where."""
    others = {COMMAND_LINE, DEFAULT}
    rows = [
        (n, each) for n, each in chosen.by_name.items() if each.source not in others
    ]
    if rows:
        said = ", ".join(f"{name}={each.value}" for name, each in rows)
        say(f"{said} ({Path(rows[0][1].source).absolute()}).")


def _settings(named: str | None, given: Mapping[str, Any]) -> Settings:
    file = find(named)
    written = {} if file is None else read(file)
    return Settings.of(given, written, str(file))


def _num_processes(nproc: int | str) -> int:
    if nproc == "auto":
        # a second, for torch, that only this word needs
        from accelfn.base import accelerator  # noqa: PLC0415

        return max(1, accelerator.count())
    return int(nproc)


def _config(words: argparse.Namespace) -> int:
    from accelfn.launching.config import configure  # noqa: PLC0415  as above

    file = configure(words.config, words.assignments, default=words.default)
    sys.stdout.write(f"{file} says:\n{file.read_text(encoding='utf-8')}")
    return 0


def _env(words: argparse.Namespace) -> int:
    from accelfn.launching.environment import describe  # noqa: PLC0415  as above

    sys.stdout.write(describe(find(words.config), as_json=words.as_json))
    return 0


def _test(words: argparse.Namespace) -> int:
    nproc = checked("nproc", OPTIONS["nproc"].kind.from_text(words.nproc), COMMAND_LINE)
    nproc = _num_processes(nproc)
    test = "accelfn.testing.selftest"
    code = launch_script(test, [str(nproc)], Plan(nproc=nproc), module=True)
    verdict = "This machine passes." if code == 0 else "This machine fails, as above."
    sys.stdout.write(f"{verdict}\n")
    return code

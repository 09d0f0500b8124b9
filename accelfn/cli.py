# SPDX-License-Identifier: Apache-2.0
"""The command-line program `accelfn` and its subcommands."""

import argparse
import difflib
import inspect
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from accelfn import __version__
from accelfn.base.arguments import find_hint
from accelfn.errors import CheckpointError, Error, LaunchError
from accelfn.launching.machines import Plan
from accelfn.launching.script import describe_plan, launch_script, say
from accelfn.launching.settings import (
    COMMAND_LINE,
    DEFAULT,
    FILE,
    OPTIONS,
    Settings,
    find,
    flag,
    parse_setting,
    read,
)

# The parser of the command line, with its help texts.


class _Parser(argparse.ArgumentParser):
    """A parser that reports unknown options itself, with the subcommand's name.

    argparse would report them in the outermost parser.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    # argparse declares many overloads
    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """Parse arguments; exit with one line that suggests the nearest known option."""
        result, unknown = super().parse_known_args(args, namespace)
        for word in unknown:
            option = word.partition("=")[0]
            name = option.replace("_", "-")
            advice = find_hint(self.prog, name)
            if not word.startswith("-"):
                self.error(f"unexpected argument {word!r}; {advice or 'see --help.'}")
            names = [string for act in self._actions for string in act.option_strings]
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]}?" if close else f"see {self.prog} --help."
            self.exit(2, f"{self.prog}: unknown option {option}; {advice or hint}\n")
        return result, unknown

    def error(self, message: str) -> NoReturn:
        """Exit; say what to write instead of a command that does not exist."""
        word = message.partition("invalid choice: '")[2].partition("'")[0]
        if advice := find_hint("accelfn command", word.rpartition(".")[2]):
            self.exit(2, f"accelfn: there is no command {word!r}; {advice}\n")
        super().error(message)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    root = _Parser(prog="accelfn", description="Train PyTorch models.")
    root.add_argument("--version", action="version", version=f"accelfn {__version__}")
    commands = root.add_subparsers(dest="command", required=True, metavar="command")

    def add(run: Callable[[argparse.Namespace], int], summary: str) -> Any:
        """Add a subcommand, which is described by the docstring of its function."""
        name, description = run.__name__.removeprefix("_"), inspect.getdoc(run)
        command = commands.add_parser(name, help=summary, description=description)
        command.set_defaults(run=run)
        return command

    _add_launching(add)
    replay = add(_replay, "run a failed step again from its crash bundles")
    replay.add_argument("directory", help="the directory with the crash bundles")
    _add_acts(add(_checkpoint, "list, verify or export checkpoints"))
    traffic = add(_traffic, "predict what each update sends on any number of ranks")
    traffic.add_argument(
        "programs", nargs="+", metavar="FILE.py:FUNCTION", help="trains with a world"
    )
    traffic.add_argument("--ranks", default="2,8,64", metavar="N,N", help="world sizes")
    traffic.add_argument(
        "--link", metavar="MBIT,MS", help="bandwidth, latency: print seconds per update"
    )
    return root


_NO_OPTIONS = ("command", "act", "run")


def _add_launching(add: Callable[..., Any]) -> None:
    launch = add(_launch, "run a script in several processes, on one machine or more")
    for name, option in OPTIONS.items():
        default = "" if option.default is None else f" (default {option.default})"
        short = ["-n"] if name == "nproc" else []  # as in mpirun and srun
        launch.add_argument(
            *short, flag(name), metavar=option.metavar, help=option.help + default
        )
    _add_file(launch)
    launch.add_argument(
        "--show",
        action="store_true",
        help="show the settings and their sources, and start no process",
    )
    launch.add_argument(
        "-m",
        dest="module",
        action="store_true",
        help="the script is a module's name, as after python -m",
    )
    launch.add_argument("script", nargs="?", help="a Python file")
    launch.add_argument("args", nargs=argparse.REMAINDER, help="the script's arguments")
    config = add(_config, f"write {FILE}, the settings of accelfn launch")
    _add_file(config)
    config.add_argument(
        "--default", action="store_true", help="write the defaults without questions"
    )
    config.add_argument(
        "--set",
        dest="assignments",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting; NAME= removes the setting; you can repeat this option",
    )
    env = add(_env, "show this machine's versions and settings, for a bug report")
    env.add_argument("--json", dest="as_json", action="store_true", help="as JSON")
    _add_file(env)
    test = add(_test, "test this machine: two ranks train a step and save a checkpoint")
    test.add_argument("--nproc", default="2", metavar="N", help="ranks (default 2)")


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help=f"settings, instead of {FILE}")


_PATHS = {
    "STORE": "a directory of checkpoints",
    "DIR": "a checkpoint, or a store: its newest checkpoint (verify: all checkpoints)",
    "OUT": "a new directory",
}


def _add_acts(checkpoint: argparse.ArgumentParser) -> None:
    acts = checkpoint.add_subparsers(dest="act", required=True, metavar="act")

    def add(act: str, says: str, **paths: str) -> argparse.ArgumentParser:
        command = acts.add_parser(act, help=says, description=f"{says.capitalize()}.")
        for name, path in paths.items():
            command.add_argument(name, metavar=path, help=_PATHS[path])
        return command

    add("ls", "list the checkpoints of a store", directory="STORE")
    add(
        "verify",
        "compare all files with the saved digests; exit code 1 if a file differs",
        directory="DIR",
    )
    export = add(
        "export", "write a model to a new directory", directory="DIR", out="OUT"
    )
    export.add_argument("--slot", help="export the parameters in a slot, such as ema")
    export.add_argument(
        "--format",
        dest="kind",
        choices=["safetensors", "dcp"],
        default="safetensors",
        help="model.safetensors, or torch's distributed checkpoint, with the optimizer's state",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments after `accelfn`; default those of this process.

    Returns:
        The exit code: 2 for a mistake in the command line, and 130 after Ctrl-C. `checkpoint`
        returns 1 if checkpoints differ or a file is not as it was saved. `launch` and `test`
        return the code of the rank that failed first. 141 (SIGPIPE) means that the reader of
        the output closed the pipe before the end.

    Example:
        >>> main(["launch", "--nproc", "0", "train.py"])
        2
    """
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # errors at interpreter exit cannot be handled
    except BrokenPipeError:
        if not _reader_left():
            raise
        return 128 + signal.SIGPIPE


def _reader_left() -> bool:
    """Return whether the output's reader closed the pipe; if so, discard further output."""
    try:
        out = sys.stdout.fileno()
    except OSError:  # the output is a Python object of this process
        return False
    asks = select.poll()
    asks.register(out, 0)  # an empty event mask: poll reports errors anyway
    if not asks.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), out)
    return True


def _run(argv: Sequence[str] | None) -> int:
    words = parser().parse_args(argv)
    try:
        return words.run(words)
    except Error as error:
        sys.stderr.write(f"accelfn {words.command}: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


# Each subcommand; the docstring is the text of its `--help`.


def _replay(words: argparse.Namespace) -> int:
    """Run a failed step again in this process, on simulated ranks.

    The crash bundles were written by accelfn.testing.crash_bundles. The error is raised again.
    """
    from accelfn.testing.plugin import replay  # noqa: PLC0415  slow, rarely needed

    sys.path.insert(0, "")  # so that modules in the current directory can be imported
    replay(words.directory)
    return 0


def _checkpoint(words: argparse.Namespace) -> int:
    """List, verify or export checkpoints. No training script is needed."""
    from accelfn.launching import commands  # noqa: PLC0415  rarely needed
    from accelfn.track.tracker import bar_of_bytes  # noqa: PLC0415  rarely needed

    options = {k: v for k, v in vars(words).items() if k not in _NO_OPTIONS}
    if words.act in ("verify", "export"):  # both read all files of a checkpoint
        options["bar"] = bar_of_bytes
    try:
        rows, code = getattr(commands, words.act)(**options)
    except OSError as error:
        raise CheckpointError(str(error)) from error
    sys.stdout.writelines(f"{row}\n" for row in rows)
    return code


def _traffic(words: argparse.Namespace) -> int:
    """Run each function, which trains some updates, on a few simulated ranks.

    Print how many bytes an update sends on any number of ranks, by label.
    """
    from accelfn.testing.traffic import foresee  # noqa: PLC0415  rarely needed

    options = {k: v for k, v in vars(words).items() if k not in _NO_OPTIONS}
    sys.stdout.writelines(f"{row}\n" for row in foresee(**options))
    return 0


def _launch(words: argparse.Namespace) -> int:
    """Run a script in several processes on this machine, with the environment of torchrun.

    Each process is one rank. Put options of accelfn before the script. Settings that are not in
    the command line are read from accelfn.toml in this directory.
    """
    file = find(words.config)
    table = {} if file is None else read(file)
    chosen = Settings.of(vars(words), table, str(file))
    machines = chosen.machines()
    least, most = chosen.elastic
    nproc = _num_processes(chosen["nproc"] if most is None else most)
    # with several machines the total is not known here; the ranks check the product later
    axes = chosen.axes_of(nproc if machines.most == 1 else None)
    plan = Plan(
        nproc=nproc,
        machines=machines,
        max_restarts=chosen["max_restarts"],
        axes=axes,
        least=least,
    )
    if words.show:
        rows = chosen.lines() + describe_plan(plan)
        sys.stdout.writelines(f"{row}\n" for row in rows)
        return 0
    if words.script is None:
        msg = "the script is missing. Add a Python file, or -m and a module's name."
        raise LaunchError(msg)
    _say_whose(words.args, words.script)
    _say_from_file(chosen)
    return launch_script(words.script, words.args, plan, module=words.module)


def _say_whose(args: Sequence[str], script: str) -> None:
    """Warn about accelfn's options after the script's name, which the script receives."""
    flags = [flag(name) for name in OPTIONS]
    options = [word for word in args if word.partition("=")[0] in flags]
    if options:
        say(
            f"{script} gets {' and '.join(options)}, because options after the script belong to"
            f" it. If you mean accelfn, write accelfn launch {options[0]} ... {script}."
        )


def _say_from_file(chosen: Settings) -> None:
    """Print the settings of a file, because its author decides how and where this run starts."""
    sources = {COMMAND_LINE, DEFAULT}
    rows = [(n, s) for n, s in chosen.by_name.items() if s.source not in sources]
    if rows:
        listing = ", ".join(f"{name}={s.value}" for name, s in rows)
        say(f"{listing} ({Path(rows[0][1].source).absolute()}).")


def _num_processes(nproc: int | str) -> int:
    if nproc == "auto":
        # importing torch takes a second, and only "auto" needs it
        from accelfn.base import devices  # noqa: PLC0415

        return max(1, devices.count())
    return int(nproc)


def _config(words: argparse.Namespace) -> int:
    """Write accelfn.toml. Ask for each setting, or use the settings of --set.

    Other settings in an existing file are kept.
    """
    from accelfn.launching.settings import configure  # noqa: PLC0415  rarely needed

    file = configure(words.config, words.assignments, default=words.default)
    sys.stdout.write(f"{file} contains:\n{file.read_text(encoding='utf-8')}")
    return 0


def _env(words: argparse.Namespace) -> int:
    """Show versions, devices, settings and variables of this machine."""
    from accelfn.launching.commands import describe  # noqa: PLC0415  rarely needed

    sys.stdout.write(describe(find(words.config), as_json=words.as_json))
    return 0


def _test(words: argparse.Namespace) -> int:
    """Test this machine, in two minutes at most.

    Ranks connect, communicate, train a step together and save a checkpoint.
    """
    nproc = _num_processes(parse_setting("nproc", words.nproc, COMMAND_LINE))
    test = "accelfn.launching.selftest"
    code = launch_script(test, [str(nproc)], Plan(nproc=nproc), module=True)
    verdict = "passes the test" if code == 0 else "fails the test: see the output above"
    sys.stdout.write(f"This machine {verdict}.\n")
    return code

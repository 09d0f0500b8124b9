# SPDX-License-Identifier: Apache-2.0
"""The words of the command line `accelfn`, and what its help says of each."""

import argparse
import difflib
from importlib import metadata
from typing import Any

from accelfn.launching.file import FILE
from accelfn.launching.options import OPTIONS, flag


class _Parser(argparse.ArgumentParser):
    """A parser that refuses unknown options itself; argparse leaves them to the outermost."""

    # its overloads are many
    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """Parse, and say in one line which option is unknown, and which one was meant."""
        found, unknown = super().parse_known_args(args, namespace)
        for word in unknown:
            if not word.startswith("-"):
                self.error(f"unexpected word {word!r}")
            name = word.partition("=")[0].replace("_", "-")
            known = [each for act in self._actions for each in act.option_strings]
            close = difflib.get_close_matches(name, known, n=1)
            advice = f"did you mean {close[0]}" if close else f"see {self.prog} --help"
            end = "?" if close else "."
            option = word.partition("=")[0]
            self.exit(2, f"{self.prog}: unknown option {option}; {advice}{end}\n")
        return found, unknown


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = _Parser(
        prog="accelfn", description="Train PyTorch models.", allow_abbrev=False
    )
    made.add_argument("--version", action="version", version=_version())
    commands = made.add_subparsers(dest="command", required=True, metavar="command")
    _add_launching(commands)
    replay = commands.add_parser(
        "replay",
        help="run the step of a crash bundle again, on simulated ranks",
        description=(
            "Run the step of a crash bundle, which accelfn.testing.crash_bundles left,"
            " again on simulated ranks in this process. What it raises is shown."
        ),
        allow_abbrev=False,
    )
    replay.add_argument("directory", help="where the ranks left their bundles")
    checkpoint = commands.add_parser(
        "checkpoint",
        help="list, verify or export checkpoints",
        description="Say what is in checkpoints, from their files alone.",
        allow_abbrev=False,
    )
    _add_acts(checkpoint)
    _add_traffic(commands)
    return made


def _add_traffic(commands: Any) -> None:
    traffic = commands.add_parser(
        "traffic",
        help="foresee what a training sends on any number of ranks",
        description=(
            "Run functions of a world on a few simulated ranks, and print what an update of"
            " each sends, by label, on any number of ranks."
        ),
        allow_abbrev=False,
    )
    traffic.add_argument(
        "programs", nargs="+", metavar="FILE.py:FUNCTION", help="trains some updates"
    )
    traffic.add_argument("--ranks", default="2,8,64", metavar="N,N", help="on how many")
    traffic.add_argument(
        "--link", metavar="MBIT,MS", help="bandwidth and latency: seconds an update"
    )


_SHORT = {"nproc": "-n"}  # as of mpirun and srun


def _add_launching(commands: Any) -> None:
    launch = commands.add_parser(
        "launch",
        help="run a script in several processes, on one machine or more",
        description=(
            "Run a script in several processes on this machine, one rank each, with the"
            " environment of torchrun. Options of accelfn come before the script. What the"
            f" command line does not say is read from {FILE}, if it is here."
        ),
        allow_abbrev=False,
    )
    for name, option in OPTIONS.items():
        default = "" if option.default is None else f" (default {option.default})"
        short = [_SHORT[name]] if name in _SHORT else []
        launch.add_argument(
            *short,
            flag(name),
            metavar=option.metavar,
            help=option.help + default,
        )
    _add_file(launch)
    launch.add_argument(
        "--show",
        action="store_true",
        help="show the settings and where each is from, and start nothing",
    )
    launch.add_argument(
        "-m",
        dest="module",
        action="store_true",
        help="the script is a module's name, as after python -m",
    )
    launch.add_argument("script", nargs="?", help="a Python file")
    launch.add_argument("args", nargs=argparse.REMAINDER, help="the script's own")
    config = commands.add_parser(
        "config",
        help=f"write {FILE}, which says how to launch",
        description=(
            f"Write {FILE}: ask for each setting, or take them from --set. What the"
            " file has already stays, where nothing else is said."
        ),
        allow_abbrev=False,
    )
    _add_file(config)
    config.add_argument(
        "--default", action="store_true", help="write the defaults, and ask nothing"
    )
    config.add_argument(
        "--set",
        dest="assignments",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting; NAME= takes it out; may be given several times",
    )
    env = commands.add_parser(
        "env",
        help="show what a bug report needs",
        description="Show versions, devices, settings and variables of this machine.",
        allow_abbrev=False,
    )
    env.add_argument("--json", dest="as_json", action="store_true", help="as JSON")
    _add_file(env)
    test = commands.add_parser(
        "test",
        help="test this machine: two ranks talk, train a step and save it",
        description=(
            "Test this machine, in two minutes at most: ranks meet, communicate, train a"
            " step together and save a checkpoint."
        ),
        allow_abbrev=False,
    )
    test.add_argument("--nproc", default="2", metavar="N", help="how many (default 2)")


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", metavar="FILE", help=f"the settings, instead of {FILE}"
    )


_PATHS = {
    "STORE": "a directory of checkpoints",
    "DIR": "a checkpoint, or a store: then its newest, or to verify all of them",
    "OUT": "does not exist yet",
}


def _add_acts(checkpoint: argparse.ArgumentParser) -> None:
    acts = checkpoint.add_subparsers(dest="act", required=True, metavar="act")

    def add(act: str, says: str, **paths: str) -> argparse.ArgumentParser:
        made = acts.add_parser(
            act, help=says, description=f"{says.capitalize()}.", allow_abbrev=False
        )
        for name, path in paths.items():
            made.add_argument(name, metavar=path, help=_PATHS[path])
        return made

    add("ls", "list the checkpoints of a store", directory="STORE")
    add(
        "verify",
        "compare all bytes with their digests; exit code 1 if one differs",
        directory="DIR",
    )
    export = add(
        "export",
        "write a model to a new directory",
        directory="DIR",
        out="OUT",
    )
    export.add_argument("--slot", help="with the parameters of a slot, such as ema")
    export.add_argument(
        "--format",
        dest="kind",
        choices=["safetensors", "dcp"],
        default="safetensors",
        help="model.safetensors, or torch's distributed checkpoint, with the optimizer's state",
    )


def _version() -> str:
    try:
        return f"accelfn {metadata.version('accelfn')}"
    except metadata.PackageNotFoundError:
        return "accelfn, from a source tree that is not installed"

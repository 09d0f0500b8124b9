# SPDX-License-Identifier: Apache-2.0
"""The command `accelfn`: its words, and what each of them calls."""

from __future__ import annotations

import argparse
import sys
from importlib import metadata
from typing import TYPE_CHECKING

from accelfn.errors import CheckpointError, Error, LaunchError
from accelfn.launch import launch_script

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default this process's own.

    Args:
        argv: the words after `accelfn`.

    Returns:
        The exit code: 2 for a mistake in the command line, 130 after Ctrl-C; 1 where
        checkpoints differ, or one is not what was saved.

    Example:
        >>> main(["launch", "--nproc", "0", "train.py"])
        2
    """
    words = _parser().parse_args(argv)
    try:
        commands = {"replay": _replay, "launch": _launch, "checkpoint": _checkpoint}
        return commands[words.command](words)
    except Error as error:
        sys.stderr.write(f"accelfn {words.command}: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="accelfn", description="Train PyTorch models.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    launch = commands.add_parser(
        "launch",
        help="run a script in several processes on this machine",
        description=(
            "Run a script in several processes on this machine, one rank each, with the"
            " environment of torchrun. Options of accelfn come before the script."
        ),
        allow_abbrev=False,
    )
    launch.add_argument(
        "--nproc",
        required=True,
        metavar="N",
        help="how many processes; 'auto' is one for each GPU, or one without any",
    )
    launch.add_argument(
        "-m",
        dest="module",
        action="store_true",
        help="the script is a module's name, as after python -m",
    )
    launch.add_argument("script", help="a Python file")
    launch.add_argument("args", nargs=argparse.REMAINDER, help="the script's own")
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
        help="list, show, verify, compare or export checkpoints",
        description="Say what is in checkpoints, from their files alone.",
        allow_abbrev=False,
    )
    _add_acts(checkpoint)
    return parser


_PATHS = {
    "STORE": "a directory of checkpoints",
    "DIR": "a checkpoint, or a store: then its newest, or to verify all of them",
    "A": "a checkpoint, or a store: then its newest",
    "B": "another",
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
    show = add("show", "show what a checkpoint holds", directory="DIR")
    show.add_argument("--json", dest="as_json", action="store_true", help="as JSON")
    add(
        "verify",
        "compare all bytes with their digests; exit code 1 if one differs",
        directory="DIR",
    )
    add(
        "diff",
        "show how two checkpoints differ; exit code 1 if they do",
        first="A",
        second="B",
    )
    export = add(
        "export",
        "write model.safetensors to a new directory",
        directory="DIR",
        out="OUT",
    )
    export.add_argument("--slot", help="with the parameters of a slot, such as ema")


def _replay(words: argparse.Namespace) -> int:
    from accelfn.testing.bundle import replay  # noqa: PLC0415  seconds that only this needs

    sys.path.insert(0, "")  # as `python script.py` finds the script's neighbours
    replay(words.directory)
    return 0


def _checkpoint(words: argparse.Namespace) -> int:
    from accelfn.checkpoint import command  # noqa: PLC0415  as above

    given = {k: v for k, v in vars(words).items() if k not in ("command", "act")}
    try:
        rows, code = getattr(command, words.act)(**given)
    except OSError as error:
        raise CheckpointError(str(error)) from error
    sys.stdout.writelines(f"{row}\n" for row in rows)
    return code


def _launch(words: argparse.Namespace) -> int:
    nproc = _num_processes(words.nproc)
    return launch_script(words.script, words.args, nproc=nproc, module=words.module)


def _num_processes(text: str) -> int:
    if text == "auto":
        import torch  # noqa: PLC0415  a second that only this word needs

        return max(1, torch.cuda.device_count())
    try:
        return int(text)
    except ValueError:
        msg = f"--nproc is {text!r}; give a whole number, 1 or more, or 'auto'."
        raise LaunchError(msg) from None


def _version() -> str:
    try:
        return f"accelfn {metadata.version('accelfn')}"
    except metadata.PackageNotFoundError:
        return "accelfn, from a source tree that is not installed"


if __name__ == "__main__":
    sys.exit(main())

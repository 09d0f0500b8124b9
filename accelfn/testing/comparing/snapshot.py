# SPDX-License-Identifier: Apache-2.0
"""`assert_collectives`: what a run communicates, held to a text file that a person reads.

The text says of each update which collectives there were, in order: kind, reduction, root,
bytes that one rank gives, label. It has no source lines, and columns do not move, so it
changes only where communication does.
"""

import difflib
import os
from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from accelfn.base import paths
from accelfn.base.calling import called
from accelfn.errors import ArgumentError, LawError
from accelfn.testing.simulation.entries import Entry
from accelfn.testing.simulation.plan import Run


@called
def assert_collectives(
    run: Run[Any], path: str | os.PathLike[str], *, update: bool = False
) -> None:
    """Assert that a run's collectives are those that a text file lists.

    The file is made by `update=True`, kept beside the test, and read in review: a change
    that makes an update send more, or call one more collective, shows as a line.
    Collectives are listed by update, those of equal updates once. One that is called
    between two steps belongs to the update before it. Sends between two ranks are listed
    after the collectives of their update, in order of ranks, because their order in time
    is the schedule's.

    Args:
        run: what `simulate` returned.
        path: of the file, such as `Path(__file__).with_name("collectives.txt")`.
        update: write the file instead.

    Raises:
        LawError: they differ, as a unified diff; or there is no such file.

    Law: the text depends on the program alone, not on the schedule or the machine.

    Example:
        >>> import accelfn as af
        >>> from accelfn.testing import simulate
        >>> run = simulate(2, af.barrier)
        >>> assert_collectives(run, "collectives.txt", update=True)
        >>> assert_collectives(run, "collectives.txt")
        >>> print(Path("collectives.txt").read_text(), end="")
        2 ranks
        <BLANKLINE>
        before any update: 1 call, 4 bytes
          all_reduce SUM, 4 bytes, 'barrier'
    """
    if not isinstance(run, Run):
        msg = (
            f"assert_collectives({type(run).__name__}, ...): expected the Run that simulate"
            " returned."
        )
        raise ArgumentError(msg)
    file, found = Path(path), _text(run)
    if update:
        file.write_text(found, encoding="utf-8", newline="\n")
        return
    if not paths.exists(file):
        msg = (
            f"There is no {file} to compare with. Call assert_collectives(run, path,"
            f" update=True) once to write it, and keep it. It would be:\n\n{found}"
        )
        raise LawError(msg)
    expected = file.read_text(encoding="utf-8")
    if found != expected:
        lines = difflib.unified_diff(
            expected.splitlines(), found.splitlines(), "expected", "found", lineterm=""
        )
        msg = (
            f"The collectives of the run are not those of {file}. If they should be, call"
            " assert_collectives(run, path, update=True) once.\n" + "\n".join(lines)
        )
        raise LawError(msg)


def _text(run: Run[Any]) -> str:
    """Return the file's text."""
    updates: dict[int | None, list[Entry]] = {}
    for entry in run.log:
        updates.setdefault(entry.step, []).append(entry)
    blocks: dict[str, list[int]] = {}
    text = f"{len(run)} rank{'s' * (len(run) != 1)}\n"
    if None in updates:
        text += f"\nbefore any update: {_block(updates.pop(None))}"
    for step in sorted(key for key in updates if key is not None):
        blocks.setdefault(_block(updates[step]), []).append(step)
    for block, steps in blocks.items():
        name = "update" if len(steps) == 1 else "each of updates"
        text += f"\n{name} {_ranges(steps)}: {block}"
    return text


def _block(entries: Sequence[Entry]) -> str:
    """Return how often and how much was sent, and a line for each run of equal calls."""
    sends = sorted(map(_line, (each for each in entries if each.kind == "send")))
    lines = [*(_line(each) for each in entries if each.kind != "send"), *sends]
    size = sum(entry.num_bytes for entry in entries)
    calls = f"{len(lines)} call{'s' * (len(lines) != 1)}"
    text = f"{calls}, {_bytes(size)}\n"
    for line, same in groupby(lines):
        count = len(list(same))
        text += f"  {line}{f', {count} times' * (count > 1)}\n"
    return text


def _line(entry: Entry) -> str:
    what = entry.kind if entry.op is None else f"{entry.kind} {entry.op}"
    if entry.kind == "send":
        what += f" between ranks {' and '.join(map(str, entry.ranks))}"
    elif entry.root is not None:
        what += f" root {entry.root}"
    label = "no label" if entry.label is None else repr(entry.label)
    return f"{what}, {_bytes(entry.num_bytes)}, {label}"


def _bytes(number: int) -> str:
    return f"{number:,} byte{'s' * (number != 1)}"


def _ranges(steps: Sequence[int]) -> str:
    """Return increasing numbers as ranges: `0 to 3, 5` or `7 to 31 by 8`."""
    apart = {after - before for before, after in pairwise(steps)}
    if len(steps) > 2 and len(apart) == 1 and apart != {1}:
        return f"{steps[0]} to {steps[-1]} by {apart.pop()}"
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][-1] + 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    shown = [
        f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run))
        for run in runs
    ]
    return ", ".join(shown)

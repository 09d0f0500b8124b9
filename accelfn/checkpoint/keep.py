# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints a directory has, and which of them are kept."""

import math
import re
from contextlib import suppress
from pathlib import Path

from accelfn.base import paths
from accelfn.checkpoint import disk, files
from accelfn.checkpoint.manifest import NAME, Manifest, read_manifest
from accelfn.errors import CheckpointError

_STEP = re.compile(r"step-([0-9]{8,})")


def name_of(step: int) -> str:
    """Return the name of a step's checkpoint; names sort as steps do."""
    return f"step-{step:08d}"


def steps_in(directory: Path) -> tuple[int, ...]:
    """Return the steps of which a directory has checkpoints, in rising order.

    What has another name than a store gives is not of a store: `step-34`, say.
    """
    if not paths.is_directory(directory):
        return ()
    found = [
        int(match[1])
        for path in directory.iterdir()
        if (match := _STEP.fullmatch(path.name))
        and path.name == name_of(int(match[1]))
        and paths.is_file(path / NAME)
    ]
    return tuple(sorted(found))


def verify(folder: Path) -> Manifest:
    """Read all of a checkpoint again, and return its manifest.

    Raises:
        CheckpointCorruptError: something in it is not what was written.
    """
    manifest = read_manifest(folder)
    for name, file in manifest.files.items():
        files.read(folder / name, file, frozenset())
    return manifest


def best_of(directory: Path, metric: str, mode: str) -> list[int]:
    """Return the steps whose checkpoints have a metric, the best first."""
    found: list[tuple[float, int]] = []
    for step in steps_in(directory):
        try:
            value = read_manifest(directory / name_of(step)).metrics.get(metric)
        except CheckpointError:  # it is none of the best; loading it says why
            continue
        if value is not None and not math.isnan(value):
            found.append((-value if mode == "max" else value, step))
    return [step for _, step in sorted(found)]


def metrics_in(directory: Path) -> set[str]:
    """Return the names of all metrics that a directory's checkpoints have."""
    names = set[str]()
    for step in steps_in(directory):
        with suppress(CheckpointError):  # as above
            names |= read_manifest(directory / name_of(step)).metrics.keys()
    return names


def check_no_store(directory: Path) -> None:
    """Refuse a directory of checkpoints where one of them is asked for.

    Raises:
        CheckpointError: it names the newest.
    """
    steps = () if paths.exists(directory / NAME) else steps_in(directory)
    if steps:
        msg = (
            f"{directory} is a store of {len(steps)} checkpoints, and not one of them."
            f" Load the newest, {directory / name_of(steps[-1])}, or call"
            f" af.CheckpointStore({str(directory)!r}).restore(state)."
        )
        raise CheckpointError(msg)


def discard(directory: Path, step: int) -> None:
    """Remove a checkpoint: first its name, then what it was.

    So a crash between leaves a directory that is no checkpoint, not half of one.
    """
    gone = directory / f".tmp-{name_of(step)}.gone"
    disk.remove(gone)
    disk.rename(directory / name_of(step), gone)
    # it is no checkpoint any more, and the next save removes it
    with suppress(OSError):
        disk.remove(gone)

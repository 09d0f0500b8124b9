# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints a directory has, and which of them are kept."""

import math
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from accelfn.base import paths
from accelfn.checkpoint import disk, files
from accelfn.checkpoint.manifest import NAME, read_manifests
from accelfn.errors import CheckpointCorruptError, CheckpointError

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


def broken_after(directory: Path, step: int) -> Path | None:
    """Return the newest broken link with the name of a later step's checkpoint."""
    found = [
        (int(match[1]), path)
        for path in directory.iterdir()
        if (match := _STEP.fullmatch(path.name))
        and path.is_symlink()
        and not paths.exists(path)
    ]
    newest, path = max(found, default=(step, None))
    return path if newest > step else None


def newest_whole(directory: Path, steps: Sequence[int]) -> int | None:
    """Return the newest of some steps whose checkpoint is as it was written.

    Cost: one reading of it, and of those that are not.
    """
    for step in sorted(steps, reverse=True):
        with suppress(CheckpointError):
            verify(directory / name_of(step))
            return step
    return None


@contextmanager
def explain_removal(folder: Path) -> Generator[None]:
    """Let an error of a checkpoint that was removed while it was read say so.

    Raises:
        CheckpointError: it was removed.
    """
    try:
        yield
    except (CheckpointCorruptError, FileNotFoundError) as error:
        if disk.is_there(folder):
            raise
        msg = (
            f"{folder} was removed while it was read, as a run removes the older checkpoints of"
            f" its store. Load the newest: af.CheckpointStore({str(folder.parent)!r})"
            ".restore(state)."
        )
        raise CheckpointError(msg) from error


def verify(folder: Path) -> None:
    """Read all of a checkpoint again.

    Raises:
        CheckpointCorruptError: something in it is not what was written.
    """
    for state, manifest in read_manifests(folder).items():
        for name, file in manifest.files.items():
            files.read(folder / state / name, file, frozenset())


def metrics_of(folder: Path) -> Mapping[str, float]:
    """Return the metrics of a checkpoint; states that were saved together have the same."""
    return next(iter(read_manifests(folder).values())).metrics


def best_of(directory: Path, metric: str, mode: str) -> list[int]:
    """Return the steps whose checkpoints have a metric, the best first."""
    found: list[tuple[float, int]] = []
    for step in steps_in(directory):
        try:
            value = metrics_of(directory / name_of(step)).get(metric)
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
            names |= metrics_of(directory / name_of(step)).keys()
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

# SPDX-License-Identifier: Apache-2.0
"""The save protocol: all ranks write their files, then rank 0 renames the directory.

A phase begins after all ranks have completed the previous phase:

1. Rank 0 creates a directory `.tmp-NAME`.
2. Ranks exchange digests of their tensors, and divide the tensors that are equal on all ranks.
3. Each rank writes and flushes its file.
4. Rank 0 writes the manifest with all digests, flushes the directory, renames it to its
   final name, and flushes the rename.

Before the rename the checkpoint does not exist. After the rename it is complete.
"""

import errno
import json
import os
import shutil
import socket
import sys
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, Self, TypeAlias, cast

import attrs
import torch
from blake3 import blake3

from accelfn.base import arguments, system
from accelfn.checkpoint import files
from accelfn.checkpoint.manifest import NAME, Manifest, joint_bytes, rank_file
from accelfn.checkpoint.slices import Slice
from accelfn.errors import (
    CheckpointError,
    CheckpointWriteError,
    DirectoryInUseError,
    Error,
)

Exchange: TypeAlias = Callable[[str, str], list[str]]
"""A function of a label and this rank's text that returns the texts of all ranks, in order."""


class Phase(Enum):
    """A phase of a save. It fails on all ranks if it fails on one.

    The value is the label of the collective that exchanges outcomes. In error messages it
    follows "could not".
    """

    BEGIN = "begin"
    FIND = "see the directory"
    DESCRIBE = "describe its contents"
    WRITE = "write its file"
    COMMIT = "write the manifest"
    """Only rank 0 acts. If its disk is too full to write the outcome, the phase has succeeded
    exactly if the final directory exists."""
    FINISH = "finish"
    """The work after the commit, such as removing old checkpoints. A `CheckpointError` means
    that the new checkpoint was damaged and is removed. After any other error it is kept."""


class Verdict(StrEnum):
    """The outcome of a phase on a rank: the first word of the text that ranks exchange."""

    DONE = "done"
    FAILED = "failed"
    IN_USE = "in-use"
    UNFINISHED = "unfinished"

    @classmethod
    def of(cls, error: Exception, phase: Phase) -> "Verdict":
        """Return the outcome of a phase that raised an error."""
        if isinstance(error, DirectoryInUseError):
            return cls.IN_USE
        if phase is Phase.FINISH and not isinstance(error, CheckpointError):
            return cls.UNFINISHED
        return cls.FAILED


_NO_ROOM = f"{Verdict.FAILED} its disk was too full to write the error"


@attrs.frozen(kw_only=True)
class Contents:
    """The data of a state that one rank passes to a save.

    Attributes:
        units: the fields and slots of the state as plain data, by unit (`params`, `slots.ema`).
        tensors: the tensors that the plain data refer to, by name.
        slices: which slice of each sharded tensor this rank has, by name.
        copy: the number of this rank's copy of the model, if copies of several ranks train
            independently; None otherwise.
        facts: further entries of the manifest, such as `optimizer` and `transforms`.
    """

    units: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    slices: Mapping[str, Slice]
    copy: int | None
    facts: Mapping[str, Any]


def manifest_of(
    contents: Contents, shared: Mapping[str, Any], rank_files: Sequence[files.File]
) -> Manifest:
    """Return the manifest for the files that all ranks have written.

    Args:
        contents: the data of the state on one rank.
        shared: the attributes of the manifest that `divide_writes` returned.
        rank_files: the description of each rank's file.
    """
    return Manifest(
        **contents.facts,
        **shared,
        step=contents.units["step"],
        world_size=len(rank_files),
        trees=contents.units,
        files={rank_file(rank): file for rank, file in enumerate(rank_files)},
    )


@attrs.frozen(kw_only=True)
class Save:
    """A save: the directory of the checkpoint, the step, and this rank in the world.

    Attributes:
        final: the final name of the checkpoint's directory.
        step: the state's step.
        rank: the number of this rank.
        size: the number of ranks.
    """

    final: Path
    step: int
    rank: int
    size: int

    @property
    def partial(self) -> Path:
        """The temporary directory that ranks write to before the commit."""
        return self.final.parent / f".tmp-{self.final.name}"

    @property
    def not_saved(self) -> str:
        """The first words of the error message if the state was not saved."""
        return f"The state of step {self.step} was not saved"

    @property
    def not_finished(self) -> str:
        """The first words of the error message if the work after the commit failed."""
        return f"The state of step {self.step} was saved, but the work after the save failed"

    def run_on_all(
        self,
        exchange: Exchange | None,
        phase: Phase,
        act: Callable[[], str | None],
        *,
        task: str = "",
    ) -> list[str]:
        """Run a phase on every rank; return all results, or raise an error on every rank.

        Args:
            exchange: gathers the outcomes of all ranks. With None, each rank only raises its
                own error.
            phase: the phase of the save.
            act: does this rank's work, and returns a text for all ranks.
            task: what ranks do, in words for errors; by default the phase's value.

        Returns: the texts of all ranks.

        Raises:
            CheckpointWriteError: a rank failed. The message names the rank and the reason.
            DirectoryInUseError: another job has locked the directory.
        """
        failure: Exception | None = None
        task = task or phase.value
        try:
            outcome = f"{Verdict.DONE} {act() or ''}"
        except Exception as error:  # noqa: BLE001 - any error is reported to all ranks
            failure = error
            outcome = f"{Verdict.of(error, phase)} {format_error(error)}"
        outcomes = {self.rank: outcome}
        if exchange is not None and self.size > 1:
            outcomes = dict(enumerate(exchange(task, outcome)))
        if phase is Phase.COMMIT:
            is_done = not outcomes[0] and files.is_there(self.final)
            outcomes = {0: f"{Verdict.DONE} " if is_done else outcomes[0]}
        results: list[str] = []
        for rank, text in outcomes.items():
            verdict, _, message = (text or _NO_ROOM).partition(" ")
            if verdict == Verdict.DONE:
                results.append(message)
                continue
            # if rank 0 could not begin, the directory belongs to another save: keep it
            if self.rank == 0 and (phase is not Phase.BEGIN or failure is None):
                with suppress(OSError):
                    files.remove(self.partial)
            if verdict == Verdict.UNFINISHED:
                msg = f"{self.not_finished}: rank {rank} failed: {message}"
            else:
                msg = f"{self.not_saved}: rank {rank} could not {task}: {message}"
            is_free = verdict != Verdict.IN_USE
            kind = CheckpointWriteError if is_free else DirectoryInUseError
            raise kind(msg) from failure
        return results


def format_error(error: BaseException) -> str:
    """Return an error's message.

    The type of the error comes first, except for errors of accelfn and of the system.
    """
    text = str(error)
    if not (isinstance(error, Error) or (isinstance(error, OSError) and error.errno)):
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
    # paths may not be valid UTF-8
    return text.encode(errors="backslashreplace").decode()


def begin(save: Save) -> None:
    """On rank 0, create the temporary directory; remove what an interrupted save left."""
    if save.rank:
        return
    if arguments.exists(save.final):
        msg = f"{save.final} already exists. Save to a new directory, such as {save.final.name}-2."
        raise CheckpointError(msg)
    files.remove(save.partial)
    files.create(save.partial)


@contextmanager
def new_directory(final: Path) -> Generator[Path]:
    """Yield a temporary directory to write to; rename it when its files are on the disk.

    Raises:
        CheckpointError: the final directory exists already.
        CheckpointWriteError: the disk failed; no directory of the final name is left.
    """
    job = Save(final=final.absolute(), step=0, rank=0, size=1)
    try:
        begin(job)
        yield job.partial
        files.flush(job.partial)
        files.rename(job.partial, job.final)
    except OSError as error:
        files.remove(job.partial)
        msg = f"{final} was not written: {error}."
        raise CheckpointWriteError(msg) from error


def write(save: Save, contents: Mapping[str, Contents], exchange: Exchange) -> None:
    """Write a checkpoint to its temporary directory, then rename the directory.

    Raises:
        CheckpointWriteError: on every rank, if any rank failed.
    """
    descriptions = save.run_on_all(
        exchange, Phase.DESCRIBE, lambda: _describe_states(save, contents)
    )
    ranks, filename = list(map(json.loads, descriptions)), rank_file(save.rank)
    to_write: dict[str, dict[str, torch.Tensor]] = {}
    shared: dict[str, dict[str, Any]] = {}
    for name, content in contents.items():
        rows = [rank[name] for rank in ranks]
        to_write[name], shared[name] = divide_writes(content, rows, save.rank)

    def write_files() -> str:
        records: dict[str, Any] = {}
        for name, tensors in to_write.items():
            path, step = save.partial / name / filename, contents[name].units["step"]
            metadata = {"format": "pt", "step": str(step), "rank": filename[5:10]}
            records[name] = attrs.asdict(write_file(path, tensors, metadata))
        return json.dumps(records)

    texts = save.run_on_all(exchange, Phase.WRITE, write_files)

    def name_it() -> None:
        if save.rank:
            return
        records, digests = list(map(json.loads, texts)), dict[str, str]()
        for name, content in contents.items():
            of_ranks = [files.File.from_plain(rank[name]) for rank in records]
            data = manifest_of(content, shared[name], of_ranks).to_bytes()
            digests[name] = blake3(data).hexdigest()
            files.write(save.partial / name / NAME, [data])
            files.flush(save.partial / name)
        if "" not in digests:
            files.write(save.partial / NAME, [joint_bytes(digests)])
            files.flush(save.partial)
        files.rename(save.partial, save.final)

    save.run_on_all(exchange, Phase.COMMIT, name_it)


def _describe_states(save: Save, contents: Mapping[str, Contents]) -> str:
    """Return the descriptions that other ranks need to divide the writing, as JSON by state.

    Raises:
        CheckpointError: this rank does not see the directory that rank 0 has created.
    """
    check_seen(save)
    for name in filter(None, contents if save.rank == 0 else ()):
        files.create(save.partial / name)
    is_alone = save.size == 1
    return json.dumps(
        {n: describe_contents(c, is_alone=is_alone) for n, c in contents.items()}
    )


def check_seen(save: Save) -> None:
    """Check that this rank sees the directory that rank 0 has created.

    Raises:
        CheckpointError: the directory is not visible.
    """
    if not arguments.is_directory(save.partial):
        msg = (
            f"{save.partial} does not exist on this rank, although rank 0 created it. Use one"
            " directory for all ranks, on a disk that all of them share."
        )
        raise CheckpointError(msg)


def describe_contents(contents: Contents, *, is_alone: bool = False) -> dict[str, Any]:
    """Return this rank's plain data, digests of its tensors, and its slices.

    Args:
        contents: the data of one state on this rank.
        is_alone: whether there is only one rank. Then no digests are computed.
    """
    full = {n: t for n, t in contents.tensors.items() if n not in contents.slices}
    parts = {n: t for n, t in contents.tensors.items() if n in contents.slices}
    of_parts = files.digests(parts) if contents.copy is not None else {}
    return {
        "units": contents.units,
        "tensors": dict.fromkeys(full) if is_alone else files.digests(full),
        "copy": contents.copy,
        "slices": {
            name: {
                "dtype": files.NAMES_OF[contents.tensors[name].dtype],
                "digest": of_parts.get(name),
            }
            | attrs.asdict(place)
            for name, place in contents.slices.items()
        },
    }


def divide_writes(
    contents: Contents, ranks: Sequence[Mapping[str, Any]], rank: int
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Divide the tensors among the ranks that write them.

    A rank writes the tensors and slices that only it has, and its share of the tensors that are
    equal on all ranks.

    Args:
        contents: the data of one state on this rank.
        ranks: the result of `describe_contents` on each rank.
        rank: the number of this rank in `ranks`.

    Returns: the tensors that this rank writes, and the attributes of the `Manifest` that follow
        from the division.
    """
    copies = tuple(rank["copy"] for rank in ranks if rank["copy"] is not None)
    by_rank: dict[str, dict[int, Any]] = {}
    for number, row in enumerate(ranks):
        for name, place in row["slices"].items():
            by_rank.setdefault(name, {})[number] = place
    shardings = {name: _slices_by_file(of, copies) for name, of in by_rank.items()}
    per_rank, trees_by_rank = _differing(ranks, shardings)
    digests = [row["tensors"] for row in ranks]
    first = copies.index(copies[rank]) if copies else rank
    names = {
        name
        for name in per_rank
        if first == rank or digests[first].get(name) != digests[rank].get(name)
    }
    names |= {n for n, at in shardings.items() if rank_file(rank) in at["slices"]}
    common = contents.tensors.keys() - set(per_rank) - shardings.keys()
    sizes = {name: contents.tensors[name].nbytes for name in sorted(common)}
    names |= _share_of(sizes, rank, len(ranks))
    return {name: t for name, t in contents.tensors.items() if name in names}, {
        "per_rank": per_rank,
        "trees_by_rank": trees_by_rank,
        "sharded": shardings,
        "copies": copies,
    }


def _slices_by_file(
    by_rank: Mapping[int, Any], copies: Sequence[int]
) -> dict[str, Any]:
    """Return a tensor's slices by file; if several ranks have equal slices, only the first.

    If copies of the model have different values of the tensor, the slices of every copy are
    listed. Otherwise only the slices of one copy are listed.
    """
    places: dict[str, list[int]] = {}
    for rank, place in by_rank.items():
        places.setdefault(str((place["offset"], place["size"])), []).append(rank)
    differs = len(set(copies)) > 1 and any(
        len({by_rank[rank]["digest"] for rank in ranks}) > 1
        for ranks in places.values()
    )
    slices: dict[tuple[int, str], tuple[str, Any]] = {}
    for rank, place in by_rank.items():
        box = {"offset": place["offset"], "size": place["size"]}
        if 0 not in place["size"]:
            copy = copies[rank] if differs else 0
            slices.setdefault((copy, str(box)), (rank_file(rank), box))
    first = next(iter(by_rank.values()))
    entry = {"dtype": first["dtype"], "shape": first["shape"]}
    return {**entry, "slices": dict(slices.values())}


def _differing(
    ranks: Sequence[Mapping[str, Any]], shardings: Mapping[str, Any]
) -> tuple[tuple[str, ...], tuple[dict[str, Any], ...]]:
    """Return what differs between ranks: the names of tensors, and the trees of units."""

    def different_names(kind: str) -> list[str]:
        names = dict.fromkeys(name for rank in ranks for name in rank[kind])
        first = ranks[0][kind]
        return [n for n in names if any(r[kind].get(n) != first.get(n) for r in ranks)]

    own_units = different_names("units")
    trees = [
        {unit: rank["units"][unit] for unit in own_units if unit in rank["units"]}
        for rank in ranks
    ]
    per_rank = tuple(
        name for name in different_names("tensors") if name not in shardings
    )
    return per_rank, tuple(trees) if own_units else ()


def _share_of(sizes: Mapping[str, int], rank: int, num_ranks: int) -> set[str]:
    """Return a rank's share of tensors; the shares have about the same number of bytes."""
    total, before, names = max(sum(sizes.values()), 1), 0, set[str]()
    for name, num_bytes in sizes.items():
        writer = (2 * before + num_bytes) * num_ranks // (2 * total)
        if min(writer, num_ranks - 1) == rank:
            names.add(name)
        before += num_bytes
    return names


def write_file(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> files.File:
    """Write a file of tensors; if the disk is full, add the needed and free bytes to the error."""
    try:
        return files.write_tensors(path, tensors, metadata)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        num_bytes = sum(t.nbytes for t in tensors.values())
        room = f"needs {num_bytes:,} bytes"
        with suppress(OSError):
            room += f", {shutil.disk_usage(path.parent).free:,} are free"
        reason = f"{os.strerror(error.errno)} ({room})"
        raise OSError(error.errno, reason, str(path)) from error


# The lock of a directory: only one job at a time can write checkpoints there.


LOCK = ".lock"
_LONGEST = 10_000
"""The maximum number of bytes to read from a lock file; a lock has about 200 bytes."""


@attrs.frozen
class Lock:
    """The lock of a directory: a file with a text that names the process that holds the lock.

    Attributes:
        path: the lock file.
        pid: the number of this process. A process that is forked from it does not hold the lock.
        text: the text that the file has while this process holds the lock.
    """

    path: Path
    pid: int
    text: str

    @classmethod
    def of(cls, directory: Path) -> Self:
        """Return the lock of a directory; call `take` to acquire it."""
        pid = os.getpid()
        holder = {
            "host": socket.gethostname(),
            "pid": pid,
            "begun": _process_start(pid),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
            "token": uuid.uuid4().hex,  # differs between two stores of one process
        }
        return cls(directory / LOCK, pid, json.dumps(holder))

    def take(self) -> None:
        """Acquire the lock; take it over from a process of this host that has ended.

        Raises:
            DirectoryInUseError: a running process, or a process of another host, holds the lock.
        """
        while (text := _text_of(self.path)) != self.text:
            if text is None:
                files.claim(self.path, self.text)
                continue
            holder = _refuse_living(self.path, text)
            if files.withdraw(self.path, text):
                sys.stderr.write(
                    f"accelfn: taking over the lock {self.path}: {holder} has ended\n"
                )

    def release(self) -> None:
        """Release the lock if this process acquired it."""
        if self.pid == os.getpid():
            with suppress(OSError):
                files.withdraw(self.path, self.text)


def _text_of(path: Path) -> str | None:
    """Return a lock file's text; None without a file, "" if the file is not a lock file."""
    try:
        with files.open_plain(path) as file:
            text = file.read(_LONGEST + 1).decode()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        return ""
    return text if len(text) <= _LONGEST else ""


def _refuse_living(path: Path, text: str) -> str:
    """Return a description of the process that held a lock, if it has ended on this host.

    Raises:
        DirectoryInUseError: the process may still be running, or the text is damaged.
    """
    try:
        holder = cast("dict[str, Any]", json.loads(text))
        host, pid, since = holder["host"], int(holder["pid"]), holder["since"]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        host, pid, since, holder = "an unknown host", 0, "an unknown time", {}
    if host == socket.gethostname() and _process_start(pid) != holder.get("begun"):
        return f"process {pid} of this host (since {since})"
    msg = (
        f"{path.parent} is in use: process {pid} on {host} has written its checkpoints there"
        f" since {since}. Use another directory. If that process has ended, remove {path}."
    )
    raise DirectoryInUseError(msg)


def _process_start(pid: int) -> str | None:
    """Return the start time of a process of this host, in the system's unit; None if it ended.

    The system reuses process numbers, so only the number and the start time together identify
    a process.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        pass
    else:
        state, *rest = stat.rpartition(")")[2].split()
        return None if state == "Z" else rest[18]
    if arguments.exists(Path("/proc/self/stat")):
        return None
    if system.IS_WINDOWS:  # on Windows, os.kill(pid, 0) would interrupt the process
        return "alive"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        return "another user's"
    return "alive"

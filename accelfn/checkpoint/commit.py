# SPDX-License-Identifier: Apache-2.0
"""The save protocol: files, then a manifest, then the name, and all ranks agree.

In turn, each when all ranks are through with the one before:

1. rank 0 makes a directory `.tmp-NAME`;
2. ranks say by digests what they hold: what is equal on all is divided among them;
3. each writes its file, and flushes it;
4. rank 0 writes the manifest with all digests, flushes the directory, and gives it its
   name by one rename, which it flushes too.

Until the rename there is no checkpoint; behind it there is a whole one.
"""

import errno
import json
import os
import shutil
import socket
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, Self, TypeAlias, cast

import attrs
import torch
from blake3 import blake3

from accelfn.base import arguments
from accelfn.checkpoint import disk, files
from accelfn.checkpoint.manifest import NAME, Manifest, joint_bytes, rank_file
from accelfn.checkpoint.slices import Slice
from accelfn.errors import (
    CheckpointError,
    CheckpointWriteError,
    DirectoryInUseError,
    Error,
)

Exchange: TypeAlias = Callable[[str, str], list[str]]
"""What is done, and a rank's text: the texts of all ranks, in rank order."""

READ_BACK = "read it back"
"""What is done behind the rename: what is not what was written loses its name again."""

_SPEECHLESS = "failed OSError it had no room to say why"


@attrs.frozen(kw_only=True)
class Contents:
    """What one rank saves.

    Attributes:
        units: plain data by unit.
        tensors: those that it refers to.
        slices: which slice of a sharded tensor this rank holds, by name.
        copy: of which copy of the model, where those are trained apart; else None.
        facts: what the manifest says beside: optimizer, transforms, data, kept.
    """

    units: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    slices: Mapping[str, Slice]
    copy: int | None
    facts: Mapping[str, Any]


@attrs.frozen(kw_only=True)
class Division:
    """Who writes what, once all ranks have said what they hold.

    Attributes:
        mine: the tensors that this rank writes.
        per_rank: as a manifest's, and those below.
        trees_by_rank: of every rank.
        sharded: which slices there are.
        copies: of the model.
    """

    mine: Mapping[str, torch.Tensor]
    per_rank: tuple[str, ...]
    trees_by_rank: tuple[dict[str, Any], ...]
    sharded: Mapping[str, Any]
    copies: tuple[int, ...]

    def manifest(
        self, contents: Contents, written: Sequence[files.File], *, step: int
    ) -> Manifest:
        """Return what is there when every rank has written its file."""
        return Manifest(
            **contents.facts,
            step=step,
            world_size=len(written),
            trees=contents.units,
            trees_by_rank=self.trees_by_rank,
            per_rank=self.per_rank,
            sharded=self.sharded,
            copies=self.copies,
            files={rank_file(rank): file for rank, file in enumerate(written)},
        )


@attrs.frozen(kw_only=True)
class Save:
    """Where a checkpoint is written, and by whom.

    Attributes:
        final: the directory to be.
        step: of the state.
        rank: of the world.
        size: of the world.
    """

    final: Path
    step: int
    rank: int
    size: int

    @property
    def partial(self) -> Path:
        """Where it is written until it is whole."""
        return partial_of(self.final)

    @property
    def not_saved(self) -> str:
        """How an error begins."""
        return f"The state of step {self.step} was not saved"

    @property
    def not_verified(self) -> str:
        """How an error begins of a checkpoint that is there, and may not be whole."""
        return f"The state of step {self.step} was saved, but not verified"

    def run_on_all(
        self,
        exchange: Exchange,
        what: str,
        act: Callable[[], str | None],
        *,
        commits: bool = False,
    ) -> list[str]:
        """Act on every rank and return all results, or raise on every rank.

        If it commits, rank 0 alone has acted, and where it had no room to say so, the name is
        there or not.

        Raises:
            CheckpointWriteError: a rank could not; it and its reason are named.
            DirectoryInUseError: another job holds the directory.
        """
        failure: Exception | None = None
        try:
            outcome = f"ok {act() or ''}"
        except Exception as error:  # noqa: BLE001 - whatever it is, all ranks are told
            failure, outcome = (
                error,
                f"failed {type(error).__name__} {format_error(error)}",
            )
            if what == READ_BACK and not isinstance(error, CheckpointError):
                outcome = f"unread {type(error).__name__} {format_error(error)}"
        outcomes = exchange(what, outcome) if self.size > 1 else [outcome]
        if commits:
            done = not outcomes[0] and disk.is_there(self.final)
            outcomes = ["ok "] if done else outcomes[:1]
        for rank, text in enumerate(outcomes):
            if not text.startswith("ok "):
                # before "begin" went well on rank 0, what is there is not of this save
                if self.rank == 0 and (what != "begin" or failure is None):
                    with suppress(OSError):
                        disk.remove(self.partial)
                verdict, _, error = (text or _SPEECHLESS).partition(" ")
                kind, _, reason = error.partition(" ")
                begins = self.not_verified if verdict == "unread" else self.not_saved
                msg = f"{begins}: rank {rank} could not {what}: {reason}"
                in_use = kind == DirectoryInUseError.__name__
                error_type = DirectoryInUseError if in_use else CheckpointWriteError
                raise error_type(msg) from failure
        return [text[3:] for text in outcomes]


def format_error(error: BaseException) -> str:
    """Return an error's text, which begins with its kind where it is none that is known."""
    text = str(error)
    if not (isinstance(error, Error) or (isinstance(error, OSError) and error.errno)):
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
    return text.encode(errors="backslashreplace").decode()  # a path may be any bytes


def partial_of(final: Path) -> Path:
    """Return the name of a checkpoint until it is whole."""
    return final.parent / f".tmp-{final.name}"


def begin(save: Save) -> None:
    """Make the directory; remove what an interrupted save of this name has left."""
    if save.rank:
        return
    if arguments.exists(save.final):
        msg = (
            f"{save.final} exists already; save to a new directory, such as"
            f" {save.final.name}-2."
        )
        raise CheckpointError(msg)
    disk.remove(save.partial)
    disk.create(save.partial)


def write(save: Save, contents: Mapping[str, Contents], exchange: Exchange) -> None:
    """Write a checkpoint whose directory was begun, and give it its name.

    Raises:
        CheckpointWriteError: on every rank, if any rank could not.
    """
    said = save.run_on_all(
        exchange, "say what it holds", lambda: _describe_states(save, contents)
    )
    ranks, own = list(map(json.loads, said)), rank_file(save.rank)
    divisions = {
        name: divide_writes(each, [rank[name] for rank in ranks], save.rank)
        for name, each in contents.items()
    }

    def write_file() -> str:
        written: dict[str, Any] = {}
        for name, each in divisions.items():
            path, step = save.partial / name / own, contents[name].units["step"]
            metadata = {"format": "pt", "step": str(step), "rank": own[5:10]}
            try:
                written[name] = files.write(path, each.mine, metadata).to_plain()
            except OSError as error:
                explain(error, path, each.mine)
        return json.dumps(written)

    texts = save.run_on_all(exchange, "write its file", write_file)

    def name_it() -> None:
        if save.rank:
            return
        written, digests = list(map(json.loads, texts)), dict[str, str]()
        for name, each in contents.items():
            of_ranks = [files.File.from_plain(rank[name]) for rank in written]
            step = each.units["step"]
            data = divisions[name].manifest(each, of_ranks, step=step).to_bytes()
            digests[name] = blake3(data).hexdigest()
            disk.write(save.partial / name / NAME, [data])
            disk.flush(save.partial / name)
        if "" not in digests:
            disk.write(save.partial / NAME, [joint_bytes(digests)])
            disk.flush(save.partial)
        disk.rename(save.partial, save.final)

    save.run_on_all(exchange, "write the manifest", name_it, commits=True)


def _describe_states(save: Save, contents: Mapping[str, Contents]) -> str:
    """Return what tells this rank's values from another's, and which slices it holds.

    Raises:
        CheckpointError: this rank does not see the directory that rank 0 has made.
    """
    check_seen(save)
    for name in filter(None, contents if save.rank == 0 else ()):
        disk.create(save.partial / name)
    is_alone = save.size == 1
    return json.dumps(
        {n: describe_contents(c, is_alone=is_alone) for n, c in contents.items()}
    )


def check_seen(save: Save) -> None:
    """Raise where this rank does not see the directory that rank 0 has made.

    Raises:
        CheckpointError: it does not.
    """
    if not arguments.is_directory(save.partial):
        msg = (
            f"it does not see {save.partial}, which rank 0 has made. Give all ranks one"
            " directory, on a disk that all see."
        )
        raise CheckpointError(msg)


def describe_contents(contents: Contents, *, is_alone: bool = False) -> dict[str, Any]:
    """Return what tells this rank's values from another's, and which slices it holds."""
    whole = {n: t for n, t in contents.tensors.items() if n not in contents.slices}
    parts = {n: t for n, t in contents.tensors.items() if n in contents.slices}
    of_parts = files.digests(parts) if contents.copy is not None else {}
    return {
        "units": contents.units,
        "tensors": dict.fromkeys(whole) if is_alone else files.digests(whole),
        "copy": contents.copy,
        "slices": {
            name: {
                "dtype": files.name_of(contents.tensors[name].dtype),
                "digest": of_parts.get(name),
            }
            | attrs.asdict(place)
            for name, place in contents.slices.items()
        },
    }


def divide_writes(
    contents: Contents, ranks: Sequence[Mapping[str, Any]], rank: int
) -> Division:
    """Return who writes what, of what all ranks have said."""
    copies = tuple(each["copy"] for each in ranks if each["copy"] is not None)
    sharded = _slices_by_tensor(ranks, copies or (0,) * len(ranks))
    per_rank, trees_by_rank = _differing(ranks, sharded)
    held = [each["tensors"] for each in ranks]
    first = copies.index(copies[rank]) if copies else rank
    own = [
        name
        for name in per_rank
        if first == rank or held[first].get(name) != held[rank].get(name)
    ]
    return Division(
        mine=_tensors_to_write(
            contents.tensors, per_rank, own, sharded, place=(rank, len(ranks))
        ),
        per_rank=per_rank,
        trees_by_rank=trees_by_rank,
        sharded=sharded,
        copies=copies,
    )


def _slices_by_tensor(
    ranks: Sequence[Mapping[str, Any]], copies: Sequence[int]
) -> dict[str, Any]:
    """Return where the slices of sharded tensors are; each copy's own, where they differ."""
    held: dict[str, dict[int, Any]] = {}
    for rank, each in enumerate(ranks):
        for name, place in each["slices"].items():
            held.setdefault(name, {})[rank] = place
    own = {name for name, by_rank in held.items() if _differ(by_rank, copies)}
    alike = (0,) * len(ranks)
    return {
        name: _slices_by_file(by_rank, copies if name in own else alike)
        for name, by_rank in held.items()
    }


def _slices_by_file(
    by_rank: Mapping[int, Any], copies: Sequence[int]
) -> dict[str, Any]:
    """Return where a tensor's slices are: of equal ones in a copy, the first rank's."""
    slices: dict[tuple[int, str], tuple[str, Any]] = {}
    for rank, place in by_rank.items():
        box = {"offset": place["offset"], "size": place["size"]}
        if 0 not in place["size"]:
            slices.setdefault((copies[rank], str(box)), (rank_file(rank), box))
    first = next(iter(by_rank.values()))
    whole = {"dtype": first["dtype"], "shape": first["shape"]}
    return {**whole, "slices": dict(slices.values())}


def _differ(by_rank: Mapping[int, Any], copies: Sequence[int]) -> bool:
    """Whether copies have other values of a slice."""
    digests: dict[str, set[str]] = {}
    for place in by_rank.values():
        box = str((place["offset"], place["size"]))
        digests.setdefault(box, set()).add(place["digest"])
    return len(set(copies)) > 1 and any(len(each) > 1 for each in digests.values())


def _differing(
    ranks: Sequence[Mapping[str, Any]], sharded: Mapping[str, Any]
) -> tuple[tuple[str, ...], tuple[dict[str, Any], ...]]:
    """Return the tensors, and the trees of units, that are not the same on all ranks."""
    names = dict.fromkeys(name for each in ranks for name in each["tensors"])
    own = [n for n in names if len({each["tensors"].get(n) for each in ranks}) > 1]
    units = dict.fromkeys(name for each in ranks for name in each["units"])
    apart = [
        unit
        for unit in units
        if any(each["units"].get(unit) != ranks[0]["units"].get(unit) for each in ranks)
    ]
    trees = [
        {unit: each["units"][unit] for unit in apart if unit in each["units"]}
        for each in ranks
    ]
    kept = tuple(name for name in own if name not in sharded)
    return kept, tuple(trees) if apart else ()


def _tensors_to_write(
    tensors: Mapping[str, torch.Tensor],
    per_rank: Sequence[str],
    own: Sequence[str],
    sharded: Mapping[str, Any],
    *,
    place: tuple[int, int],
) -> dict[str, torch.Tensor]:
    """Return the tensors that this rank writes: its own, and its part of what all have."""
    rank, size = place
    common = sorted(tensors.keys() - set(per_rank) - sharded.keys())
    sizes = [tensors[n].numel() * tensors[n].dtype.itemsize for n in common]
    total, before, mine = max(sum(sizes), 1), 0, set(own)
    mine |= {n for n, at in sharded.items() if rank_file(rank) in at["slices"]}
    for name, num_bytes in zip(common, sizes, strict=True):
        writer = (2 * before + num_bytes) * size // (2 * total)
        if min(writer, size - 1) == rank:
            mine.add(name)
        before += num_bytes
    return {name: tensor for name, tensor in tensors.items() if name in mine}


def explain(
    error: OSError, path: Path, tensors: Mapping[str, torch.Tensor]
) -> NoReturn:
    """Raise the error, where a disk is full with how much room there was."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        raise error
    needed = sum(t.numel() * t.dtype.itemsize for t in tensors.values())
    try:
        free = shutil.disk_usage(path.parent).free
    except OSError:
        raise error from None
    reason = f"{os.strerror(error.errno)} (needs {needed:,} bytes, {free:,} are free)"
    raise OSError(error.errno, reason, str(path)) from error


# One job writes to a directory of checkpoints: the lock that says which.


LOCK = ".lock"
_LONGEST = 10_000
"""Bytes; some 200 are what a lock has."""


@attrs.frozen
class Lock:
    """What this process says in a lock's file when it holds it.

    Attributes:
        path: of the file.
        pid: of this process; one forked from it holds nothing.
        text: what is in the file.
    """

    path: Path
    pid: int
    text: str

    @classmethod
    def of(cls, directory: Path) -> Self:
        """Return a lock of a directory, not taken yet."""
        pid = os.getpid()
        mine = {
            "host": socket.gethostname(),
            "pid": pid,
            "begun": _process_start(pid),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
            "token": uuid.uuid4().hex,  # of two locks of one process
        }
        return cls(directory / LOCK, pid, json.dumps(mine))

    def take(self) -> None:
        """Take it, if it is not taken; a dead process's of this host is taken over.

        Raises:
            DirectoryInUseError: another process holds it, or one on another host did.
        """
        while (found := _text_of(self.path)) != self.text:
            if found is None:
                disk.claim(self.path, self.text)
                continue
            holder = _refuse_living(self.path, found)
            if disk.withdraw(self.path, found):
                sys.stderr.write(
                    f"accelfn: taking over {self.path} of {holder}, which is gone\n"
                )

    def release(self) -> None:
        """Let others take it, if it is this process's."""
        if self.pid == os.getpid():
            with suppress(OSError):
                disk.withdraw(self.path, self.text)


def _text_of(path: Path) -> str | None:
    """Return what is in a lock's file, or nothing of what no lock says."""
    try:
        with disk.open_plain(path) as file:
            text = file.read(_LONGEST + 1).decode()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        return ""
    return text if len(text) <= _LONGEST else ""


def _refuse_living(path: Path, text: str) -> str:
    """Return which process held a lock, which was one of this host and is dead.

    Raises:
        DirectoryInUseError: that is not so, or nobody can tell, for the text is cut off.
    """
    try:
        holder = cast("dict[str, Any]", json.loads(text))
        host, pid, since = holder["host"], int(holder["pid"]), holder["since"]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        host, pid, since, holder = "an unknown host", 0, "an unknown time", {}
    if host == socket.gethostname() and _process_start(pid) != holder.get("begun"):
        return f"process {pid} of this host (since {since})"
    msg = (
        f"{path.parent} is in use: a job writes its checkpoints there, held by {host}:{pid}"
        f" since {since}. Give each job a directory of its own; if that one is gone, remove"
        f" {path}."
    )
    raise DirectoryInUseError(msg)


def _process_start(pid: int) -> str | None:
    """Return when a process of this host began, in a unit of the system's; None: it is dead.

    A process number is given again in time; number and beginning together are not.
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
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        return "another user's"
    return "alive"

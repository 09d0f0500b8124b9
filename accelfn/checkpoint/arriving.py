# SPDX-License-Identifier: Apache-2.0
"""What ranks hand over to one another, of which each keeps what it goes on with.

It arrives in stages, in an order that the manifest says, so all ranks know it: first what all had
alike, what has no mean, and the slots that are merged; then what else was each one's own, one
rank's (or copy's) after the other. A rank that fails lets the rest pass: then nobody waits for it,
and it says so in what ranks do next.
"""

import contextlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

import attrs
import torch

from accelfn.checkpoint.elastic import Source, addressed, goes_on, merged, to_merge
from accelfn.checkpoint.files import Entry
from accelfn.checkpoint.manifest import Manifest, rank_file
from accelfn.collectives import broadcast_
from accelfn.state.state import TrainState
from accelfn.world import World

Arrival = tuple[str, Mapping[str, torch.Tensor]]
"""A file of a save, and some of its tensors."""
Arrivals = Iterator[Arrival | None]
"""What arrives; None behind each stage."""
Held = dict[str, dict[str, torch.Tensor]]
"""The tensors of each file that this rank keeps, on the host."""

_AT_ONCE = 25_000_000
"""Bytes that are sent together, at least where tensors are small."""


def arriving(
    manifest: Manifest,
    merging: AbstractSet[str],
    mine: Mapping[str, torch.Tensor],
    givers: Sequence[int],
    *,
    meeting: World,
) -> Arrivals:
    """Yield what a save would have written, on all ranks; each step is a collective.

    Args:
        manifest: of that save.
        merging: the tensors in slots that are merged.
        mine: what this rank would have written.
        givers: the ranks that would have, in the order of their files.
        meeting: the world of all.
    """
    own = manifest.with_mean - merging
    copies = manifest.copies or range(manifest.world_size)
    for copy in (None, *sorted({*copies})):
        for place, root in enumerate(givers):
            entries = manifest.files[rank_file(place)].tensors
            due = {
                name: entry
                for name, entry in entries.items()
                if (copies[place] if name in own else None) == copy
            }
            for some in _some_at_once(due):
                yield rank_file(place), _sent(some, mine, root=root, world=meeting)
        yield None


def received(
    state: TrainState, manifest: Manifest, where: str, arrivals: Arrivals
) -> Source:
    """Return what this rank goes on with, once all has arrived.

    Args:
        state: that is to go on, in its new world.
        manifest: of what arrives.
        where: what errors call it.
        arrivals: what arrives.

    Raises:
        CheckpointError: as `source_of`.
    """
    with to_the_end(arrivals):
        held: Held = {}
        source = attrs.evolve(addressed(state, manifest, where), held=held)
        wanted = source.places(source.rank, source.names)
        if not goes_on(state, source):
            for rank in manifest.firsts:
                wanted |= source.places(rank, to_merge(state, manifest, rank))
        _keep(held, _stage(arrivals), wanted)
        source = merged(state, source)
        if source.weights is None:
            for _ in manifest.firsts:
                _keep(held, _stage(arrivals), wanted)
            return source
        means = source.mean(lambda rank: _passing(source, rank, held, _stage(arrivals)))
        return attrs.evolve(source, means=means)


@contextlib.contextmanager
def to_the_end(arrivals: Arrivals) -> Generator[None]:
    """Take part in the collectives that are left if the block fails: others wait in them."""
    try:
        yield
    except Exception:
        for _ in arrivals:  # none are left, if it was a collective that failed
            pass
        raise


def _stage(arrivals: Arrivals) -> Iterator[Arrival]:
    while (arrived := next(arrivals, None)) is not None:
        yield arrived


def _keep(
    held: Held, arrived: Iterator[Arrival], wanted: AbstractSet[tuple[str, str]]
) -> None:
    for file, tensors in arrived:
        _keep_some(held, file, tensors, wanted)


def _keep_some(
    held: Held,
    file: str,
    tensors: Mapping[str, torch.Tensor],
    wanted: AbstractSet[tuple[str, str]],
) -> None:
    kept = {name: t.cpu() for name, t in tensors.items() if (file, name) in wanted}
    held.setdefault(file, {}).update(kept)


def _passing(
    source: Source, rank: int, held: Held, arrived: Iterator[Arrival]
) -> Iterator[Mapping[str, torch.Tensor]]:
    """Yield what a rank had, each tensor when all of its slices are there, and keep none.

    Args:
        source: what this rank goes on with.
        rank: whose tensors arrive.
        held: where slices wait for the others of their tensor.
        arrived: one stage.
    """
    names = source.names & source.manifest.with_mean
    files = {n: {f for f, _ in source.places(rank, {n})} for n in names}
    stays = {(f, n) for n in names for f in files[n] if n in held.get(f, {})}
    for file, tensors in arrived:
        _keep_some(held, file, tensors, source.places(rank, names & tensors.keys()))
        there = {
            n
            for n in tensors
            if n in files and all(n in held.get(f, {}) for f in files[n])
        }
        yield source.of_rank(rank, there)
        for name in there:
            for each in files.pop(name):
                if (each, name) not in stays:
                    del held[each][name]
    yield source.of_rank(rank, set(files))


def _sent(
    some: Mapping[str, Entry],
    mine: Mapping[str, torch.Tensor],
    *,
    root: int,
    world: World,
) -> dict[str, torch.Tensor]:
    """Return tensors that rank `root` has, on all ranks."""
    if world.rank == root:
        tensors = [mine[name].detach().to(world.device) for name in some]
    else:
        tensors = [entry.empty().to(world.device) for entry in some.values()]
    broadcast_(tensors, world, root=root, label="with_world: hand over")
    return dict(zip(some, tensors, strict=True))


def _some_at_once(entries: Mapping[str, Entry]) -> Iterator[dict[str, Entry]]:
    some: dict[str, Entry] = {}
    num_bytes = 0
    for name, entry in entries.items():
        some[name] = entry
        num_bytes += entry.end - entry.begin
        if num_bytes >= _AT_ONCE:
            yield some
            some, num_bytes = {}, 0
    if some:
        yield some

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
Held = dict[str, dict[str, torch.Tensor]]
"""The tensors of each file that this rank keeps, on the host."""

_AT_ONCE = 25_000_000
"""Bytes that are sent together, at least where tensors are small."""


@attrs.frozen(kw_only=True)
class Sending:
    """What one rank sends to all at once.

    Attributes:
        file: of a save, in which they would be.
        entries: the tensors.
        root: the rank.
    """

    file: str
    entries: Mapping[str, Entry]
    root: int


class Arrivals:
    """What a save would have written, as it arrives on all ranks: each step is a collective.

    A rank whose part of one fails has taken part in it, and in the next ones if they are asked
    for; not where the collective itself has failed.
    """

    def __init__(
        self,
        sendings: Iterator[Sending | None],
        mine: Mapping[str, torch.Tensor],
        world: World,
    ) -> None:
        """Take what is sent, None behind each stage, and what this rank would have written."""
        self._sendings, self._mine, self._world = sendings, mine, world
        self.is_broken = False

    def stage(self) -> Iterator[Arrival]:
        """Yield what arrives until the end of a stage."""
        while (sending := next(self._sendings, None)) is not None:
            yield sending.file, self._sent(sending)

    @contextlib.contextmanager
    def to_the_end(self) -> Generator[None]:
        """Take part in what is left if the block fails: others wait in it."""
        try:
            yield
        except Exception:
            for sending in self._sendings:
                if sending is not None and not self.is_broken:
                    with contextlib.suppress(Exception):
                        self._sent(sending)
            raise

    def _sent(self, sending: Sending) -> dict[str, torch.Tensor]:
        """Return tensors that one rank has, on all."""
        error: Exception | None = None
        self.is_broken = True  # until the others have what they wait for
        try:
            tensors = self._prepared(sending)
        except Exception as raised:  # noqa: BLE001 - the others wait for this one
            error, tensors = raised, self._empty(sending)
        broadcast_(
            tensors, self._world, root=sending.root, label="with_world: hand over"
        )
        self.is_broken = False
        if error is not None:
            raise error
        return dict(zip(sending.entries, tensors, strict=True))

    def _prepared(self, sending: Sending) -> list[torch.Tensor]:
        if self._world.rank != sending.root:
            return self._empty(sending)
        there = [self._mine[name].detach() for name in sending.entries]
        return [each.to(self._world.device) for each in there]

    def _empty(self, sending: Sending) -> list[torch.Tensor]:
        entries = sending.entries.values()
        return [entry.empty().to(self._world.device) for entry in entries]


def sendings(
    manifest: Manifest, merging: AbstractSet[str], givers: Sequence[int]
) -> Iterator[Sending | None]:
    """Yield what is sent, None behind each stage.

    Args:
        manifest: of what a save would have written.
        merging: the tensors in slots that are merged.
        givers: the ranks that would have written, in the order of their files.
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
                yield Sending(file=rank_file(place), entries=some, root=root)
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
    held: Held = {}
    source = attrs.evolve(addressed(state, manifest, where), held=held)
    wanted = source.places(source.rank, source.names)
    if not goes_on(state, source):
        for rank in manifest.firsts:
            wanted |= source.places(rank, to_merge(state, manifest, rank))
    _keep(held, arrivals.stage(), wanted)
    source = merged(state, source)
    if source.weights is None:
        for _ in manifest.firsts:
            _keep(held, arrivals.stage(), wanted)
        return source
    means = source.mean(lambda rank: _passing(source, rank, held, arrivals.stage()))
    return attrs.evolve(source, means=means)


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
                del held[each][name]
    yield source.of_rank(rank, set(files))


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

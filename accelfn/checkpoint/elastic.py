# SPDX-License-Identifier: Apache-2.0
"""Which files a rank reads: those of as many ranks, or of any other number."""

import contextlib
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, cast

import attrs
import torch

from accelfn.base import tree
from accelfn.base.codec import decode, tensors_in
from accelfn.base.tree import local
from accelfn.checkpoint import files
from accelfn.checkpoint.files import Entry
from accelfn.checkpoint.manifest import Manifest, rank_file
from accelfn.checkpoint.save import decode_fields, encode_fields, fields_of
from accelfn.checkpoint.slices import (
    Slice,
    assemble,
    dtensor_like,
    is_sharded,
    slice_of,
)
from accelfn.collectives import broadcast_
from accelfn.errors import CheckpointError
from accelfn.state.state import TrainState
from accelfn.world import World


@attrs.frozen(kw_only=True)
class Source:
    """A checkpoint as one rank reads it.

    Attributes:
        folder: where it is; of one in memory, what errors call it.
        manifest: what it holds.
        rank: as which rank it is read.
        device: on which tensors are to be.
        verify: whether to compare digests.
        weights: of the ranks, or copies, in the mean of what was theirs; None: as this rank
            had it.
        sharded: the state's DTensors, by name.
        slots: those that take the place of the ranks' own, where there is a mean.
        on_read: called with how many bytes have been read since it was last called.
        held: the tensors of each file, where they are in memory and not in a folder.
        means: those over ranks, where they were taken as the ranks' own arrived.
    """

    folder: Path | str
    manifest: Manifest
    rank: int = 0
    device: str = "cpu"
    verify: bool = True
    weights: tuple[float, ...] | None = None
    slots: Mapping[str, Any] = attrs.field(factory=dict)
    sharded: Mapping[str, torch.Tensor] = attrs.field(factory=dict)
    on_read: files.OnRead = files.ignore_progress
    held: Mapping[str, Mapping[str, torch.Tensor]] | None = None
    means: Mapping[str, torch.Tensor] | None = None

    def fields(self) -> dict[str, Any]:
        """Return all fields."""
        trees = self._trees
        fields = decode_fields(trees, self.tensors(_names_in(trees)))
        return {**fields, "slots": {**fields["slots"], **self.slots}}

    def outline(self) -> dict[str, Any]:
        """Return all fields with tensors that show how the saved ones will lie; it reads nothing.

        Their values are missing, or those of the state's DTensors.
        """
        trees = self._trees
        return decode_fields(trees, {n: self._outline(n) for n in _names_in(trees)})

    def _outline(self, name: str) -> torch.Tensor:
        whole = self.manifest.sharded.get(name)
        if whole is None:
            file = self.manifest.file_of(name, self.rank)
            whole = attrs.asdict(self.manifest.files[file].tensors[name])
        shape, dtype = torch.Size(whole["shape"]), files.DTYPES[whole["dtype"]]
        cut = self.sharded.get(name)
        if cut is not None and (cut.shape, cut.dtype) == (shape, dtype):
            return cut
        return torch.empty(shape, dtype=dtype, device="meta")

    @property
    def names(self) -> set[str]:
        """The tensors in all fields but the slots that take the place of the ranks' own."""
        return _names_in(self._trees)

    @property
    def _trees(self) -> dict[str, Any]:
        merged = {f"slots.{name}" for name in self.slots}
        trees = self.manifest.trees_of(self.rank)
        return {unit: tree for unit, tree in trees.items() if unit not in merged}

    def tensors(self, names: AbstractSet[str]) -> dict[str, torch.Tensor]:
        """Return tensors by name; where the state has a DTensor, its slice as one."""
        moving: AbstractSet[str] = frozenset()
        means: Mapping[str, torch.Tensor] = {}
        if self.weights is not None:
            moving = names & self.manifest.with_mean
            means = self._means(moving)
        found = {**self.of_rank(self.rank, names - moving), **means}
        wanted = {n: each for n, each in self.sharded.items() if n in found}
        return found | {n: dtensor_like(found[n], each) for n, each in wanted.items()}

    def of_rank(self, rank: int, names: AbstractSet[str]) -> dict[str, torch.Tensor]:
        """Return tensors as a rank had them; where the state has a DTensor, its slice."""
        apart = {n for n in names if self._is_apart(n)}
        return self._reslice(rank, apart) | self._read_full(rank, names - apart)

    def places(self, rank: int, names: AbstractSet[str]) -> set[tuple[str, str]]:
        """Return the files, each with a name, of which `of_rank` reads something."""
        return {
            (file, name)
            for name in names
            for file in (
                self._plan(rank, name).overlapping
                if self._is_apart(name)
                else [self.manifest.file_of(name, rank)]
            )
        }

    def _is_apart(self, name: str) -> bool:
        return name in self.manifest.sharded or name in self.sharded

    def _read_full(self, rank: int, names: AbstractSet[str]) -> dict[str, torch.Tensor]:
        places = {name: self.manifest.file_of(name, rank) for name in names}
        found = self._read_files(
            {(file, name) for name, file in places.items()}, self.device
        )
        return {name: found[file, name] for name, file in places.items()}

    def _read_files(
        self,
        places: AbstractSet[tuple[str, str]],
        device: str,
        *,
        is_copied: bool = False,
    ) -> dict[tuple[str, str], torch.Tensor]:
        """Return tensors by file and name, on a device, each file read once."""
        found: dict[tuple[str, str], torch.Tensor] = {}
        for file in sorted({file for file, _ in places}):
            here = {name for each, name in places if each == file}
            tensors = self._read_file(file, here, device, is_copied=is_copied)
            found |= {(file, name): tensor for name, tensor in tensors.items()}
        return found

    def _read_file(
        self, file: str, names: AbstractSet[str], device: str, *, is_copied: bool
    ) -> dict[str, torch.Tensor]:
        """Return tensors of a file in memory of their own, unless the caller copies them."""
        if self.held is not None:
            held = self.held[file]
            return {n: held[n].to(device, copy=not is_copied) for n in names}
        return files.read(
            Path(self.folder) / file,
            self.manifest.files[file],
            names,
            device=device,
            verify=self.verify,
            on_read=self.on_read,
        )

    def _reslice(self, rank: int, names: AbstractSet[str]) -> dict[str, torch.Tensor]:
        """Return tensors of which slices were saved, or are wanted."""
        plans = {name: self._plan(rank, name) for name in names}
        read = self._read_files(
            {(f, name) for name, plan in plans.items() for f in plan.overlapping},
            "cpu",
            is_copied=True,
        )
        found: dict[str, torch.Tensor] = {}
        for name, plan in plans.items():
            parts = [(plan.parts[f], read[f, name]) for f in plan.overlapping]
            wanted = self.sharded.get(name)
            device = self.device if wanted is None else local(wanted).device
            found[name] = assemble(plan.target, plan.dtype, parts).to(device)
        return found

    def _plan(self, rank: int, name: str) -> "_Plan":
        saved = self.manifest.sharded.get(name)
        if saved is None:
            file = self.manifest.file_of(name, rank)
            entry = self.manifest.files[file].tensors[name]
            dtype, shape = entry.dtype, tuple(entry.shape)
            parts = {file: Slice.whole(shape)}
        else:
            dtype, shape = saved["dtype"], tuple(saved["shape"])
            parts = {
                file: Slice(shape, tuple(box["offset"]), tuple(box["size"]))
                for file, box in self.manifest.slices_of(name, rank).items()
            }
        wanted = self.sharded.get(name)
        target = None if wanted is None else slice_of(wanted)
        if wanted is not None and target is not None and target.shape != shape:
            msg = (
                f"{self.folder}: {name} was saved as {shape} {files.DTYPES[dtype]}, and the"
                f" state's is {target.shape} {wanted.dtype}. Load into a state of the model"
                " that was saved."
            )
            raise CheckpointError(msg)
        return _Plan(target or Slice.whole(shape), files.DTYPES[dtype], parts)

    def _means(self, names: AbstractSet[str]) -> dict[str, torch.Tensor]:
        if self.means is None:
            return self.mean(lambda rank: [self.of_rank(rank, names)])
        return {name: self.means[name] for name in names}

    def mean(
        self, parts: Callable[[int], Iterable[Mapping[str, torch.Tensor]]]
    ) -> dict[str, torch.Tensor]:
        """Return the means over ranks, or over copies, taking one's at a time.

        Args:
            parts: gives the tensors that a rank had, some at a time.
        """
        weights = self.weights or ()
        total = sum(weights)
        sums: dict[str, torch.Tensor] = {}
        dtypes: dict[str, torch.dtype] = {}
        for rank, weight in zip(self.manifest.firsts, weights, strict=True):
            share = weight / total if total else 1 / len(weights)
            for part in parts(rank):
                for name, tensor in part.items():
                    dtypes[name] = tensor.dtype
                    wide = tensor.float() if tensor.dtype.itemsize < 4 else tensor
                    sums[name] = wide * share + sums.get(name, 0)
        return {name: each.to(dtypes[name]) for name, each in sums.items()}


@attrs.frozen
class _Plan:
    """How a slice is made of those that were saved."""

    target: Slice
    dtype: torch.dtype
    parts: Mapping[str, Slice]

    @property
    def overlapping(self) -> list[str]:
        """The files of which something is needed."""
        return [f for f, part in self.parts.items() if self.target.within(part)]


def source_of(
    state: TrainState, manifest: Manifest, folder: Path | str, *, verify: bool = True
) -> Source:
    """Return how this rank reads a checkpoint.

    Raises:
        CheckpointError: ranks differed in what has no mean, and there are more or fewer now.
    """
    return with_merged_slots(
        state, unmerged_source(state, manifest, folder, verify=verify)
    )


def unmerged_source(
    state: TrainState, manifest: Manifest, folder: Path | str, *, verify: bool = True
) -> Source:
    """Return how this rank reads a checkpoint, before slots are merged; it reads nothing."""
    world = state.world
    source = Source(
        folder=folder,
        manifest=manifest,
        device=str(world.device),
        verify=verify,
        sharded=_sharded_tensors(state, manifest),
    )
    own = is_compatible(state, source) and manifest.differs
    return attrs.evolve(source, rank=world.rank if own else 0)


def is_compatible(state: TrainState, source: Source) -> bool:
    """Whether each rank goes on with what one rank had."""
    manifest, world = source.manifest, state.world
    # ranks that have copies together are none that have one each
    alike = manifest.copies == state.definition.copy_of_each
    if not manifest.copies:
        alike = alike and not source.sharded.keys() & set(manifest.per_rank)
    alike = alike or manifest.differs in ((), ("buffers",))
    return manifest.world_size == world.size and alike


def with_merged_slots(state: TrainState, source: Source) -> Source:
    """Return the source with slots for more or fewer ranks, where there are.

    Raises:
        CheckpointError: ranks differed in what has no mean, and there are more or fewer now.
    """
    if is_compatible(state, source):
        return source
    if source.manifest.differs in ((), ("buffers",)):
        return _merge_equal_slots(state, source)
    return _merge_by_average(state, source)


def to_merge(state: TrainState, manifest: Manifest, rank: int) -> set[str]:
    """Return the tensors in slots, as a rank had them, of which one slot is made."""
    trees = manifest.trees_of(rank)
    slots = {f"slots.{each.name}" for each in _merging(state, manifest)}
    return _names_in({unit: trees[unit] for unit in slots & trees.keys()})


def _names_in(trees: Mapping[str, Any]) -> set[str]:
    return {name for tree in trees.values() for name in tensors_in(tree)}


def _sharded_tensors(
    state: TrainState, manifest: Manifest
) -> Mapping[str, torch.Tensor]:
    """Return how what is split is to lie, by the names under which it is saved.

    As the state has it; what the state does not have yet, as its parameter.
    """
    fields = fields_of(state)
    if not any(map(is_sharded, tree.tree_leaves(fields))):
        return _params_by_saved_name(state, manifest)
    there = encode_fields(fields)[1]
    # a name that is a number may be another's
    known = {name for name in there if not name.startswith("<")}
    to_come = _params_by_saved_name(state, manifest)
    return {n: t for n, t in to_come.items() if n not in known} | there.sharded


def _params_by_saved_name(
    state: TrainState, manifest: Manifest
) -> Mapping[str, torch.Tensor]:
    """Return how what belongs to parameters is to lie, by the names under which it is saved.

    A state that was not stepped has nothing of its optimizer yet that would tell.
    """
    layout = state.definition.layout
    if layout is None:
        return {}
    found: dict[str, torch.Tensor] = {}
    units = {u: t for u, t in manifest.trees.items() if u not in ("params", "buffers")}
    for tensor, param in _params_of(units, layout.cuts):
        if manifest.shape_of(tensor) == tuple(layout.shapes[param]):
            found[tensor] = state.params[param]
    return found


def _params_of(
    coded: Any, params: Collection[str], within: str | None = None
) -> Iterator[tuple[str, str]]:
    """Yield the tensors of an encoded tree that stand under a parameter's name, and it."""
    if isinstance(coded, list):
        for each in cast("list[Any]", coded):
            yield from _params_of(each, params, within)
    elif isinstance(coded, dict):
        for key, inside in cast("dict[str, Any]", coded).items():
            if key == "tensor" and isinstance(inside, str) and within is not None:
                yield inside, within
            else:
                yield from _params_of(inside, params, key if key in params else within)


def _merging(state: TrainState, manifest: Manifest) -> list[Any]:
    """Return the transforms that make one slot of those that were saved."""
    saved = manifest.slots & set(manifest.transforms)
    return [e for e in state.setup.owners["merge"] if e.name in saved]


def _merge_equal_slots(state: TrainState, source: Source) -> Source:
    """Return the source with one slot for more or fewer ranks, of what was alike on all."""
    slots: dict[str, Any] = {}
    for each in _merging(state, source.manifest):
        slot = _slot(source, each.name, 0)
        count = len(source.manifest.firsts)
        _, slots[each.name] = _call_merge(state, each, [slot] * count, source)
    return attrs.evolve(source, slots=slots)


def _call_merge(
    state: TrainState, transform: Any, slots: list[Any], source: Source
) -> tuple[list[float], Any]:
    try:
        weights, slot = transform.merge(slots, state.world)
    except Exception as error:
        msg = (
            f"{source.folder}: {transform.name} cannot merge what its ranks saved:"
            f" {error!r}."
        )
        raise CheckpointError(msg) from error
    if len(weights) != len(slots):
        msg = (
            f"{source.folder}: {transform!r}.merge gave {len(weights)} weights for the"
            f" slots of {len(slots)} ranks; expected one for each."
        )
        raise CheckpointError(msg)
    return weights, slot


def _merge_by_average(state: TrainState, source: Source) -> Source:
    """Return the source with the ranks' weights in a mean."""
    manifest = source.manifest
    merging = _merging(state, manifest)
    with_mean = {"params", "buffers", "opt_state"}
    with_mean |= {f"slots.{each.name}" for each in state.setup}
    apart = {
        unit
        for trees in manifest.trees_by_rank
        for unit in trees
        if unit not in {f"slots.{each.name}" for each in merging}
    }
    without = sorted((set(manifest.differs) - with_mean) | apart)
    if without or len(merging) != 1:
        what, size = ", ".join(without or manifest.differs), state.world.size
        here = (
            f"this world has {size}. Load it on as many"
            if size != manifest.world_size
            else "these have other parts of the model. Load it with the setup and axes that"
            " it was saved with"
        )
        msg = (
            f"{source.folder} was saved on {manifest.world_size} ranks whose {what}"
            f" differed, and {here}, or save where ranks agree."
        )
        raise CheckpointError(msg)
    (transform,) = merging
    slots = [_slot(source, transform.name, rank) for rank in manifest.firsts]
    weights, slot = _call_merge(state, transform, slots, source)
    return attrs.evolve(source, weights=tuple(weights), slots={transform.name: slot})


def _slot(source: Source, name: str, rank: int) -> Any:
    """Return a transform's slot as a rank had it."""
    tree = source.manifest.trees_of(rank)[f"slots.{name}"]
    of_rank = attrs.evolve(source, rank=rank)
    return decode(tree, of_rank.tensors(set(tensors_in(tree))))


# What ranks hand over to one another, of which each keeps what it goes on with.
#
# It arrives in stages, in an order that the manifest says, so all ranks know it: first what
# all had alike, what has no mean, and the slots that are merged; then what else was each
# one's own, one rank's (or copy's) after the other. A rank that fails lets the rest pass:
# then nobody waits for it, and it says so in what ranks do next.


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
            yield sending.file, self._broadcast(sending)

    @contextlib.contextmanager
    def to_the_end(self) -> Generator[None]:
        """Take part in what is left if the block fails: others wait in it."""
        try:
            yield
        except Exception:
            for sending in self._sendings:
                if sending is not None and not self.is_broken:
                    with contextlib.suppress(Exception):
                        self._broadcast(sending)
            raise

    def _broadcast(self, sending: Sending) -> dict[str, torch.Tensor]:
        """Return tensors that one rank has, on all."""
        error: Exception | None = None
        self.is_broken = True  # until the others have what they wait for
        try:
            tensors = self._tensors_to_send(sending)
        except Exception as raised:  # noqa: BLE001 - the others wait for this one
            error, tensors = raised, self._empty(sending)
        broadcast_(
            tensors, self._world, root=sending.root, label="with_world: hand over"
        )
        self.is_broken = False
        if error is not None:
            raise error
        return dict(zip(sending.entries, tensors, strict=True))

    def _tensors_to_send(self, sending: Sending) -> list[torch.Tensor]:
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
            for some in _batches(due):
                yield Sending(file=rank_file(place), entries=some, root=root)
        yield None


def receive(
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
    source = attrs.evolve(unmerged_source(state, manifest, where), held=held)
    wanted = source.places(source.rank, source.names)
    if not is_compatible(state, source):
        for rank in manifest.firsts:
            wanted |= source.places(rank, to_merge(state, manifest, rank))
    _keep(held, arrivals.stage(), wanted)
    source = with_merged_slots(state, source)
    if source.weights is None:
        for _ in manifest.firsts:
            _keep(held, arrivals.stage(), wanted)
        return source
    means = source.mean(
        lambda rank: _completed_tensors(source, rank, held, arrivals.stage())
    )
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


def _completed_tensors(
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


def _batches(entries: Mapping[str, Entry]) -> Iterator[dict[str, Entry]]:
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

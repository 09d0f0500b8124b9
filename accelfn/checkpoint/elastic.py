# SPDX-License-Identifier: Apache-2.0
"""Read a checkpoint on any number of ranks: select files, reshard, and merge different values."""

import contextlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Self, TypeAlias, cast

import attrs
import torch

from accelfn.base import tree
from accelfn.base.codec import decode, tensors_in
from accelfn.base.tree import is_shard, local
from accelfn.checkpoint import files
from accelfn.checkpoint.files import Entry
from accelfn.checkpoint.manifest import (
    Manifest,
    rank_file,
    read_manifest,
    read_manifests,
)
from accelfn.checkpoint.save import decode_fields, encode_fields, fields_of
from accelfn.checkpoint.slices import Slice, assemble, dtensor_like, slice_of
from accelfn.collectives.packed import broadcast_
from accelfn.errors import CheckpointError
from accelfn.state.state import TrainState
from accelfn.world import World

ByName: TypeAlias = Mapping[str, torch.Tensor]
"""Tensors by name."""


@attrs.frozen(kw_only=True)
class Source:
    """How one rank reads the values of a checkpoint.

    Attributes:
        folder: the checkpoint's directory. If the tensors are in memory, a name for errors.
        manifest: the checkpoint's manifest.
        rank: the saved rank whose values this rank gets.
        device: the device of the tensors to return.
        verify: whether to compare digests.
        weights: the weight of each saved rank (or copy of the model) in the mean of values that
            differ between ranks. None: no mean, but the values of `rank`.
        sharded: the state's DTensors by name. Saved tensors are sharded like these.
        slots: merged slots, by the transform's name. A merged slot is the result of a
            transform's method `merge`, and replaces the slots of all saved ranks.
        on_read: called with the number of bytes that were read since the last call.
        held: the tensors of each file, if they are in memory. None: they are read from the
            directory.
        means: the means over ranks, if they were computed while the tensors arrived.
    """

    folder: Path | str
    manifest: Manifest
    rank: int = 0
    device: str = "cpu"
    verify: bool = True
    weights: tuple[float, ...] | None = None
    slots: Mapping[str, Any] = attrs.field(factory=dict)
    sharded: ByName = attrs.field(factory=dict)
    on_read: files.OnRead = files.ignore_progress
    held: Mapping[str, ByName] | None = None
    means: ByName | None = None

    @classmethod
    def at(cls, folder: Path) -> Self:
        """Create the source of a checkpoint of a single state."""
        return cls(folder=folder, manifest=read_manifest(folder))

    @classmethod
    def all_at(cls, folder: Path) -> dict[str, Self]:
        """Create a source for each state of a checkpoint, by name ("" for a single state)."""
        manifests = read_manifests(folder)
        return {n: cls(folder=folder / n, manifest=m) for n, m in manifests.items()}

    def fields(self) -> dict[str, Any]:
        """Return all saved fields, with their tensors."""
        trees = self._trees
        fields = decode_fields(trees, self.tensors(_names_in(trees)))
        return {**fields, "slots": {**fields["slots"], **self.slots}}

    def outline(self) -> dict[str, Any]:
        """Return all saved fields with placeholders for tensors, without reading a file.

        A placeholder has the shape, dtype and sharding of the tensor. It is on the meta device,
        or it is the state's DTensor.
        """
        trees = self._trees
        return decode_fields(trees, {n: self._outline(n) for n in _names_in(trees)})

    def _outline(self, name: str) -> torch.Tensor:
        spec = self.manifest.tensor(name, self.rank)
        meta = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        like = self.sharded.get(name, meta)
        is_same = (like.shape, like.dtype) == (meta.shape, meta.dtype)
        return like if is_same else meta

    @property
    def names(self) -> set[str]:
        """The names of the tensors in all fields, except slots that are merged (in `slots`)."""
        return _names_in(self._trees)

    @property
    def _trees(self) -> dict[str, Any]:
        merged_units = {f"slots.{name}" for name in self.slots}
        trees = self.manifest.trees_of(self.rank)
        return {unit: tree for unit, tree in trees.items() if unit not in merged_units}

    def tensors(self, names: AbstractSet[str]) -> dict[str, torch.Tensor]:
        """Return tensors by name; a tensor is a DTensor if the state's tensor is a DTensor."""
        moving: AbstractSet[str] = frozenset()
        means: ByName = {}
        if self.weights is not None:
            moving = names & self.manifest.with_mean
            means = self.means or self.mean(lambda rank: [self.of_rank(rank, moving)])
        tensors = self.of_rank(self.rank, names - moving)
        tensors |= {name: means[name] for name in moving}
        dtensors = {n: t for n, t in self.sharded.items() if n in tensors}
        return tensors | {n: dtensor_like(tensors[n], t) for n, t in dtensors.items()}

    def of_rank(self, rank: int, names: AbstractSet[str]) -> dict[str, torch.Tensor]:
        """Return tensors with the values that a saved rank had.

        If the state's tensor is a DTensor, return only this rank's slice. Each file is read
        once.
        """
        plans = {name: self._plan(rank, name) for name in names}
        tensors: dict[str, torch.Tensor] = {}
        parts: dict[str, list[tuple[Slice, torch.Tensor]]] = {n: [] for n in names}
        for file in sorted({file for plan in plans.values() for file in plan.parts}):
            in_file = {name for name, plan in plans.items() if file in plan.parts}
            for name, tensor in self._read_file(file, in_file).items():
                box = plans[name].parts[file]
                if box == plans[name].target:
                    is_shared = self.held is not None
                    tensors[name] = tensor.to(self._device_of(name), copy=is_shared)
                else:
                    parts[name].append((box, tensor))
        for name in names - tensors.keys():
            plan = plans[name]
            values = assemble(plan.target, plan.dtype, parts[name])
            tensors[name] = values.to(self._device_of(name))
        return tensors

    def places(self, rank: int, names: AbstractSet[str]) -> set[tuple[str, str]]:
        """Return the (file, tensor name) pairs that `of_rank` reads."""
        return {(f, name) for name in names for f in self._plan(rank, name).parts}

    def _device_of(self, name: str) -> str | torch.device:
        dtensor = self.sharded.get(name)
        return self.device if dtensor is None else local(dtensor).device

    def _read_file(self, file: str, names: AbstractSet[str]) -> ByName:
        """Return tensors of a file: from `held` if they are in memory, else read to the host."""
        if self.held is not None:
            return {name: self.held[file][name] for name in names}
        return files.read_tensors(
            Path(self.folder) / file,
            self.manifest.files[file],
            names,
            verify=self.verify,
            on_read=self.on_read,
        )

    def _plan(self, rank: int, name: str) -> "_Plan":
        spec, dtensor = self.manifest.tensor(name, rank), self.sharded.get(name)
        full_slice = Slice.whole(spec.shape)
        target = full_slice if dtensor is None else slice_of(dtensor) or full_slice
        if dtensor is not None and target.shape != spec.shape:
            msg = (
                f"{self.folder}: {name} was saved as {spec.shape}, but in this state its shape is"
                f" {target.shape}. Create the state with the saved model."
            )
            raise CheckpointError(msg)
        overlapping = {f: box for f, box in spec.parts.items() if target.within(box)}
        return _Plan(target, spec.dtype, overlapping)

    def mean(self, parts: Callable[[int], Iterable[ByName]]) -> dict[str, torch.Tensor]:
        """Return the weighted means of tensors over saved ranks (or copies of the model).

        Args:
            parts: a function of a saved rank that yields its tensors, some at a time.
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
        return {name: total.to(dtypes[name]) for name, total in sums.items()}


@attrs.frozen
class _Plan:
    """How to read a tensor: the slice to return, and its saved slices by file name."""

    target: Slice
    dtype: torch.dtype
    parts: Mapping[str, Slice]


def source_of(state: TrainState, source: Source) -> Source:
    """Return the source that reads a checkpoint for this rank.

    Args:
        state: the state to load into.
        source: the checkpoint.

    Raises:
        CheckpointError: the number of ranks changed, and values that differ between the saved
            ranks cannot be averaged.
    """
    return with_merged_slots(state, unmerged_source(state, source))


def unmerged_source(state: TrainState, source: Source) -> Source:
    """Return what this rank reads of a checkpoint, without merging slots. Reads no file.

    The checkpoint may have one slot for each rank that saved it.
    """
    world, manifest = state.world, source.manifest
    shards = _sharded_tensors(state, manifest)
    source = attrs.evolve(source, device=str(world.device), sharded=shards)
    is_per_rank = is_compatible(state, source) and manifest.differs
    return attrs.evolve(source, rank=world.rank if is_per_rank else 0)


def is_compatible(state: TrainState, source: Source) -> bool:
    """Return whether each rank can continue with the values of one saved rank."""
    manifest, world = source.manifest, state.world
    # ranks that share a copy of the model need a checkpoint whose ranks shared copies in the
    # same way
    fits = manifest.copies == state.definition.copy_of_each
    if not manifest.copies:
        fits = fits and not source.sharded.keys() & set(manifest.per_rank)
    fits = fits or manifest.differs in ((), ("buffers",))
    return manifest.world_size == world.size and fits


def with_merged_slots(state: TrainState, source: Source) -> Source:
    """Add merged slots and means to a source, unless each rank continues as one saved rank.

    A merged slot is one slot for all ranks, which a transform made from the saved ranks' slots.

    Raises:
        CheckpointError: the number of ranks changed, and values that differ between the saved
            ranks cannot be averaged.
    """
    if is_compatible(state, source):
        return source
    manifest, merging = source.manifest, _merging(state, source.manifest)
    if manifest.differs not in ((), ("buffers",)):
        return _merge_by_average(state, source)
    slots: dict[str, Any] = {}
    for transform in merging:
        slot = _slot(source, transform.name, 0)
        equal = [slot] * len(manifest.firsts)
        _, slots[transform.name] = _call_merge(state, transform, equal, source)
    return attrs.evolve(source, slots=slots)


def to_merge(state: TrainState, manifest: Manifest, rank: int) -> set[str]:
    """Return the names of a saved rank's tensors in the slots that transforms merge."""
    trees = manifest.trees_of(rank)
    slots = {f"slots.{transform.name}" for transform in _merging(state, manifest)}
    return _names_in({unit: trees[unit] for unit in slots & trees.keys()})


def _names_in(trees: Mapping[str, Any]) -> set[str]:
    return {name for tree in trees.values() for name in tensors_in(tree)}


def _sharded_tensors(state: TrainState, manifest: Manifest) -> ByName:
    """Return the DTensors that show how to shard saved tensors, by the saved name.

    If the state does not have a saved tensor yet, such as an optimizer's moment before the
    first update, the DTensor is the parameter that the tensor belongs to.
    """
    fields, to_come = fields_of(state), _params_by_saved_name(state, manifest)
    if not any(map(is_shard, tree.tree_leaves(fields))):
        return to_come
    tensors = encode_fields(fields)[1]
    # in the checkpoint, a numbered name such as <1> may belong to another tensor
    names = {name for name in tensors if not name.startswith("<")}
    return {n: t for n, t in to_come.items() if n not in names} | tensors.sharded


def _params_by_saved_name(state: TrainState, manifest: Manifest) -> ByName:
    """Return the parameter of each saved tensor that must be sharded like a parameter.

    Before its first update, a state has no optimizer state that would show the sharding.
    """
    layout = state.definition.layout
    if layout is None:
        return {}
    params: dict[str, torch.Tensor] = {}
    units = {u: t for u, t in manifest.trees.items() if u not in ("params", "buffers")}
    for tensor, param in _params_of(units, layout.cuts):
        if manifest.tensor(tensor, 0).shape == tuple(layout.shapes[param]):
            params[tensor] = state.params[param]
    return params


def _params_of(
    node: Any, params: Collection[str], within: str | None = None
) -> Iterator[tuple[str, str]]:
    """Yield (tensor name, parameter name) for each tensor below a parameter's key.

    Args:
        node: the encoded tree.
        params: the names of parameters, which are keys in the tree.
        within: the parameter that the node belongs to, if any.
    """
    if isinstance(node, list):
        for item in cast("list[Any]", node):
            yield from _params_of(item, params, within)
    elif isinstance(node, dict):
        for key, inside in cast("dict[str, Any]", node).items():
            if key == "tensor" and isinstance(inside, str) and within is not None:
                yield inside, within
            else:
                yield from _params_of(inside, params, key if key in params else within)


def _merging(state: TrainState, manifest: Manifest) -> list[Any]:
    """Return the transforms of the setup that merge the saved slots of several ranks."""
    names = manifest.slots & set(manifest.transforms)
    return [e for e in state.setup.owners["merge"] if e.name in names]


def _call_merge(
    state: TrainState, transform: Any, slots: list[Any], source: Source
) -> tuple[list[float], Any]:
    folder, name = source.folder, transform.name
    try:
        weights, slot = transform.merge(slots, state.world)
    except Exception as error:
        msg = f"{folder}: {name} could not merge the slots that the ranks saved: {error!r}."
        raise CheckpointError(msg) from error
    if len(weights) != len(slots):
        msg = (
            f"{folder}: {transform!r}.merge returned {len(weights)} weights for the"
            f" slots of {len(slots)} ranks; expected one weight for each slot."
        )
        raise CheckpointError(msg)
    return weights, slot


def _merge_by_average(state: TrainState, source: Source) -> Source:
    """Add the weights of the mean over ranks, and the merged slot, to a source.

    The weights are those that the transform's method `merge` returns with the merged slot.
    """
    manifest = source.manifest
    merging = _merging(state, manifest)
    with_mean = {"params", "buffers", "opt_state"}
    with_mean |= {f"slots.{transform.name}" for transform in state.setup}
    own_units = manifest.own_units - {f"slots.{e.name}" for e in merging}
    without = sorted((set(manifest.differs) - with_mean) | own_units)
    if without or len(merging) != 1:
        msg = (
            f"{source.folder} was saved on {manifest.world_size} ranks that had different"
            f" {', '.join(without or manifest.differs)}, and these cannot be averaged. Load it on"
            f" {manifest.world_size} ranks with its setup and axes, or save when they are equal."
        )
        raise CheckpointError(msg)
    (transform,) = merging
    slots = [_slot(source, transform.name, rank) for rank in manifest.firsts]
    weights, slot = _call_merge(state, transform, slots, source)
    return attrs.evolve(source, weights=tuple(weights), slots={transform.name: slot})


def _slot(source: Source, name: str, rank: int) -> Any:
    """Return a transform's slot as a saved rank had it."""
    tree = source.manifest.trees_of(rank)[f"slots.{name}"]
    of_rank = attrs.evolve(source, rank=rank)
    return decode(tree, of_rank.tensors(set(tensors_in(tree))))


# Move a state without a disk: ranks broadcast their tensors, and each rank keeps what it needs.
#
# The order of the broadcasts follows from the manifest, so all ranks know it. The first stage
# sends the tensors that are equal on all ranks, tensors that cannot be averaged, and tensors in
# slots that a transform merges. Each further stage sends the other tensors of one rank (or copy
# of the model). A rank that fails still joins the remaining broadcasts, because other ranks
# would wait for it. The rank reports its error in the next exchange of texts.


Arrival = tuple[str, ByName]
"""The name of the file that a save would have written, and some of its tensors."""
Held = dict[str, dict[str, torch.Tensor]]
"""The tensors that this rank keeps in host memory, by file and name."""

_AT_ONCE = 25_000_000
"""Bytes after which a broadcast is full: small tensors are sent together."""


@attrs.frozen(kw_only=True)
class Sending:
    """A broadcast of several tensors of one rank.

    Attributes:
        file: the name of the file that a save would write these tensors to.
        entries: the description of each tensor, by name.
        root: the rank that sends the tensors.
    """

    file: str
    entries: Mapping[str, Entry]
    root: int


class Arrivals:
    """The broadcasts that send a state's tensors to all ranks.

    If a rank fails outside of the collective itself, it still completes the broadcast, and can
    join the next broadcast. After a failed broadcast, the rank cannot join another one.
    """

    def __init__(
        self, sendings: Iterator[Sending | None], tensors: ByName, world: World
    ) -> None:
        """Initialize with the broadcasts of all stages, and this rank's tensors.

        Args:
            sendings: the broadcasts in order, with None after each stage.
            tensors: the tensors that this rank sends, by name.
            world: the ranks that join the broadcasts.
        """
        self._sendings, self._mine, self._world = sendings, tensors, world
        self.is_broken = False

    def stage(self) -> Iterator[Arrival]:
        """Run the broadcasts of one stage, and yield the tensors of each broadcast."""
        while (sending := next(self._sendings, None)) is not None:
            yield sending.file, self._broadcast(sending)

    @contextlib.contextmanager
    def to_the_end(self) -> Generator[None]:
        """Run the remaining broadcasts if the `with` block raises: other ranks wait in them."""
        try:
            yield
        except Exception:
            for sending in self._sendings:
                if sending is not None and not self.is_broken:
                    with contextlib.suppress(Exception):
                        self._broadcast(sending)
            raise

    def _broadcast(self, sending: Sending) -> dict[str, torch.Tensor]:
        """Run one broadcast, and return its tensors by name."""
        error: Exception | None = None
        world, entries = self._world, sending.entries

        def empty() -> list[torch.Tensor]:
            return [entry.empty().to(world.device) for entry in entries.values()]

        self.is_broken = True  # reset when the broadcast is complete
        try:
            if world.rank == sending.root:
                tensors = [self._mine[n].detach().to(world.device) for n in entries]
            else:
                tensors = empty()
        except Exception as raised:  # noqa: BLE001 - other ranks wait in the broadcast
            error, tensors = raised, empty()
        broadcast_(tensors, world, root=sending.root, label="with_world: hand over")
        self.is_broken = False
        if error is not None:
            raise error
        return dict(zip(entries, tensors, strict=True))


def sendings(
    manifest: Manifest, merging: AbstractSet[str], givers: Collection[int]
) -> Iterator[Sending | None]:
    """Yield all broadcasts in order, and None after each stage.

    Args:
        manifest: the manifest that a save would have written.
        merging: the names of the tensors in slots to merge.
        givers: the ranks that send, in the order of the files that a save would have written.
    """
    to_average = manifest.with_mean - merging
    copies = manifest.copies or range(manifest.world_size)
    for copy in (None, *sorted({*copies})):
        for place, root in enumerate(givers):
            entries = manifest.files[rank_file(place)].tensors
            due = {
                name: entry
                for name, entry in entries.items()
                if (copies[place] if name in to_average else None) == copy
            }
            for some in _batches(due):
                yield Sending(file=rank_file(place), entries=some, root=root)
        yield None


def receive(state: TrainState, manifest: Manifest, arrivals: Arrivals) -> Source:
    """Receive all tensors, and return the source of the state that this rank loads.

    Args:
        state: the state to load into, in the new world.
        manifest: the manifest of the tensors that are sent.
        arrivals: the broadcasts.

    Raises:
        CheckpointError: the number of ranks changed, and values that differ between the
            sending ranks cannot be averaged.
    """
    by_file: Held = {}
    where = f"the state of update {manifest.step}"
    source = Source(folder=where, manifest=manifest, held=by_file)
    source = unmerged_source(state, source)
    places = source.places(source.rank, source.names)
    if not is_compatible(state, source):
        for rank in manifest.firsts:
            places |= source.places(rank, to_merge(state, manifest, rank))
    _keep(by_file, arrivals.stage(), places)
    source = with_merged_slots(state, source)
    if source.weights is None:
        for _ in manifest.firsts:
            _keep(by_file, arrivals.stage(), places)
        return source
    means = source.mean(
        lambda rank: _completed_tensors(source, rank, by_file, arrivals.stage())
    )
    return attrs.evolve(source, means=means)


def _keep(
    by_file: Held, arrivals: Iterable[Arrival], places: AbstractSet[tuple[str, str]]
) -> None:
    for file, tensors in arrivals:
        share = {name: t.cpu() for name, t in tensors.items() if (file, name) in places}
        by_file.setdefault(file, {}).update(share)


def _completed_tensors(
    source: Source, rank: int, by_file: Held, arrivals: Iterator[Arrival]
) -> Iterator[ByName]:
    """Yield the tensors of a sending rank, each as soon as all of its slices have arrived.

    Afterwards the slices are dropped from `by_file`.

    Args:
        source: the source of the state that this rank loads.
        rank: the sending rank.
        by_file: the slices that have arrived, until the other slices of their tensor arrive.
        arrivals: the broadcasts of one stage.
    """
    names = source.names & source.manifest.with_mean
    files = {n: {f for f, _ in source.places(rank, {n})} for n in names}
    for file, tensors in arrivals:
        _keep(by_file, [(file, tensors)], source.places(rank, names & tensors.keys()))
        complete = {
            n
            for n in tensors
            if n in files and all(n in by_file.get(f, {}) for f in files[n])
        }
        yield source.of_rank(rank, complete)
        for name in complete:
            for part_file in files.pop(name):
                del by_file[part_file][name]
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

# SPDX-License-Identifier: Apache-2.0
"""`Definition`: the parts of a state that updates do not change and checkpoints do not save."""

import math
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import attrs
import torch
from torch.optim.lr_scheduler import LRScheduler

from accelfn.base.arguments import advise, call_mismatch, is_integer, qualname
from accelfn.data import Data, Plan
from accelfn.definition.transform import chain, check_needs, check_returned, facts_of
from accelfn.errors import ArgumentError, ModelError, WorldError
from accelfn.model.model import Skeleton
from accelfn.model.optimizer import is_torchs, parts_of, rebuilt
from accelfn.schedules.factors import Rates, Schedule
from accelfn.world import World
from accelfn.world import axes as arithmetic
from accelfn.world.world import fold_axes

if TYPE_CHECKING:
    from accelfn.definition.layout import Layout

# Objects that are derived from a definition, and can be created again at any time.


Function = Callable[..., Any]


@attrs.define(eq=False)
class Cache:
    """Objects that steps reuse, and flags of checks that run once per definition.

    Attributes:
        engine: connects states with PyTorch's modules and optimizers; created by `engine_of`.
        examined: loss functions for which `value_and_grad` already checked the first call.
        keys: for each purpose, the state's seed and the random key computed from it.
        is_compared: whether ranks already compared their values and plans.
        is_to_compare: whether ranks must compare values again, because values were replaced.
        saw_a_batch: whether the first batch was checked.
        has_shown: whether the user read a state's tensors since the last step.
        has_same_data: whether ranks that train on all samples already compared their data.
        compared_sums: whether ranks already compared the result of a user's `reduce`.
        slot_changes: how often updates replaced a transform's slot, by name.
        loaded: the leases (see `Lease`) of the last loaded state and of the argument of load.
        looks_at: the number of the update at which to check again whether the schedule ended.
        planned: the hyperparameters set so far, while a transform's `hyper` runs.
    """

    engine: Any = None
    examined: set[ref[Function]] = attrs.field(factory=set[ref[Function]])
    keys: dict[str, tuple[int, int]] = attrs.field(factory=dict[str, tuple[int, int]])
    is_compared: bool = False
    is_to_compare: bool = False
    saw_a_batch: bool = False
    has_shown: bool = False
    has_same_data: bool = False
    compared_sums: bool = False
    slot_changes: dict[str, int] = attrs.field(factory=dict[str, int])
    loaded: tuple[ref[Any], ref[Any]] | None = None
    looks_at: float = 0.0
    planned: dict[tuple[int, str], Any] | None = None

    def add_examined(self, function: Function) -> None:
        """Add a function to `examined`; it is removed when the function is freed."""
        # not a WeakKeyDictionary: the garbage collector may free a function at any time, and
        # CPython loses a Ctrl-C that arrives in a callback written in Python. `set.discard` is
        # written in C, where no Ctrl-C arrives
        self.examined.add(ref(function, self.examined.discard))

    def clear(self) -> None:
        """Reset all fields to their defaults."""
        self.examined.clear()  # callbacks of its weak references would keep the set alive
        self.__init__()


_BESIDE = {"dp_replicate": "dp_shard", "dp_shard": "dp_replicate"}
"""From the axis of the ranks within a copy of the model, to the axis along which copies are."""


@attrs.frozen(kw_only=True, eq=False)
class Definition:
    """The parts of a state that do not change and are not saved: model, optimizer, setup, ...

    `cache` has derived objects that can be created again, and exists as long as the states with
    this definition. `rates` is the schedule for the optimizer's parameter groups.
    """

    skeleton: Skeleton
    optimizer: torch.optim.Optimizer
    schedule: Schedule | None
    rates: Rates | None
    data: Data | None
    setup: chain
    world: World
    name: str
    cache: Cache = attrs.field(factory=Cache, init=False, repr=False)

    @cached_property
    def layout(self) -> "Layout | None":
        """Return how the model is sharded; None if each rank has the full model."""
        owners = self.setup.owners["layout"]
        if not owners:
            return None
        # imported here, because torch's DTensor takes as long to import as accelfn
        from accelfn.definition.layout import Layout  # noqa: PLC0415

        metas = dict(self.skeleton.module.named_parameters())
        return Layout.of(owners, metas, self.world)

    @cached_property
    def has_torchs_optimizer(self) -> bool:
        """Return whether the optimizer, or each part of a combined optimizer, is from torch."""
        return all(map(is_torchs, parts_of(self.optimizer)))

    def optimizer_over(
        self, params: Mapping[str, torch.Tensor]
    ) -> torch.optim.Optimizer:
        """Return a new optimizer over these parameters, with the same settings but no state."""
        metas = self.skeleton.module.named_parameters()
        return rebuilt(self.optimizer, {id(meta): params[n] for n, meta in metas})

    @property
    def copy(self) -> World:
        """Return the ranks that train the same copy of the model, and sum their gradients.

        The result is all ranks that share a loss. If copies of the model train independently,
        the result is the ranks of this rank's copy.
        """
        if self.within is None:
            return self.world.loss
        is_split = self.layout is not None
        return self.splits if is_split else self.world.along(self.within)

    @property
    def splits(self) -> World:
        """Return the ranks of `copy`, as a world with only the axes that may shard a model."""
        world = fold_axes(self.world)
        return world.along("dp_shard") if self.trains_apart else world.loss

    @property
    def copies(self) -> World:
        """Return the ranks that hold this rank's shard, in all independently trained copies."""
        if self.within is None:
            return self.world.loss
        return self.world.along(_BESIDE[self.within])

    @property
    def copy_of_each(self) -> tuple[int, ...]:
        """Return, for each rank, the number of its independently trained copy of the model.

        The result is () unless such copies have several ranks.
        """
        if self.within is None or self.copy.size == 1:
            return ()
        axes, axis = self.world.axes, _BESIDE[self.within]
        ranks = range(math.prod(axes.values()))
        return tuple(arithmetic.place(axes, rank).get(axis, 0) for rank in ranks)

    @property
    def trains_apart(self) -> bool:
        """Return whether copies of the model train independently, and can have several ranks."""
        return self.within is not None

    @property
    def within(self) -> str | None:
        """Return the axis of the ranks within one independently trained copy, or None."""
        facts = self.setup.facts
        if "stays" not in facts:
            return None
        if "within" in facts:
            return facts["within"][0]
        return "dp_shard" if self.layout is not None else None

    @property
    def plan(self) -> Plan:
        """Return the plan that assigns samples to ranks.

        The methods `data` of the transforms change the plan, in order from left to right.
        """
        batch = self.world.batch
        plan = Plan(world_rank=batch.rank, world_size=batch.size)
        for owner in self.setup.owners["data"]:
            plan = owner.data(plan)
            check_returned(owner, "data", plan, Plan)
        return plan


# Checks of a definition's world, setup, schedule and data.


_NEED_VALUES = {
    "compiles": "needs parameters with values, but the world is on the meta device. Use a smaller"
    ' model and device="cpu", or remove the transform.',
    "offloads": "keeps shards in host memory, but the world is on the meta device. Remove"
    " cpu_offload there: without it the ranks send the same.",
}
"""Facts of transforms that do not work on the meta device, with the end of the error message."""
_SEND_FEATURES = {"splits_layers", "splits_sequences"}
"""Facts of transforms that send activations between ranks."""


def check_setup(setup: chain, world: World) -> None:
    """Raise unless a setup fits the world.

    Raises:
        CompositionError: a transform needs another transform that is missing.
        WorldError: ranks along an axis would all do the same work.
        ModelError: the world's device is "meta", and a transform does not work on it.
    """
    fields = {field for field, owners in setup.owners.items() if owners}
    check_needs(setup, fields | setup.facts.keys())
    check_axes(setup, world)
    check_device(setup, world)


def check_axes(setup: chain, world: World) -> None:
    """Raise if ranks along an axis would do the same work, or a transform's axis is missing.

    Raises:
        WorldError: no transform splits the work along an axis, or the world lacks the axis
            that a transform names.
    """
    for owner in setup:
        axis = facts_of(owner).get("within")
        if axis is not None and world.loss.size > 1 and axis not in world.axes:
            msg = (
                f"{owner!r} needs a world with the axis {axis!r}, but the axes of this world"
                f" are {dict(world.axes) or 'none'}. Create the world with this axis, for"
                ' example World.from_env(axes={"dp_replicate": 2, "dp_shard": -1}).'
            )
            raise WorldError(msg)
    needs = {
        "cp": ("splits_sequences", "add af.context_parallel(seq_dim=...)"),
        "tp": ("splits_layers", "add af.tensor_parallel(plan)"),
    }
    for axis, (fact, advice) in needs.items():
        if world.axes.get(axis, 1) > 1 and fact not in setup.facts:
            msg = (
                f"The world has the axes {dict(world.axes)}, but no transform splits the work"
                f" along {axis!r}: its {world.axes[axis]} ranks would all do the same work."
                f" Remove the axis, or {advice} to the setup."
            )
            raise WorldError(msg)


def check_device(setup: chain, world: World) -> None:
    """Raise if a transform does not work on the meta device, and the world is on this device.

    Raises:
        ModelError: a transform compiles the model or offloads parameters, or ranks would send
            activations with another dtype.
    """
    if world.device.type != "meta":
        return
    pairs = [(transform, facts_of(transform)) for transform in setup]
    for owner, facts in pairs:
        for fact in facts.keys() & _NEED_VALUES.keys():
            msg = f"{owner!r} {_NEED_VALUES[fact]}"
            raise ModelError(msg)
    sends = [owner for owner, facts in pairs if facts.keys() & _SEND_FEATURES]
    for owner, facts in pairs:
        if "computes_in" in facts and sends:
            msg = (
                f"On the meta device {owner!r} does not compute in {facts['computes_in']}, so"
                f" {sends[0]!r} would send another dtype. Remove {owner!r} and call"
                ' model.to(dtype), or use a smaller model and device="cpu".'
            )
            raise ModelError(msg)


def check_seed(call: str, seed: object) -> None:
    """Raise unless a seed is an integer.

    Raises:
        ArgumentError: the seed is not an integer.
    """
    if not is_integer(seed):
        msg = f"{call}(seed={seed!r}): expected an integer."
        raise ArgumentError(msg)


def check_schedule(schedule: object) -> None:
    """Raise unless a schedule is a function of the update number, or None.

    Raises:
        ArgumentError: the schedule is not such a function.
    """
    fn: Any = schedule.func if isinstance(schedule, partial) else schedule
    kind = fn if isinstance(fn, type) else type(fn)
    if issubclass(kind, LRScheduler):
        name = kind.__name__
        msg = (
            f"TrainState.create(schedule={name}): expected a function of the update number."
            " Write af.schedules.from_torch(factory), with factory ="
            f" functools.partial(torch.optim.lr_scheduler.{name}, ...)."
        )
        raise ArgumentError(msg)
    if schedule is not None and not callable(schedule):
        msg = (
            f"TrainState.create(schedule={schedule!r}): expected a function of the update"
            " number, such as those of af.schedules."
        )
        raise ArgumentError(msg)
    error = None if schedule is None else call_mismatch(schedule, 0)
    if error is not None:
        msg = (
            f"TrainState.create(schedule={qualname(schedule)}): accelfn calls schedule(update),"
            f" but this call fails: {error}. Set other arguments with functools.partial."
        )
        raise ArgumentError(msg)


def as_data(data: Any) -> Data | None:
    """Return the argument `data=` as `Data` or None; convert a DataLoader.

    Raises:
        ArgumentError: the argument has another type.
        DataError: an option of the DataLoader has no equivalent in `Data`.
    """
    if data is None or isinstance(data, Data):
        return data
    if isinstance(data, torch.utils.data.DataLoader):
        return Data.from_loader(data)
    msg = (
        f"TrainState.create(data={type(data).__name__}): expected af.Data(dataset,"
        " global_batch_size=...), a torch DataLoader or None."
    )
    raise ArgumentError(msg)


def warn_of_batch_size(value: Any, definition: Definition) -> None:
    """Warn if a DataLoader's batch size may be intended for one rank or one micro-batch."""
    if not isinstance(value, torch.utils.data.DataLoader):
        return
    plan, size = definition.plan, value.batch_size
    parts = plan.num_shares * plan.num_micro_batches
    if size is not None and parts > 1 and definition.world.is_main:
        advise(
            f"TrainState.create(data=DataLoader): accelfn uses the loader's batch size, {size},"
            f" as the number of samples per update, for {plan.num_shares} ranks and"
            f" {plan.num_micro_batches} micro-batches together. If that is intended, write"
            f" data=af.Data.from_loader(loader). If {size} is the size of one micro-batch of"
            " one rank, as with Accelerate, write data=af.Data.from_loader(loader,"
            f" num_ranks=world.size, num_micro_batches={plan.num_micro_batches})."
        )

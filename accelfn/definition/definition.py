# SPDX-License-Identifier: Apache-2.0
"""The definition of a training: all parts of a state that an update does not change."""

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

# Objects derived from a definition; they can be dropped and created again.


Function = Callable[..., Any]


@attrs.define(eq=False)
class Cache:
    """Objects that steps reuse, and flags of checks that run once per definition.

    Attributes:
        engine: binds the states to PyTorch; created by `engine_of`.
        examined: the functions of `value_and_grad` whose first call was examined.
        keys: random keys that transforms share, by purpose, each with its seed.
        is_compared: whether ranks were compared for equal values and equal plans.
        is_to_compare: whether to compare the ranks again, because values were replaced.
        saw_a_batch: whether the first batch was checked.
        has_shown: whether the user read a state's tensors since the last step.
        has_same_data: whether ranks that train on all samples were compared for equal data.
        compared_sums: whether the result of a user's `reduce` was compared once.
        slot_changes: how often an update replaced a transform's slot, by name.
        loaded: the leases of the last loaded state and of the state it was loaded into.
        looks_at: the update from which a schedule is checked for its end.
        planned: hyperparameters set so far, while a transform's `hyper` runs.
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
        """Note a function, as long as it lives."""
        # Not a WeakKeyDictionary. The garbage collector may free a function at any time, and
        # CPython swallows a Ctrl-C that arrives in a callback written in Python. A callback
        # written in C receives no Ctrl-C.
        self.examined.add(ref(function, self.examined.discard))

    def clear(self) -> None:
        """Reset to an empty cache."""
        self.examined.clear()  # the callbacks of its items keep it alive
        self.__init__()


_BESIDE: dict[str, str] = dict(
    zip(arithmetic.BATCH, reversed(arithmetic.BATCH), strict=True)
)
"""The axis of the copies, by the axis of the ranks within a copy."""


@attrs.frozen(kw_only=True, eq=False)
class Definition:
    """The parts of a training that do not change and are not saved.

    `cache` holds derived objects that can be created again; it lives as long as the states
    that share this definition. `rates` is the schedule, bound to the optimizer's groups.
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
        """Return how the model is sharded; None if each rank holds all of it."""
        owners = self.setup.owners["layout"]
        if not owners:
            return None
        # torch's DTensors cost as much to import as all of accelfn
        from accelfn.definition.layout import Layout  # noqa: PLC0415

        metas = dict(self.skeleton.module.named_parameters())
        return Layout.of(owners, metas, self.world)

    @cached_property
    def has_torchs_optimizer(self) -> bool:
        """Return whether all parts of the optimizer are torch's."""
        return all(map(is_torchs, parts_of(self.optimizer)))

    def optimizer_over(
        self, params: Mapping[str, torch.Tensor]
    ) -> torch.optim.Optimizer:
        """Return the optimizer over these parameters, without its state."""
        metas = self.skeleton.module.named_parameters()
        return rebuilt(self.optimizer, {id(meta): params[n] for n, meta in metas})

    @property
    def copy(self) -> World:
        """Return the ranks that train one copy of the model and sum gradients.

        They share one loss. If copies of several ranks train independently, these are the
        ranks of this rank's copy.
        """
        if self.within is None:
            return self.world.loss
        is_split = self.layout is not None
        return self.splits if is_split else self.world.along(self.within)

    @property
    def splits(self) -> World:
        """Return the ranks of `copy`, along the axes that shard the model."""
        world = fold_axes(self.world)
        return world.along("dp_shard") if self.trains_apart else world.loss

    @property
    def copies(self) -> World:
        """Return the ranks with the same shard in the independently trained copies."""
        if self.within is None:
            return self.world.loss
        return self.world.along(_BESIDE[self.within])

    @property
    def copy_of_each(self) -> tuple[int, ...]:
        """Return each rank's copy; () unless copies of several ranks train independently."""
        if self.within is None or self.copy.size == 1:
            return ()
        axes, axis = self.world.axes, _BESIDE[self.within]
        ranks = range(math.prod(axes.values()))
        return tuple(arithmetic.place(axes, rank).get(axis, 0) for rank in ranks)

    @property
    def trains_apart(self) -> bool:
        """Return whether copies of several ranks train independently."""
        return self.within is not None

    @property
    def within(self) -> str | None:
        """Return the axis within one independently trained copy of the model, or None."""
        facts = self.setup.facts
        if "stays" not in facts:
            return None
        split = "dp_shard" if self.layout is not None else None
        return facts["within"][0] if "within" in facts else split

    @property
    def plan(self) -> Plan:
        """Return the plan of samples per rank, from the setup's transforms, left to right."""
        batch = self.world.batch
        plan = Plan(world_rank=batch.rank, world_size=batch.size)
        for owner in self.setup.owners["data"]:
            plan = owner.data(plan)
            is_plan = isinstance(plan, Plan)
            check_returned(owner, "data", ok=is_plan, value=plan, kind="a Plan")
        return plan


# Checks of the world, setup, schedule and data of a definition.


_NEED_VALUES = {
    "compiles": "needs parameters with values, and the world is on the meta device. Run a smaller"
    ' model with values, device="cpu", or leave the transform out.',
    "offloads": "keeps parts in the host's memory, and the world is on the meta device. Leave"
    " cpu_offload out there: ranks send the same without it.",
}
"""Facts that need parameter values, with the error text for the meta device."""
_SEND_FEATURES = {"splits_layers", "splits_sequences"}
"""Facts of setups that send activations between ranks."""


def check_setup(setup: chain, world: World) -> None:
    """Raise unless a setup fits the world.

    Raises:
        CompositionError: a transform needs another transform that is missing.
        WorldError: ranks along an axis would all do the same work.
        ModelError: a transform needs parameter values, and the world is on the meta device.
    """
    fields = {field for field, owners in setup.owners.items() if owners}
    check_needs(setup, fields | setup.facts.keys())
    check_axes(setup, world)
    check_device(setup, world)


def check_axes(setup: chain, world: World) -> None:
    """Raise if ranks along an axis would repeat the same work.

    Raises:
        WorldError: no transform divides the work along an axis, or the setup names an axis
            that the world does not have.
    """
    for axis in setup.facts.get("within", ()):
        if world.loss.size > 1 and axis not in world.axes:
            msg = (
                f"The setup reduces gradients within {axis!r}, but the world has no such axis:"
                f" {dict(world.axes) or 'it has none'}. Write"
                ' World.from_env(axes={"dp_replicate": 2, "dp_shard": -1}).'
            )
            raise WorldError(msg)
    needs = {
        "cp": ("splits_sequences", "add af.context_parallel(seq_dim=...)"),
        "tp": ("splits_layers", "add af.tensor_parallel(plan)"),
    }
    for axis, (fact, advice) in needs.items():
        if world.axes.get(axis, 1) > 1 and fact not in setup.facts:
            msg = (
                f"The world has {world.axes[axis]} ranks along {axis!r}, {dict(world.axes)},"
                f" but all would do the same. Leave the axis out, or {advice}."
            )
            raise WorldError(msg)


def check_device(setup: chain, world: World) -> None:
    """Raise if a transform cannot be simulated on the meta device.

    Raises:
        ModelError: a transform compiles the model or offloads parameters; or ranks send
            activations computed in another dtype.
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
                f"{owner!r} computes in {facts['computes_in']}, but not on the meta device, and"
                f" {sends[0]!r} would send another dtype. Leave it out and call model.to(dtype),"
                ' or run a smaller model with values, device="cpu".'
            )
            raise ModelError(msg)


def check_seed(call: str, seed: object) -> None:
    """Raise unless a seed is an integer.

    Raises:
        ArgumentError: it is not.
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
            f"TrainState.create(schedule={qualname(schedule)}): it is called as"
            f" schedule(update): {error}. Pass other arguments by functools.partial."
        )
        raise ArgumentError(msg)


def as_data(data: Any) -> Data | None:
    """Return a data argument as `Data` or None; convert a DataLoader.

    Raises:
        ArgumentError: the argument has another type.
        DataError: an option of the DataLoader has no counterpart.
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
    """Warn of a DataLoader whose batch size may be meant for one rank or micro-batch."""
    plan, size = definition.plan, getattr(value, "batch_size", None)
    parts = plan.num_shares * plan.num_micro_batches
    if not isinstance(value, torch.utils.data.DataLoader) or size is None or parts == 1:
        return
    if definition.world.is_main:
        advise(
            f"TrainState.create(data=DataLoader): its batch size, {size}, is the number of"
            f" samples of an update, over {plan.num_shares} ranks and"
            f" {plan.num_micro_batches} micro-batches together. If that is meant, write"
            f" data=af.Data.from_loader(loader). If {size} is what one rank takes in one"
            " micro-batch, as with Accelerate, write data=af.Data.from_loader(loader,"
            f" num_ranks=world.size, num_micro_batches={plan.num_micro_batches})."
        )

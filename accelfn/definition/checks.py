# SPDX-License-Identifier: Apache-2.0
"""Whether what users give makes a definition: a world, a setup, a schedule, data."""

from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from accelfn.base.advice import advise
from accelfn.base.arguments import why_not
from accelfn.base.signatures import qualname
from accelfn.data import Data
from accelfn.definition.definition import Definition
from accelfn.definition.facts import check_needs, facts_of
from accelfn.definition.transform import chain
from accelfn.errors import ArgumentError, ModelError, WorldError
from accelfn.world import World

_NEED_VALUES = {
    "compiles": "needs parameters with values, and the world is on the meta device, where there"
    ' are none. Let a model of fewer or narrower layers run with values, device="cpu", or leave'
    " the transform out.",
    "offloads": "keeps parts in the host's memory, and the world is on the meta device, where"
    " nothing lies in any. Leave cpu_offload out there: what ranks send is the same without it.",
}
"""What transforms tell that nothing can do without values, and what to do."""
_SEND_FEATURES = {"splits_layers", "splits_sequences"}
"""What transforms tell under which ranks send what layers compute."""


def checked_world(world: Any) -> World:
    """Return the world of a definition; None is that of one process.

    Raises:
        ArgumentError: it is no world.
    """
    world = World.single() if world is None else world
    if isinstance(world, World):
        return world
    msg = f"TrainState.create(world={world!r}): expected an af.World."
    raise ArgumentError(msg)


def check_setup(setup: chain, world: World) -> None:
    """Raise unless a setup has what it needs, and every rank of the world its work.

    Raises:
        CompositionError: a transform needs another that is not there.
        WorldError: ranks along an axis would all do the same.
        ModelError: a transform needs values, and the world's device keeps none.
    """
    there = {field for field, owners in setup.owners.items() if owners}
    check_needs(setup, there | setup.facts.keys())
    check_axes(setup, world)
    check_device(setup, world)


def check_axes(setup: chain, world: World) -> None:
    """Raise where ranks along an axis would do one another's work, or have none.

    Raises:
        WorldError: nothing in the setup gives them parts of it; or it names an axis that is
            not there.
    """
    for axis in setup.facts.get("within", ()):
        if world.loss.size > 1 and axis not in world.axes:
            msg = (
                f"The setup reduces gradients within {axis!r}, and the world's"
                f" {world.loss.size} ranks have no such axis:"
                f" {dict(world.axes) or 'they have none'}. Name both, as"
                ' World.from_env(axes={"dp_replicate": 2, "dp_shard": -1}).'
            )
            raise WorldError(msg)
    said = {
        "cp": ("splits_sequences", "add af.context_parallel(seq_dim=...)"),
        "tp": ("splits_layers", "add af.tensor_parallel(plan)"),
    }
    for axis, (fact, way) in said.items():
        if world.axes.get(axis, 1) > 1 and fact not in setup.facts:
            msg = (
                f"The world has {world.axes[axis]} ranks along {axis!r}, {dict(world.axes)},"
                " and nothing in the setup gives each its part, so all would do the same."
                f" Leave the axis out, or {way}."
            )
            raise WorldError(msg)


def check_device(setup: chain, world: World) -> None:
    """Raise where what a transform does cannot be told without values, on the meta device.

    Raises:
        ModelError: it compiles the model, or keeps parts on the host; or ranks send what they
            compute in another dtype.
    """
    if world.device.type != "meta":
        return
    told = [(each, facts_of(each)) for each in setup]
    for each, facts in told:
        for fact in facts.keys() & _NEED_VALUES.keys():
            msg = f"{each!r} {_NEED_VALUES[fact]}"
            raise ModelError(msg)
    sends = [each for each, facts in told if facts.keys() & _SEND_FEATURES]
    for each, facts in told:
        if "computes_in" in facts and sends:
            msg = (
                f"{each!r} lets torch compute in {facts['computes_in']}, which it does not do on"
                f" the meta device, and {sends[0]!r} sends what is computed: it would be foreseen"
                f" in another dtype. Leave it out there, and make the model in that dtype,"
                " model.to(dtype); or let fewer or narrower layers run with values,"
                ' device="cpu".'
            )
            raise ModelError(msg)


def check_schedule(schedule: object) -> None:
    """Raise unless it is a schedule, or None.

    Raises:
        ArgumentError: it is no function.
    """
    made: Any = schedule.func if isinstance(schedule, partial) else schedule
    kind = made if isinstance(made, type) else type(made)
    if issubclass(kind, LRScheduler):
        name = kind.__name__
        msg = (
            f"TrainState.create(schedule={name}): expected a function of the update number."
            " A scheduler of torch becomes one by af.schedules.from_torch(factory), with"
            f" factory = functools.partial(torch.optim.lr_scheduler.{name}, ...)."
        )
        raise ArgumentError(msg)
    if schedule is not None and not callable(schedule):
        msg = (
            f"TrainState.create(schedule={schedule!r}): expected a function of the"
            " update number; see af.schedules, whose from_torch takes torch's."
        )
        raise ArgumentError(msg)
    error = None if schedule is None else why_not(schedule, 0)
    if error is not None:
        msg = (
            f"TrainState.create(schedule={qualname(schedule)}): it is called as"
            f" schedule(update), and gives the factor of the rate: {error}. What it needs"
            " besides, give it by functools.partial."
        )
        raise ArgumentError(msg)


def as_data(data: Any) -> Data | None:
    """Return the data of a definition, or None; of a DataLoader, what it stands for.

    Raises:
        ArgumentError: it is neither.
        DataError: what the DataLoader does has no counterpart.
    """
    if data is None or isinstance(data, Data):
        return data
    if isinstance(data, torch.utils.data.DataLoader):
        return Data.from_loader(data)
    msg = (
        f"TrainState.create(data={type(data).__name__}): expected af.Data(dataset,"
        " batch_size=...), a torch DataLoader or None."
    )
    raise ArgumentError(msg)


def say_batch_size(given: Any, definition: Definition) -> None:
    """Warn of a DataLoader whose batch size may be meant for one rank or micro-batch."""
    plan, size = definition.plan, getattr(given, "batch_size", None)
    parts = plan.num_shares * plan.num_micro_batches
    if not isinstance(given, torch.utils.data.DataLoader) or size is None or parts == 1:
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

# SPDX-License-Identifier: Apache-2.0
"""What a state begins with: a model that each rank draws whole, or no more than its part."""

from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import torch
from torch import nn

from accelfn.base import tree
from accelfn.base.arguments import check_word, is_integer
from accelfn.base.draws import own_modes
from accelfn.base.tree import copy_shared_memory, local
from accelfn.collectives import check_replicas
from accelfn.collectives.replicas import checksum
from accelfn.definition.definition import (
    Definition,
    as_data,
    as_world,
    check_device,
    check_schedule,
)
from accelfn.definition.transform import chain, check_copied
from accelfn.errors import ArgumentError
from accelfn.model.drawn import build_on_meta, draw_params
from accelfn.model.model import (
    ModelSource,
    Skeleton,
    materialize,
    parameter_like,
    skeleton_of,
)
from accelfn.model.optimizer import OptimizerSource, place_opt_state, prototype_of
from accelfn.schedules.factors import Schedule, bound
from accelfn.state.update import shared_draws
from accelfn.world import World

if TYPE_CHECKING:
    from accelfn.state.state import TrainState

Tensors: TypeAlias = dict[str, torch.Tensor]


@attrs.frozen(kw_only=True, eq=False)
class Beginning:
    """What there is before a state is.

    Attributes:
        module: the model that is given away.
        skeleton: its structure.
        prototype: the optimizer's.
        params: by name.
        buffers: by name.
        opt_state: what the optimizer holds before its first step.
        setup: the transforms that say how this lies over the ranks.
    """

    module: nn.Module
    skeleton: Skeleton
    prototype: torch.optim.Optimizer
    params: Tensors
    buffers: Tensors
    opt_state: dict[str, dict[str, Any]]
    setup: chain


def begin(
    model: ModelSource,
    optimizer: OptimizerSource,
    *,
    schedule: Schedule | None,
    data: Any,
    setup: chain,
    world: World | None,
    seed: int,
    name: str,
    init: str,
) -> tuple[Beginning, Definition]:
    """Return what there is before a state is, and what it will be a state of.

    The arguments are those of `TrainState.create`.

    Raises:
        ArgumentError: `seed`, `name`, `schedule`, `world`, `data` or `init` is none.
        ModelError, OptimizerError: as `TrainState.create`.
    """
    if not is_integer(seed):
        msg = f"TrainState.create(seed={seed!r}): expected an integer."
        raise ArgumentError(msg)
    check_word("af.TrainState.create", "name", name, "which tells draws apart")
    if init not in ("whole", "shard"):
        msg = f'TrainState.create(init={init!r}): expected "whole" or "shard".'
        raise ArgumentError(msg)
    check_schedule(schedule)
    world = as_world(world)
    check_device(setup, world)
    device = world.device
    if device.type != "meta" and world.size > 1 and setup.owners["layout"]:
        device = torch.device("cpu")  # of what is split, a device holds parts alone
    with own_modes(device):
        if init == "shard" and device.type != "meta":
            begun = _create_in_parts(
                model, optimizer, setup=setup, world=world, seed=seed, name=name
            )
        else:
            begun = _create_whole(model, optimizer, device=device, seed=seed, name=name)
        rates = bound(schedule, begun.prototype)
    definition = Definition(
        skeleton=begun.skeleton,
        optimizer=begun.prototype,
        schedule=schedule,
        rates=rates,
        data=as_data(data),
        setup=begun.setup,
        world=world,
        name=name,
    )
    return begun, definition


def begin_slots(state: "TrainState", slots: dict[str, Any]) -> None:
    """Add the slots of transforms that have none yet, as they begin in a state."""
    with own_modes(state.world.device):
        for owner in state.setup.owners["init"]:
            if owner.name not in slots:
                slot = begin_slot(owner, state)
                if slot is not None:
                    slots[owner.name] = slot


def begin_slot(owner: Any, state: "TrainState") -> Any:
    """Return the slot of a transform as it begins in a state, if it has one.

    Raises:
        StateError: it has tensors of the state itself.
    """
    with shared_draws(state, "init", f"init {owner.name}"):
        slot = owner.init(state)
    check_copied(owner, slot, state)
    return slot


def _create_whole(
    model: ModelSource,
    optimizer: OptimizerSource,
    *,
    device: torch.device,
    seed: int,
    name: str,
) -> Beginning:
    """Return what is drawn whole, as it lies on one rank."""
    module = materialize(model, seed=seed, name=name, device=device)
    skeleton = skeleton_of(module)
    prototype, opt_state = prototype_of(optimizer, module, skeleton)
    params = dict(module.named_parameters())
    return Beginning(
        module=module,
        skeleton=skeleton,
        prototype=prototype,
        params=copy_shared_memory(params),
        buffers=_copies(module),
        opt_state=place_opt_state(opt_state, params, prototype, skeleton.module),
        setup=chain(),
    )


def _create_in_parts(
    model: ModelSource,
    optimizer: OptimizerSource,
    *,
    setup: chain,
    world: World,
    seed: int,
    name: str,
) -> Beginning:
    """Return what is drawn module by module, each cut as soon as it is there.

    Where the setup cuts nothing, parameters are whole, of the same values.
    """
    begun = build_on_meta(model, seed=seed, name=name)
    module, skeleton = begun.module, skeleton_of(begun.module)
    owners, layout = setup.owners["layout"], None
    if owners:
        # torch's DTensors cost as much to import as all of accelfn
        from accelfn.definition.layout import Layout  # noqa: PLC0415

        shapes = dict(skeleton.module.named_parameters())
        layout = Layout.of(owners, shapes, world)
    sums: Tensors = {}

    def keep(name: str, values: torch.Tensor) -> torch.Tensor:
        if layout is not None:
            sums[name] = checksum(values)
            values = layout.cut(name, values)
        return values if tree.is_shard(values) else values.to(world.device)

    params = draw_params(begun, keep, seed=seed, name=name)
    if layout is not None:  # what is cut must have been the same on all ranks
        check_replicas(params, world, label="compare replicas", values=True, sums=sums)
    metas = module.named_parameters()
    begun.put({n: parameter_like(meta, params[n]) for n, meta in metas})
    prototype, opt_state = prototype_of(optimizer, module, skeleton)

    def laid(name: str, leaf: Any) -> Any:
        """Return what an optimizer made like a part as parts are, with their room."""
        if layout is None or not tree.is_shard(leaf):
            return leaf
        room = layout.room(name, leaf.shape)
        part = tree.pad_part(tree.local(leaf).detach(), room)
        return tree.with_local(params[name], part)

    opt_state = {
        n: tree.tree_map(partial(laid, n), each) for n, each in opt_state.items()
    }
    return Beginning(
        module=module,
        skeleton=skeleton,
        prototype=prototype,
        params=params,
        buffers={n: b.to(world.device) for n, b in _copies(module).items()},
        opt_state=opt_state,
        setup=chain(*owners),
    )


def _copies(module: nn.Module) -> Tensors:
    """Return a module's buffers as a state's own: one may be a constant of its whole class."""
    return {name: each.detach().clone() for name, each in module.named_buffers()}


# Slots of a state that gets other parameters: an average, or an anchor, may begin with
# them.


def reset_slots(
    before: "TrainState", after: "TrainState", *, kept: Collection[str] = ()
) -> tuple[dict[str, Any], list[Any]]:
    """Return the slots of a state that has other parameters than the one before.

    Those that are still as they begin, begin with what the parameters are now.

    Args:
        before: its slots are the ones that there are.
        after: has other parameters.
        kept: names of slots that stay as they are.

    Returns: the slots by name, and the transforms whose slots would begin otherwise and
        go on, for they have come further.

    Cost: two beginnings of each slot.
    """
    slots, going_on = dict(after.slots), list[Any]()
    with own_modes(before.world.device):
        for owner in before.setup.owners["init"]:
            if owner.name in kept:
                continue
            old, new = (begin_slot(owner, state) for state in (before, after))
            if _are_same(old, new):
                continue
            if _are_same(old, slots.get(owner.name)):
                slots[owner.name] = new
            else:
                going_on.append(owner)
    return slots, going_on


def restart_slots(before: "TrainState", after: "TrainState") -> dict[str, Any]:
    """Return the slots of a state that gets other parameters; those of one in training stay."""
    return dict(after.slots) if before.num_tried else reset_slots(before, after)[0]


def untouched_slots(state: "TrainState") -> list[Any]:
    """Return the transforms whose slots are still as they begin."""
    with own_modes(state.world.device):
        return [
            owner
            for owner in state.setup.owners["init"]
            if _are_same(begin_slot(owner, state), state.slots.get(owner.name))
        ]


def _are_same(one: Any, other: Any) -> bool:
    """Whether two slots hold the same, bit by bit."""
    if tree.outline(one, _kind) != tree.outline(other, _kind):
        return False
    pairs = zip(tree.tree_leaves(one), tree.tree_leaves(other), strict=True)
    return all(_is_same(*pair) for pair in pairs)


def _is_same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return bool(one == other)
    a, b = local(one), local(other)
    return a.is_meta or torch.equal(a, b)


def _kind(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{tuple(leaf.shape)} {leaf.dtype} {leaf.device}"
    return type(leaf).__name__

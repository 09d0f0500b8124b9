# SPDX-License-Identifier: Apache-2.0
"""Initial states: create the full model on each rank, or only the rank's shards."""

from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import torch
from torch import nn

from accelfn.base import tree
from accelfn.base.draws import own_modes
from accelfn.base.tree import copy_shared_memory, local
from accelfn.collectives.replicas import check_replicas, checksum
from accelfn.definition.transform import chain, check_copied
from accelfn.model.drawn import build_on_meta, draw_params
from accelfn.model.model import (
    ModelSource,
    Skeleton,
    materialize,
    parameter_like,
    skeleton_of,
)
from accelfn.model.optimizer import OptimizerSource, place_opt_state, prototype_of
from accelfn.state.update import shared_draws
from accelfn.world import World

if TYPE_CHECKING:
    from accelfn.state.state import TrainState

Tensors: TypeAlias = dict[str, torch.Tensor]


@attrs.frozen(kw_only=True, eq=False)
class Beginning:
    """The tensors of an initial state, and parts of its definition.

    Attributes:
        module: the model; the state takes ownership of its tensors.
        skeleton: the model's structure, without tensors.
        prototype: the optimizer's settings, without tensors.
        params: the parameters by name.
        buffers: the buffers by name.
        opt_state: the optimizer's state before its first step.
        setup: the transforms that already sharded the parameters.
    """

    module: nn.Module
    skeleton: Skeleton
    prototype: torch.optim.Optimizer
    params: Tensors
    buffers: Tensors
    opt_state: dict[str, dict[str, Any]]
    setup: chain


def begin_slots(state: "TrainState", slots: dict[str, Any]) -> None:
    """Create slots for the transforms that have no slot yet, and add them to `slots`."""
    with own_modes(state.world.device):
        for owner in state.setup.owners["init"]:
            if owner.name not in slots:
                slot = begin_slot(owner, state)
                if slot is not None:
                    slots[owner.name] = slot


def begin_slot(owner: Any, state: "TrainState") -> Any:
    """Create the initial slot of a transform, or return None if it keeps no slot.

    Raises:
        StateError: the slot contains tensors of the state itself.
    """
    with shared_draws(state, "init", f"init {owner.name}"):
        slot = owner.init(state)
    check_copied(owner, slot, state)
    return slot


def create_whole(
    model: ModelSource,
    optimizer: OptimizerSource,
    *,
    device: torch.device,
    seed: int,
    name: str,
) -> Beginning:
    """Create the full model on this rank."""
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


def create_in_parts(
    model: ModelSource,
    optimizer: OptimizerSource,
    *,
    setup: chain,
    world: World,
    seed: int,
    name: str,
) -> Beginning:
    """Create the model module by module; of each module keep only this rank's shards.

    If the setup does not shard parameters, the result has the full parameters. The values are
    equal to those of the shards.
    """
    bare_model = build_on_meta(model, seed=seed, name=name)
    module, skeleton = bare_model.module, skeleton_of(bare_model.module)
    owners, layout = setup.owners["layout"], None
    if owners:
        # imported here, because torch's DTensor takes as long to import as accelfn
        from accelfn.definition.layout import Layout  # noqa: PLC0415

        shapes = dict(skeleton.module.named_parameters())
        layout = Layout.of(owners, shapes, world)
    sums: Tensors = {}

    def keep(name: str, values: torch.Tensor) -> torch.Tensor:
        if layout is not None:
            sums[name] = checksum(values)
            values = layout.cut(name, values)
        return values if tree.is_shard(values) else values.to(world.device)

    params = draw_params(bare_model, keep, seed=seed, name=name)
    if layout is not None:  # the full values must have been equal on all ranks
        check_replicas(params, world, label="compare replicas", values=True, sums=sums)
    metas = module.named_parameters()
    bare_model.put({n: parameter_like(meta, params[n]) for n, meta in metas})
    prototype, opt_state = prototype_of(optimizer, module, skeleton)

    def as_part(name: str, leaf: Any) -> Any:
        """Return an entry of the optimizer's state as a shard with the layout's padding."""
        if layout is None or not tree.is_shard(leaf):
            return leaf
        room = layout.room(name, leaf.shape)
        part = tree.pad_part(tree.local(leaf).detach(), room)
        return tree.with_local(params[name], part)

    opt_state = {
        n: tree.tree_map(partial(as_part, n), entry) for n, entry in opt_state.items()
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
    """Return copies of a module's buffers, because a buffer may be shared, e.g. by its class."""
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


# Slots of a state whose parameters were replaced. For example, the slot of an average starts
# with a copy of the parameters.


def reset_slots(
    before: "TrainState", after: "TrainState", *, kept: Collection[str] = ()
) -> tuple[dict[str, Any], list[Any]]:
    """Create slots again from new parameters; slots that updates changed are kept.

    Args:
        before: the state with the old parameters.
        after: the state with the new parameters.
        kept: names of slots that must not change.

    Returns: the slots by name, and the transforms whose slots depend on the parameters, but
        were changed by updates, and so were not reset.

    Cost: each slot is created twice.
    """
    slots, continuing = dict(after.slots), list[Any]()
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
                continuing.append(owner)
    return slots, continuing


def restart_slots(before: "TrainState", after: "TrainState") -> dict[str, Any]:
    """Return the slots after parameters were replaced; slots are reset only before training."""
    return dict(after.slots) if before.num_tried else reset_slots(before, after)[0]


def untouched_slots(state: "TrainState") -> list[Any]:
    """Return the transforms whose slots still have their initial value."""
    with own_modes(state.world.device):
        return [
            owner
            for owner in state.setup.owners["init"]
            if _are_same(begin_slot(owner, state), state.slots.get(owner.name))
        ]


def _are_same(one: Any, other: Any) -> bool:
    """Return whether two slots are bitwise equal."""
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

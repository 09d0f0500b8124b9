# SPDX-License-Identifier: Apache-2.0
"""What a state begins with: a model that each rank draws whole, or no more than its part."""

from functools import partial
from typing import Any, TypeAlias

import attrs
import torch
from torch import nn

from accelfn.base import shards, tree
from accelfn.base.sharing import apart_from_others
from accelfn.collectives import check_replicas
from accelfn.collectives.replicas import checksum
from accelfn.definition.transform import chain
from accelfn.structure.drawn import bare, drawn
from accelfn.structure.prototype import OptimizerSource, prototype_of
from accelfn.structure.skeleton import (
    ModelSource,
    Skeleton,
    materialize,
    parameter_like,
    skeleton_of,
)
from accelfn.world import World

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


def whole(
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
    return Beginning(
        module=module,
        skeleton=skeleton,
        prototype=prototype,
        params=apart_from_others(dict(module.named_parameters())),
        buffers=_copies(module),
        opt_state=opt_state,
        setup=chain(),
    )


def in_parts(
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
    begun = bare(model, seed=seed, name=name)
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
        return values if shards.is_shard(values) else values.to(world.device)

    params = drawn(begun, keep, seed=seed, name=name)
    if layout is not None:  # what is cut must have been the same on all ranks
        check_replicas(params, world, label="compare replicas", values=True, sums=sums)
    metas = module.named_parameters()
    begun.put({n: parameter_like(meta, params[n]) for n, meta in metas})
    prototype, opt_state = prototype_of(optimizer, module, skeleton)

    def laid(name: str, leaf: Any) -> Any:
        """Return what an optimizer made like a part as parts are, with their room."""
        if layout is None or not shards.is_shard(leaf):
            return leaf
        room = layout.room(name, leaf.shape)
        part = shards.padded(shards.local(leaf).detach(), room)
        return shards.with_local(params[name], part)

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

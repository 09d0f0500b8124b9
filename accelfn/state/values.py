# SPDX-License-Identifier: Apache-2.0
"""The values of a state, field by field: where they lie, and whether ranks have the same.

A setup that splits a model over ranks has them in parts; under another they lie otherwise.
"""

from collections.abc import Collection
from typing import Any, TypeAlias

import attrs
import torch

from accelfn.base.contexts import own_modes
from accelfn.base.shards import is_shard
from accelfn.collectives import check_replicas
from accelfn.definition.definition import Definition
from accelfn.definition.facts import by_rank, facts_of
from accelfn.state.alike import check_alike, shared_slots
from accelfn.structure.counts import beside

OptState: TypeAlias = dict[str, dict[str, Any]]


@attrs.frozen
class Values:
    """What a state holds in tensors.

    Attributes:
        params: the parameters by name.
        buffers: the buffers by name.
        opt_state: what the optimizer keeps, by the name of the parameter.
        slots: what transforms and the user keep, by name.
    """

    params: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    opt_state: OptState
    slots: dict[str, Any]

    @property
    def by_field(self) -> dict[str, Any]:
        """The fields by name, without a copy of anything in them."""
        return attrs.asdict(self, recurse=False)


def carried(values: Values, before: Definition, after: Definition) -> Values:
    """Return the values of one definition as another has them.

    Where ranks trained apart and now train together, they compare what is gone on with. Where
    either definition cuts, values are laid out anew. Both are collectives.

    Raises:
        ReplicaMismatchError: ranks that trained apart hold other values.
    """
    regrouped = after.copy_of_each not in ((), before.copy_of_each)
    if "apart" in before.setup.facts and (
        regrouped or "apart" not in after.setup.facts
    ):
        names = {each.name for each in after.setup}
        kept = {name: slot for name, slot in values.slots.items() if name in names}
        check_met(attrs.evolve(values, slots=kept), before, by_rank(after.setup))
    if before.layout or after.layout:
        values = on_device(laid_out(values, before, after), after)
    return values


def check_met(
    values: Values, definition: Definition, own: Collection[tuple[str, str]]
) -> None:
    """Raise unless ranks that trained apart hold the same; their buffers may differ.

    Args:
        values: with those slots that are gone on with.
        definition: under which they trained apart.
        own: what each rank keeps for itself from now on, by slot and entry.

    Raises:
        ReplicaMismatchError: they do not.
    """
    (apart, *_) = (each for each in definition.setup if "apart" in facts_of(each))
    check_alike(
        {
            "params": values.params,
            "opt_state": values.opt_state,
            "slots": shared_slots(values.slots, own),
        },
        definition.world,
        is_split=definition.layout is not None,
        advice=(
            f"Under {apart!r} ranks trained apart, and now they would drift. Bring them"
            " together first: state = af.finalize(state) averages parameters, and under"
            " af.local_sgd(opt_state=True) what the optimizer keeps of them."
        ),
    )


def cut(params: dict[str, torch.Tensor], layout: Any) -> dict[str, torch.Tensor]:
    """Return parameters as a layout has them, of which some may be whole; None cuts nothing."""
    if layout is None:
        return params
    return {n: p if is_shard(p) else layout.cut(n, p) for n, p in params.items()}


def laid_out(values: Values, before: Definition, definition: Definition) -> Values:
    """Return values as the layout of a definition has them, which lay as that of another.

    What was cut is gathered, which is a collective.
    """
    from accelfn.definition import layout  # noqa: PLC0415 - rarely needed

    wanted, world = definition.layout, definition.world
    if wanted is not None and wanted.same(before.layout):
        return values
    if before.layout is None:  # what is cut must have been the same on all ranks
        check_replicas(
            values.params,
            world,
            label="compare replicas",
            values="apart" not in before.setup.facts,
        )
    named = before.skeleton.module.named_parameters()
    shapes = {name: meta.shape for name, meta in named}
    with own_modes(world.device):
        moved = [
            layout.laid_out(each, wanted, shapes, world)
            for each in (values.params, values.opt_state, values.slots)
        ]
    params, opt_state, slots = moved
    return attrs.evolve(values, params=params, opt_state=opt_state, slots=slots)


def on_device(values: Values, definition: Definition) -> Values:
    """Return values of which what was not split is on the device, and parts where they were."""
    device = definition.world.device
    params = {n: p if is_shard(p) else p.to(device) for n, p in values.params.items()}
    buffers = {name: each.to(device) for name, each in values.buffers.items()}
    # dicts: an engine may have kept values in another order, which others do not know
    module = definition.skeleton.module
    opt_state = beside(values.opt_state, params, definition.optimizer, module)
    return attrs.evolve(values, params=params, buffers=buffers, opt_state=opt_state)

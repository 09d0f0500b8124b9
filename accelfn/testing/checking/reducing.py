# SPDX-License-Identifier: Apache-2.0
"""Whether a transform's own `reduce` gives the mean over all ranks: no more, and no less."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch

from accelfn.collectives import reduce
from accelfn.definition.fields import has_field
from accelfn.state.grads import Grads
from accelfn.state.update import Update
from accelfn.testing.checking.watching import Seen, subclassed
from accelfn.world import World

Tensors = Mapping[str, torch.Tensor]

NEAR = 0.05
"""How far, of its own size, what came of a gradient may be from the mean: bytes may be few."""
_LABEL = "reduces_to_mean"


def held_to_mean(transform: Any, seen: Seen) -> Any:
    """Return an equal transform that tells of what its `reduce` makes of gradients."""
    if not has_field(transform, "reduce") or transform.reduce is None:
        return transform
    methods = {"reduce": _held(type(transform).reduce, seen)}
    return subclassed(transform, methods)


def _held(method: Callable[..., Any], seen: Seen) -> Callable[..., Any]:
    @wraps(method)
    def call(self: Any, grads: Grads, slot: Any, update: Update) -> Any:
        wanted = _mean(grads, update.world)
        returned = method(self, grads, slot, update)
        found: Grads = returned[0]
        missing = sorted(wanted.keys() - found.tensors.keys())
        if missing:
            seen(f"in update {update.num_tried} it leaves out {missing[0]!r}")
        for name in wanted.keys() & found.tensors.keys():
            mean = found.tensors[name].double() / found.taken.denominator
            size, off = wanted[name].norm(), (mean - wanted[name]).norm()
            if not off <= NEAR * size:
                seen(
                    f"in update {update.num_tried}, rank {update.world.rank}, the gradient of"
                    f" {name!r} is off by {float(off / size):.2g} times the size of the mean"
                    " over all ranks, each by its weight"
                )
        return returned

    return call


def _mean(grads: Grads, world: World) -> Tensors:
    """Return the mean over all ranks, by weight."""
    weight = torch.as_tensor(grads.weight, dtype=torch.float64)
    totals = {name: grad.double() for name, grad in grads.tensors.items()}
    sums, whole = reduce((totals, weight), world, label=_LABEL)
    return {name: each / whole for name, each in sums.items()}

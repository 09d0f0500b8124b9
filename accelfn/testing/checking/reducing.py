# SPDX-License-Identifier: Apache-2.0
"""Whether a transform's own `reduce` gives the mean over all ranks: no more, and no less."""

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from accelfn.collectives import reduce
from accelfn.state.grads import Grads, Taken
from accelfn.state.update import Update, through
from accelfn.testing.checking.subject import Subject
from accelfn.testing.checking.watching import Seen, intercepted
from accelfn.testing.simulate import simulate
from accelfn.world import World

Tensors = Mapping[str, torch.Tensor]

NEAR = 0.05
"""How far, of its own size, what came of a gradient may be from the mean: bytes may be few."""
_LABEL = "reduces_to_mean"
_ROUNDS, _IN_SUM = 60, 0.1
"""In how many updates all of a gradient has to be sent, up to a part that is owed still."""


def held_to_mean(transform: Any, seen: Seen) -> Any:
    """Return an equal transform that tells of what its `reduce` makes of gradients."""

    def call(
        _: str, method: Any, self: Any, grads: Grads, slot: Any, update: Update
    ) -> Any:
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

    return intercepted(transform, ["reduce"], call)


def sends_all(subject: Subject) -> str | None:
    """Sums over many updates are those of the weighted mean."""

    def rank(world: World) -> float:
        state = subject.start(world)
        generator = torch.Generator().manual_seed(world.rank)
        weight = 1.0 if world.rank else 9.0
        shapes = {name: state.params[name].shape for name in state.trainable}
        totals = {
            name: weight * torch.randn(shape, generator=generator)
            for name, shape in shapes.items()
        }
        grads = Grads(tensors=totals, taken=Taken(divisor=weight, shows_totals=True))
        update = Update(state=state, slots=state.slots, grads=grads)
        sums = dict.fromkeys(totals, 0.0)
        for step in range(_ROUNDS):
            at = attrs.evolve(update, state=attrs.evolve(state, step=step))
            found, update = through("reduce", grads.map(torch.clone), at, Grads)
            for name, each in found.tensors.items():
                sums[name] = sums[name] + each.double() / found.taken.denominator
        wanted = {n: m * _ROUNDS for n, m in _mean(grads, world).items()}
        off = torch.stack([(sums[n] - wanted[n]).norm() for n in wanted]).norm()
        return float(off / torch.stack([m.norm() for m in wanted.values()]).norm())

    off = max(simulate(subject.size, rank))
    if off <= _IN_SUM:
        return None
    return (
        f"over {_ROUNDS} updates with the same gradients, what reduce gives is in sum off by"
        f" {off:.2g} times the weighted mean's. Send later all that an update leaves out,"
        ' or name it: gives_up = {"sends_all_later": "it is a vote"}.'
    )


def _mean(grads: Grads, world: World) -> Tensors:
    """Return the mean over all ranks, by weight."""
    weight = torch.as_tensor(grads.weight, dtype=torch.float64)
    totals = {name: grad.double() for name, grad in grads.tensors.items()}
    sums, whole = reduce((totals, weight), world, label=_LABEL)
    return {name: each / whole for name, each in sums.items()}

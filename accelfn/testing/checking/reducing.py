# SPDX-License-Identifier: Apache-2.0
"""Whether a transform's own `reduce` gives the mean over all ranks: no more, and no less."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import torch
from torch.nn.utils import get_total_norm

from accelfn.base import tree
from accelfn.collectives import reduce
from accelfn.definition.fields import has_field
from accelfn.state.grads import Grads, Taken
from accelfn.state.state import TrainState
from accelfn.state.update import Update, through
from accelfn.testing.checking.laws import Law
from accelfn.testing.checking.subject import Subject
from accelfn.testing.checking.watching import Seen, intercepted
from accelfn.testing.simulate import simulate
from accelfn.world import World

Tensors = Mapping[str, torch.Tensor]
_Reduced: TypeAlias = tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]

NEAR = 0.05
"""How far, of its own size, what came of a gradient may be from the mean: bytes may be few."""
_LABEL = "reduces_to_mean"
_ROUNDS, _IN_SUM = 200, 0.02
"""In so many updates after the first, all of its gradients is sent, but for this part."""
_LARGE, _LITTLE = 10.0, 0.01
"""How large gradients are at first, and then."""


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


def sends_all(members: Sequence[Any]) -> Law:
    """Return the law that what an update leaves out is sent later, though ranks join or leave."""
    merging = [each for each in members if has_field(each, "merge")]

    def law(subject: Subject) -> str | None:
        def begins(world: World) -> _Reduced:
            return _reduced(subject.start(world), range(1), _LARGE)

        def goes_on(world: World) -> _Reduced:
            state, saved = subject.start(world), [slots for *_, slots in begun]
            slots = {} if merging else {**saved[world.rank]}
            for each in merging:
                own = tree.clone([slots_of[each.name] for slots_of in saved])
                slots[each.name] = each.merge(own, world)[1]
            state = attrs.evolve(state, slots={**state.slots, **slots})
            return _reduced(state, range(1, 1 + _ROUNDS), _LITTLE)

        begun = simulate(subject.size, begins)
        size = (1 if subject.size > 1 else 2) if merging else subject.size
        sums, means, _ = zip(begun[0], simulate(size, goes_on)[0], strict=True)
        wanted = {name: means[0][name] + means[1][name] for name in means[0]}
        missing = [sums[0][name] + sums[1][name] - wanted[name] for name in wanted]
        off = float(get_total_norm(missing) / get_total_norm([*wanted.values()]))
        if off <= _IN_SUM:
            return None
        moved = f", the last {_ROUNDS} of them on {size}" if merging else ""
        return (
            f"over {1 + _ROUNDS} updates{moved}, what reduce gives is in sum off by"
            f" {off:.2g} times the weighted mean's. Send later all that an update leaves out,"
            " in merge share it out among the new ranks, or name it:"
            ' gives_up = {"sends_all_later": "it is a vote"}.'
        )

    return law


def _reduced(state: TrainState, steps: range, size: float) -> _Reduced:
    """Return the sums of what `reduce` gives, those of the means, and the slots after it."""
    world = state.world
    generator = torch.Generator().manual_seed(world.rank)
    # other weights on each rank, of the same sum on any number of ranks
    weight = 20.0 * (world.rank + 1) / (world.size * (world.size + 1))
    totals = {
        name: size * weight * torch.randn(state.params[name].shape, generator=generator)
        for name in state.trainable
    }
    grads = Grads(tensors=totals, taken=Taken(divisor=weight, shows_totals=True))
    update = Update(state=state, slots=state.slots, grads=grads)
    sums = dict.fromkeys(totals, 0.0)
    for step in steps:
        at = attrs.evolve(update, state=attrs.evolve(state, step=step))
        found, update = through("reduce", grads.map(torch.clone), at, Grads)
        for name, each in found.tensors.items():
            sums[name] = sums[name] + each.double() / found.taken.denominator
    means = {name: mean * len(steps) for name, mean in _mean(grads, world).items()}
    return sums, means, tree.clone(dict(update.slots))


def _mean(grads: Grads, world: World) -> Tensors:
    """Return the mean over all ranks, by weight."""
    weight = torch.as_tensor(grads.weight, dtype=torch.float64)
    totals = {name: grad.double() for name, grad in grads.tensors.items()}
    sums, whole = reduce((totals, weight), world, label=_LABEL)
    return {name: each / whole for name, each in sums.items()}

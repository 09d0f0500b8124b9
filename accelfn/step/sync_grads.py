# SPDX-License-Identifier: Apache-2.0
"""`sync_grads`: gradients of this rank into those of all, for custom steps."""

import attrs
import torch

from accelfn.base.calling import called
from accelfn.base.contexts import own_modes, span
from accelfn.base.shards import cut_axes, local
from accelfn.collectives import all_reduce_
from accelfn.engine.building import compare
from accelfn.errors import GradsError
from accelfn.state.argument import check_state
from accelfn.state.grads import Grads
from accelfn.state.lease import Lease
from accelfn.state.state import TrainState
from accelfn.step.value_and_grad import check_update


@called
def sync_grads(state: TrainState, grads: Grads) -> Grads:
    """Reduce gradients over the ranks of the state's world, exactly by weight.

    Where copies of several ranks each train apart, over those of this rank's copy.

    For custom steps that took them with `sync=False`, or without `wrap_ddp`.

    Cost: one all-reduce of all gradients, flattened, and one of their weight; the first time,
        a few small ones by which ranks compare their setups, and at update 0 their parameters.

    Law: what `wrap_ddp` gives.

    Raises:
        GradsError: they are reduced already, sparse, or not this state's.
        ReplicaMismatchError: the ranks' setups, optimizers, schedules, seeds or data differ.
        PeerFailedError: another rank failed.
    """
    check_state("af.sync_grads(state, grads)", state)
    state.lease.check()
    check_update(state, grads)
    ranks = state.definition.copy
    if ranks.size == 1:
        return attrs.evolve(grads, reduced=True)
    if grads.taken.is_held:
        msg = (
            "sync_grads: DeepSpeed holds these gradients. Let the last micro-batch reduce them:"
            " value_and_grad(state, batch, into=grads), with sync=True."
        )
        raise GradsError(msg)
    if grads.reduced:
        msg = "sync_grads: these gradients are reduced over the ranks already."
        raise GradsError(msg)
    names = state.definition.skeleton.trainable
    sparse = [name for name, grad in grads.as_taken.items() if grad.is_sparse]
    if sparse:
        msg = (
            f"sync_grads: the gradients of {', '.join(sparse[:5])} are sparse. Make those"
            " layers with sparse=False, or let af.wrap_ddp() reduce them."
        )
        raise GradsError(msg)
    if any("dp_shard" in cut_axes(grad) for grad in grads.as_taken.values()):
        msg = (
            "sync_grads: these gradients are parts, summed over the ranks already, of"
            ' micro-batches under af.wrap_fsdp(accumulate="sharded"); their weight alone is'
            ' not. Let the last micro-batch reduce (sync=True), or take accumulate="whole".'
        )
        raise GradsError(msg)
    compare(state)
    taken = grads.taken
    factor = taken.scale if taken.lease.is_mean else 1
    with own_modes(ranks.device):
        totals = {
            name: local(grads.as_taken[name]) * factor
            if name in grads.as_taken
            else _zeros(state, name)
            for name in names
        }
        told = [float(name in grads.as_taken) for name in names]
        counts = torch.tensor([0.0, *told], dtype=torch.float64, device=ranks.device)
        counts[0] = taken.divisor
        with span("accelfn reduce"):
            all_reduce_([*totals.values(), counts], ranks, label="sync_grads")
        # a parameter that took part on no rank has no gradient
        if len(grads.as_taken) < len(names):
            took_part = zip(names, counts[1:].tolist(), strict=True)
            totals = {name: totals[name] for name, some in took_part if some}
        layout = state.definition.layout
        if layout is not None:
            totals = {name: layout.laid(name, total) for name, total in totals.items()}
    taken = attrs.evolve(taken, divisor=counts[0], lease=Lease())
    return attrs.evolve(grads, tensors=totals, taken=taken, reduced=True)


def _zeros(state: TrainState, name: str) -> torch.Tensor:
    """Return a gradient of nothing, in the shape in which a rank computes."""
    layout, param = state.definition.layout, state.params[name]
    shape = param.shape if layout is None else layout.computed(name)
    return torch.zeros(shape, dtype=param.dtype, device=state.world.device)

# SPDX-License-Identifier: Apache-2.0
"""`apply_grads` and `finalize`: the states after an update, and after the last one."""

import attrs

from accelfn.base.calling import called
from accelfn.base.contexts import own_modes
from accelfn.state.argument import check_state
from accelfn.state.grads import Grads
from accelfn.state.lease import Lease
from accelfn.state.state import TrainState
from accelfn.state.succession import through_state
from accelfn.state.update import Update
from accelfn.step.holding import held
from accelfn.step.stages import begin_donation, ended, take
from accelfn.step.value_and_grad import check_update


@held
@called
def apply_grads(state: TrainState, grads: Grads) -> TrainState:
    """Take one optimizer update: `(state, grads) -> state`.

    Gradients are divided by their weight, pass through the setup's `grads` transforms, and
    go to the optimizer; then `after_update` transforms run. The given state and gradients
    are donated.

    Raises:
        GradsError: they were taken at another update, or are not reduced in a world of
            several ranks.
        StateDonatedError: the state was given to a step before.
    """
    check_state("af.apply_grads(state, grads)", state)
    state.lease.check()
    check_update(state, grads)
    with own_modes(state.definition.world.device):
        return take(state, grads, _held_already)[0]


def _held_already() -> None: ...


@held
@called
def finalize(state: TrainState) -> TrainState:
    """Return the state with what its transforms owe at the end, as a last average.

    The given state is donated, unless nothing is owed: then it is returned.
    """
    check_state("af.finalize(state)", state)
    state.lease.check()
    if not state.definition.setup.owners["finalize"]:
        return state
    with own_modes(state.definition.world.device):
        after = attrs.evolve(state, lease=Lease())
        update = Update(state=state, slots=after.slots)
        begin_donation(state, state.num_tried)
        after = through_state("finalize", after, update)
        return ended(state, after, state.num_tried)

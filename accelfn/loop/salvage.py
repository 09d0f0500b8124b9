# SPDX-License-Identifier: Apache-2.0
"""`salvage`: the newest state of a training, by way of an old one."""

from accelfn.base.calling import called
from accelfn.state.argument import check_state
from accelfn.state.state import TrainState


@called
def salvage(state: TrainState) -> TrainState:
    """Return the newest state that came of one, however many updates lie between.

    A step is given its state. Where an exception or an interrupt kept the caller from the
    state that a step returned, as in a loop that stood in a function, the one that it was
    given knows the newest. So does any before that, as long as somebody has it. What a
    `copy()`, or a step with `donate=False`, began is another training.

    Ctrl-C in the main thread costs no state without it: it is held back until the caller has
    what the step returned.

    Args:
        state: any of the training; the newest is returned as it is.

    Law: the result is the state that the last update returned, bitwise.

    Cost: nothing; an old state keeps the newest alive, and none that came between.

    Raises:
        StateDonatedError: the last update was broken off in its midst, by an exception of
            the optimizer, or one that a debugger raised; its tensors are partly updated.

    Example:
        >>> state = af.salvage(state)  # doctest: +SKIP
    """
    check_state("af.salvage(state)", state)
    newest: TrainState = state.lease.heir or state
    newest.lease.check()
    return newest

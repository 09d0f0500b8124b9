# SPDX-License-Identifier: Apache-2.0
"""`observe`: what an evaluation gave, told to the transforms that go by it."""

import attrs
import torch

from accelfn.base.arguments import is_number
from accelfn.base.calling import called
from accelfn.collectives import check_rows
from accelfn.definition.slots import check_copied
from accelfn.errors import ArgumentError, StateError
from accelfn.state.argument import check_state
from accelfn.state.state import TrainState
from accelfn.state.update import Update, through


@called
def observe(state: TrainState, value: float | torch.Tensor) -> TrainState:
    """Return the state whose transforms know what an evaluation gave: `(state, value) -> state`.

    Its slots alone are other than the given state's, whose tensors it shares. To be called
    by all ranks, as `af.evaluate` is, whose numbers are the same on all of them.

    Args:
        state: with transforms in its setup that observe, as `af.plateau` does.
        value: a number, such as `af.evaluate(state, held_out, loss_fn)["loss"]`.

    Law: two states that observed the same are equal; nothing but slots is changed.

    Cost: over ranks that train together, a small all-reduce, by which they compare values.

    Raises:
        ArgumentError: it is no number.
        StateError: no transform observes.
        ReplicaMismatchError: ranks that train together observed other values than one
            another, a loss of their own batches say.

    Example:
        >>> import torch
        >>> from functools import partial
        >>> import accelfn as af
        >>> state = af.TrainState.create(
        ...     model=lambda: torch.nn.Linear(1, 1),
        ...     optimizer=partial(torch.optim.SGD, lr=0.5),
        ...     setup=af.plateau(patience=0),
        ... )
        >>> state = af.observe(af.observe(state, 0.25), 0.25)  # no better than before
        >>> state.lrs
        (0.05,)
    """
    check_state("af.observe(state, value)", state)
    state.lease.check()
    setup, world = state.definition.setup, state.definition.world
    if not setup.owners["observe"]:
        msg = (
            "af.observe(state, value): no transform of the setup goes by what is observed."
            " Put one into it, such as af.plateau(patience=2)."
        )
        raise StateError(msg)
    number = _number(value)
    if setup.owners["engine"] or setup.owners["reduce"]:
        check_rows(
            {"observed value": repr(number)},
            world,
            label="compare observed values",
            advice="Observe what is the same on all ranks, as what af.evaluate and af.mean give.",
        )
    before = Update(state=state, slots=state.slots)
    _, after = through("observe", number, before, (int, float))
    for owner in setup.owners["observe"]:
        check_copied(owner, after.slots.get(owner.name), state)
    return attrs.evolve(state, slots=dict(after.slots))


def _number(value: object) -> float:
    if isinstance(value, torch.Tensor) and value.ndim == 0:
        value = value.item()
    if is_number(value):
        return float(value)
    hint = ""
    if hasattr(value, "keys"):
        hint = ' Choose one by its name: af.evaluate(...)["loss"].'
    msg = f"af.observe(state, {value!r}): expected a number.{hint}"
    raise ArgumentError(msg)

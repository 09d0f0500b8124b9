# SPDX-License-Identifier: Apache-2.0
"""`assert_states_equal`: two states hold the same, in all that is saved of them."""

from collections.abc import Iterator
from typing import Any

import torch

from accelfn.base.calling import called
from accelfn.errors import ArgumentError, LawError
from accelfn.state.state import TrainState
from accelfn.testing.comparing.differences import Comparison, Difference, leaves, listed

SAVED = (
    *("step", "num_skipped", "cursor", "seed"),
    *("params", "buffers", "opt_state", "slots"),
)
"""The fields of a state that are saved, numbers first: they explain what follows."""


@called
def assert_states_equal(
    a: TrainState, b: TrainState, *, rtol: float = 0.0, atol: float = 0.0
) -> None:
    """Assert that two states are equal in all that is saved of them.

    That is `step`, `num_skipped`, `cursor`, `seed`, `params`, `buffers`, `opt_state` with
    its numbers, and `slots`; also dtypes, shapes, and which entries are one tensor. Not
    compared is what is not saved: the definition, devices, memory layouts, the order of
    names.

    By default bit by bit: a NaN equals itself, and -0.0 is not 0.0, for they divide
    differently. With a tolerance, elements of a floating-point tensor may differ by
    `atol + rtol * largest`, where `largest` is the largest magnitude in the two tensors;
    NaN equals NaN, and other numbers must be equal.

    Raises:
        LawError: they are not; an `AssertionError` with one line for each entry that
            differs, at most 20.
        StateDonatedError: one of them was given to a step.

    Law: a state equals itself and its copy; a change of any one bit is found and named.

    Example:
        >>> import accelfn as af
        >>> state = af.TrainState.create(
        ...     model=torch.nn.Linear(2, 1), optimizer=torch.optim.SGD
        ... )
        >>> assert_states_equal(state, state.copy())
        >>> assert_states_equal(state, state.with_slot("best", 0.5))
        Traceback (most recent call last):
        ...
        accelfn.errors.LawError: The states differ in 1 entry (the first, the second):
          slots['best']: only in the second: 0.5
    """
    for state in (a, b):
        if not isinstance(state, TrainState):
            msg = f"assert_states_equal: expected two TrainStates, got {state!r}."
            raise ArgumentError(msg)
    comparison = Comparison(rtol=rtol, atol=atol, bitwise=True)
    by_name = comparison.by_name(_fields(a), _fields(b))
    found = [each for differences in by_name.values() for each in differences]
    found += _ties(a, b, comparison)
    if found:
        entries = "entry" if len(found) == 1 else "entries"
        msg = (
            f"The states differ in {len(found)} {entries} (the first, the second):"
            f"{listed(found)}"
        )
        raise LawError(msg)


def _fields(state: TrainState) -> dict[str, Any]:
    found = {name: getattr(state, name) for name in SAVED if name != "cursor"}
    cursor = {
        "cursor.epoch": state.cursor.epoch,
        "cursor.samples": state.cursor.samples,
    }
    return {"step": found.pop("step"), **cursor, **found}


def _ties(a: TrainState, b: TrainState, comparison: Comparison) -> Iterator[Difference]:
    """Yield entries that are one tensor with another in one state, and not in the other."""
    ties = [_first_places(state) for state in (a, b)]
    for path in ties[0]:
        if path not in ties[1] or ties[0][path] == ties[1][path]:
            continue
        said = [
            f"one tensor with {first[path]} in {side}"
            for first, side in zip(ties, comparison.sides, strict=True)
            if first[path] != path
        ]
        yield Difference(path, f"{', '.join(said)}{' only' * (len(said) == 1)}")


def _first_places(state: TrainState) -> dict[str, str]:
    """Return where each tensor of a state stands first, by each of its places."""
    first: dict[int, str] = {}
    places = (
        pair for name, value in _fields(state).items() for pair in leaves(name, value)
    )
    return {
        path: first.setdefault(id(leaf), path)
        for path, leaf in places
        if isinstance(leaf, torch.Tensor)
    }

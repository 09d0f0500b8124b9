# SPDX-License-Identifier: Apache-2.0
"""What is made for the states of one definition, and can be dropped and made again."""

from collections.abc import Callable
from typing import Any
from weakref import ref

import attrs

Function = Callable[..., Any]


@attrs.define(eq=False)
class Cache:
    """What a step would otherwise make anew, and what it does once for a definition.

    Attributes:
        engine: binds the states to PyTorch; `engine_of` makes it.
        composed: gradient functions as the setup wraps them, by what `value_and_grad`
            returned; they go when that is let go of.
        keys: of the draws that transforms share, by purpose, each with its seed.
        is_compared: whether ranks that train together hold the same, and will do the same.
        is_to_compare: whether they are to do so once more, for each was given something.
        saw_a_batch: whether the first batch was looked at.
        saw_values: whether updates of plain values were told of, where there are data.
        last_value: the tensors of the last of them, until then.
        has_shown: whether somebody has seen a state's tensors since the last step.
        has_same_data: whether ranks that train on all samples hold the same.
        compared_sums: whether what a user's `reduce` returned was compared once.
        slot_changes: how often an update gave a transform another slot, by name.
        loaded: what was loaded last, behind what it was loaded into: the leases of both.
        looks_at: the update from which on a schedule is looked at for its end.
        planned: what is set so far, while a transform's `hyper` is asked.
    """

    engine: Any = None
    composed: dict[ref[Function], Function] = attrs.field(
        factory=dict[ref[Function], Function]
    )
    keys: dict[str, tuple[int, int]] = attrs.field(factory=dict[str, tuple[int, int]])
    is_compared: bool = False
    is_to_compare: bool = False
    saw_a_batch: bool = False
    saw_values: bool = False
    last_value: list[Any] = attrs.field(factory=list[Any])
    has_shown: bool = False
    has_same_data: bool = False
    compared_sums: bool = False
    slot_changes: dict[str, int] = attrs.field(factory=dict[str, int])
    loaded: tuple[ref[Any], ref[Any]] | None = None
    looks_at: float = 0.0
    planned: dict[tuple[int, str], Any] | None = None

    def compose(self, function: Function, composed: Function) -> None:
        """Keep what the setup has made of a function for as long as that lives."""
        # Not a WeakKeyDictionary. The garbage collector may let go of a function in the
        # middle of anything, and CPython swallows the Ctrl-C that is taken in a callback
        # written in Python. In one written in C none is.
        self.composed[ref(function, self.composed.pop)] = composed

    def clear(self) -> None:
        """Be as new."""
        self.composed.clear()  # its keys hold it by their callbacks
        self.__init__()

# SPDX-License-Identifier: Apache-2.0
"""`Turns`: gradients cross the ranks in one order, in whichever they come."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from accelfn.collectives import broadcast_
from accelfn.world import World

# DeepSpeed has no types, and no public names for what it keeps
# pyright: reportPrivateUsage=false


class Turns:
    """In which order gradients cross the ranks: a given one, or that in which rank 0's came.

    DeepSpeed adds up what ranks send at the same time, and knows no names. So a gradient that
    comes before its turn waits, and one that does not come at all has its turn at the end.
    While the order is learnt, in the first pass, rank 0 tells the others of each gradient.
    """

    def __init__(
        self, count: int, ranks: World, order: Sequence[int] | None = None
    ) -> None:
        """Take how many parameters there are, which are numbers here, and their order."""
        self._count, self._ranks = count, ranks
        self._order = [] if order is None else [*order]
        self._had, self._waiting = set[int](), set[int]()

    def come(self, number: int) -> Iterable[int]:
        """Return whose turn it is now that a gradient has come."""
        turn = len(self._had)
        in_turn = turn < len(self._order) and self._order[turn] == number
        if in_turn and not self._waiting:  # as in nearly every pass
            self._had.add(number)
            return (number,)
        return self._out_of_turn(number)

    def _out_of_turn(self, number: int) -> Iterator[int]:
        if number in self._had:  # twice in a pass, which DeepSpeed refuses
            yield number
        self._waiting.add(number)
        while self._waiting and (turn := self._turn(number)) in self._waiting:
            yield self._take(turn)

    def rest(self) -> Iterator[int]:
        """Yield all who have not had their turn, for the pass is over; then begin anew."""
        while len(self._had) < self._count:
            told = {*self._order}
            untold = (i for i in range(self._count) if i not in told)
            yield self._take(self._turn(next(untold, 0)))
        self.begin()

    def begin(self) -> None:
        """Begin a pass."""
        self._had.clear()
        self._waiting.clear()

    def _take(self, turn: int) -> int:
        self._had.add(turn)
        self._waiting.discard(turn)
        return turn

    def _turn(self, own: int) -> int:
        """Return whose turn it is; while that is not known, what comes to rank 0 decides."""
        if len(self._had) == len(self._order):
            if len(self._order) == self._count:
                return -1
            told = torch.tensor(own, device=self._ranks.device)
            broadcast_([told], self._ranks, label="order of gradients")
            self._order.append(int(told))
        return self._order[len(self._had)]


def take_turns(
    zero: Any,
    ranks: World,
    come_listed: Callable[[], bool],
    when_all_came: Callable[[], None],
) -> tuple[Turns, Turns]:
    """Have DeepSpeed's optimizer of stage 1 or 2 send gradients of all parameters in turns.

    What has none on a rank is sent as 0.

    Args:
        zero: the optimizer.
        ranks: the ranks.
        come_listed: whether the gradients of a pass come in the order of its parameters.
        when_all_came: is called when all have had their turn, before the last are summed.

    Returns:
        The turns of passes in which they do, and of those in which they do not.
    """
    listed_in: list[tuple[nn.Parameter, int]] = [
        (param, group)
        for group, params in enumerate(zero.bit16_groups)
        for param in params
        if param.requires_grad
    ]
    params = [param for param, _ in listed_in]
    # by its id, for a tensor's own hash is a call of Python
    number_of = {id(param): number for number, param in enumerate(params)}
    listed = Turns(len(params), ranks, range(len(params)))
    learnt = Turns(len(params), ranks)
    send = zero.reduce_ready_partitions_and_remove_grads
    end = zero.independent_gradient_partition_epilogue

    def come(param: nn.Parameter, _group: int) -> None:
        turns = listed if come_listed() else learnt
        for turn in turns.come(number_of[id(param)]):
            send(*listed_in[turn])

    def end_in_turn() -> None:
        for turn in (listed if come_listed() else learnt).rest():
            param = params[turn]
            if zero.get_gradient_for_reduction(param) is None:
                param.grad = torch.zeros_like(param)
                if zero.use_grad_accum_attribute:
                    zero._fill_param_grad_accum_attribute(param)
            send(*listed_in[turn])
        when_all_came()
        end()

    zero.reduce_ready_partitions_and_remove_grads = come
    zero.independent_gradient_partition_epilogue = end_in_turn
    return listed, learnt

# SPDX-License-Identifier: Apache-2.0
"""`Course`: whether ranks come to the same places of a model, before they wait there."""

import json
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NoReturn, TypeAlias

import torch.distributed as dist
from torch import nn

from accelfn.collectives import break_off, gather_text
from accelfn.errors import LossError
from accelfn.world import World

Ways: TypeAlias = dict[str, "Ways"]
_LARGEST = 2**16
"""How many places are remembered: of a model that always goes elsewhere, not all."""
_LOOKS_EVERY = 0.01
_LABEL = "compare where DeepSpeed is"
_ADVICE = (
    "At stage 3 DeepSpeed gathers and adds up what ranks come to at the same time, so they would"
    " wait for each other, or take one parameter for another. The state is as it was. Let all"
    " ranks run the same modules in the same order, and use all parameters, if only by 0, as in"
    " `+ 0 * net.head.weight.sum()`; take stage 2, where the order is free; or"
    " af.wrap_fsdp(find_unused_parameters=True)."
)


class Course:
    """What the ranks come to, one after the other, in an update: the same on all of them.

    Where all ranks have gone one way, they go it again without a word. Where they have never
    been, or have parted ways before, they compare. A rank that leaves the one known way cannot
    ask by a collective, since others may be in one of DeepSpeed's: it asks at the store at
    which they met, for half of the time in which a collective fails.
    """

    def __init__(self, ranks: World) -> None:
        """Begin without a known way; all ranks do."""
        self._ranks = ranks
        self._number = self._store.add(f"courses of {ranks.rank}", 1)
        self._root: Ways = {}
        self._size = self._num_asked = 0
        self.begin()

    def begin(self) -> None:
        """Begin an update."""
        if self._size > _LARGEST:
            self._root, self._size = {}, 0
        self._at, self._depth = self._root, 0

    def come(self, place: str) -> None:
        """Come to a place, as all ranks do.

        Raises:
            LossError: others come to another; they raise it, too, or `PeerFailedError` if they
                wait in DeepSpeed's own calls.
        """
        ways = self._at
        if len(ways) != 1 or place not in ways:
            self.compare(place)
            self._size += place not in ways
        self._at = ways.setdefault(place, {})
        self._depth += 1

    def compare(self, place: str) -> None:
        """Compare a place with the others', whether it is known or not.

        Raises:
            LossError: as `come`.
        """
        if len(self._at) == 1:
            self._ask(place)
        else:
            places = gather_text(place, self._ranks, label=_LABEL)
            if len({*places}) > 1:
                _refuse(dict(enumerate(places)))

    def _ask(self, place: str) -> None:
        """Ask where the others go, that may go on."""
        store, ranks = self._store, self._ranks
        self._num_asked += 1
        keys = [
            f"{self._number}.{self._num_asked}.{rank}" for rank in range(ranks.size)
        ]
        store.set(keys[ranks.rank], json.dumps([self._depth, place]))
        until = time.monotonic() + (ranks.connection.timeout(ranks.device) or 0) / 2
        while not (are_there := store.check(keys)) and time.monotonic() < until:
            time.sleep(_LOOKS_EVERY)
        if are_there:
            told = [tuple(json.loads(store.get(key))) for key in keys]
            if len({*told}) > 1:
                _refuse({rank: at for rank, (_, at) in enumerate(told)})
            return
        (known,) = self._at
        others = {r: known for r in range(ranks.size) if not store.check([keys[r]])}
        try:
            _refuse({ranks.rank: place, **others})
        except LossError as error:
            break_off(ranks, error)
            raise

    @property
    def _store(self) -> Any:
        # not kept: an engine of DeepSpeed's is never collected, and a store has a port
        group: Any = self._ranks.connection.group
        store = dist.PrefixStore("accelfn DeepSpeed", group.get_group_store())
        store.set_timeout(timedelta(seconds=30))
        return store


def _refuse(places: dict[int, str]) -> NoReturn:
    told = ", ".join(f"rank {rank} {places[rank]}" for rank in sorted(places))
    msg = f"Ranks used the model in different ways: {told}. {_ADVICE}"
    raise LossError(msg)


def keep_course(
    zero: Any,
    course: Course,
    names: Mapping[int, str],
    modules: Mapping[nn.Module, str],
    *,
    stay: Callable[[], bool],
    when_all_came: Callable[[], None],
) -> None:
    """Have DeepSpeed's optimizer of stage 3 tell a course what it comes to.

    Args:
        zero: the optimizer.
        course: the course.
        names: of parameters, by their ids.
        modules: what modules are called.
        stay: whether the gradients of a pass stay on their rank.
        when_all_came: is called when all have come, before the last are summed.
    """
    send = zero.reduce_ready_partitions_and_remove_grads
    end = zero.independent_gradient_partition_epilogue
    coordinator = zero.parameter_offload.get_param_coordinator()
    fetch = coordinator.fetch_sub_module

    def come(param: nn.Parameter) -> None:
        if not stay():
            course.come(f"has the gradient of {names[id(param)]!r}")
        send(param)

    def end_on_course() -> None:
        course.come("has ended its backward pass")
        when_all_came()
        end()

    def fetch_on_course(module: nn.Module, *, forward: bool) -> None:
        which = "runs" if forward else "goes back through"
        course.come(f"{which} {modules[module]}")
        fetch(module, forward=forward)

    zero.reduce_ready_partitions_and_remove_grads = come
    zero.independent_gradient_partition_epilogue = end_on_course
    coordinator.fetch_sub_module = fetch_on_course
    for params in zero.fp16_groups:
        for param in params:
            param.all_gather = _gathering(param.all_gather, course, names[id(param)])


def _gathering(gather: Any, course: Course, name: str) -> Any:
    """Return what gathers one parameter, or several; one is taken by name in a loss.

    It is gathered where it was used from then on: this place is in no later course.
    """

    def call(params: Any = None, **options: Any) -> Any:
        if params is None:
            course.compare(f"takes {name!r} by name")
        return gather(params, **options)

    return call

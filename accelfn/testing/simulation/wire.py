# SPDX-License-Identifier: Apache-2.0
"""Wire: what a collective costs on the links between ranks, by how it is carried out.

Each rank has a link of its own, which sends and receives at once. Bytes are those of the
payload. In what follows N is the number of ranks, n what each gives.

| collective | ring | tree | Gloo |
| --- | --- | --- | --- |
| all_reduce | 2 (N-1) rounds of n/N | 2 log2 N rounds of n | as a ring |
| reduce_scatter | N-1 rounds of n/N | as a ring | as an all_reduce; of one tensor, which \
accelfn sends by all_to_all, as a ring |
| all_gather | N-1 rounds of n | as a ring | as a ring |
| broadcast, reduce | in a pipeline: N-1 rounds, n in all | log2 N rounds of n | broadcast as a \
tree; reduce as a reduce_scatter and a gather |
| scatter, gather, all_to_all | N-1 rounds, to each its own | as a ring | as a ring |
"""

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias, get_args

import attrs

from accelfn.errors import ArgumentError
from accelfn.testing.simulation.entries import Entry

Algorithm: TypeAlias = Literal["ring", "tree", "gloo"]


@attrs.frozen(kw_only=True)
class Cost:
    """What one collective asks of the links.

    Attributes:
        num_bytes: what all ranks send together.
        rounds: how often a rank waits for a message before it can go on.
        busiest: the bytes that one after the other cross the link that has most to do.
    """

    num_bytes: int
    rounds: int
    busiest: float


@attrs.frozen(kw_only=True)
class Given:
    """What ranks give to one collective, as far as its cost depends on it.

    Attributes:
        kind: torch's name of the collective.
        ranks: how many take part.
        most: the bytes for others that one rank gives, the most of all.
        total: those of all ranks.
        is_sparse: whether they are those of sparse tensors.
    """

    kind: str
    ranks: int
    most: int
    total: int
    is_sparse: bool = False


def given(entry: Entry) -> Given:
    """Return what ranks gave to a collective of a log."""
    return Given(
        kind=entry.kind,
        ranks=len(entry.ranks),
        most=max(entry.for_others),
        total=sum(entry.for_others),
        is_sparse="sparse" in entry.shapes,
    )


def check_algorithm(call: str, algorithm: object) -> None:
    """Raise unless it is one of those that are known.

    Raises:
        ArgumentError: it is none.
    """
    if algorithm not in get_args(Algorithm):
        known = ", ".join(map(repr, get_args(Algorithm)))
        msg = f"{call}(algorithm={algorithm!r}): expected one of {known}."
        raise ArgumentError(msg)


def cost(what: Given, algorithm: Algorithm) -> Cost:
    """Return what a collective costs."""
    if what.ranks == 1:
        return Cost(num_bytes=0, rounds=0, busiest=0.0)
    kind = what.kind
    if what.is_sparse and kind == "all_reduce":  # ranks tell one another what they have
        kind = "all_gather"
    return _COSTS[algorithm][kind](what)


def _pipelined(what: Given) -> Cost:
    """From rank to rank, part by part."""
    hops, n = what.ranks - 1, what.most
    return Cost(num_bytes=hops * n, rounds=hops, busiest=n)


def _in_a_tree(what: Given) -> Cost:
    """From one rank to two, to four, or back."""
    n, depth = what.most, (what.ranks - 1).bit_length()
    return Cost(num_bytes=(what.ranks - 1) * n, rounds=depth, busiest=depth * n)


def _reduce_scatter(what: Given) -> Cost:
    """Each part once round the ring."""
    hops, n = what.ranks - 1, what.most
    return Cost(num_bytes=hops * n, rounds=hops, busiest=hops * n / what.ranks)


def _twice(once: Callable[[Given], Cost]) -> Callable[[Given], Cost]:
    """To where the sum is made, and back in the same manner."""

    def cost(what: Given) -> Cost:
        there = once(what)
        return Cost(
            num_bytes=2 * there.num_bytes,
            rounds=2 * there.rounds,
            busiest=2 * there.busiest,
        )

    return cost


def _reduce_by_gloo(what: Given) -> Cost:
    """Once round the ring, and from there to the root."""
    ring, n = _reduce_scatter(what), what.most
    gathered = n - n // what.ranks
    return Cost(
        num_bytes=ring.num_bytes + gathered,
        rounds=2 * ring.rounds,
        busiest=2 * ring.busiest,
    )


def _all_gather(what: Given) -> Cost:
    hops = what.ranks - 1
    return Cost(num_bytes=hops * what.total, rounds=hops, busiest=hops * what.most)


def _gather(what: Given) -> Cost:
    return Cost(num_bytes=what.total, rounds=what.ranks - 1, busiest=what.total)


def _to_each_its_own(what: Given) -> Cost:
    return Cost(num_bytes=what.total, rounds=what.ranks - 1, busiest=what.most)


def _message(what: Given) -> Cost:
    return Cost(num_bytes=what.most, rounds=1, busiest=what.most)


_RING: Mapping[str, Callable[[Given], Cost]] = {
    "all_reduce": _twice(_reduce_scatter),
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather,
    "broadcast": _pipelined,
    "reduce": _pipelined,
    "gather": _gather,
    "scatter": _to_each_its_own,
    "all_to_all": _to_each_its_own,
    "all_to_all_single": _to_each_its_own,
    "barrier": _in_a_tree,
    "send": _message,
}
_COSTS: Mapping[Algorithm, Mapping[str, Callable[[Given], Cost]]] = {
    "ring": _RING,
    "tree": {
        **_RING,
        "all_reduce": _twice(_in_a_tree),
        "broadcast": _in_a_tree,
        "reduce": _in_a_tree,
    },
    "gloo": {
        **_RING,
        "reduce_scatter": _twice(_reduce_scatter),
        "broadcast": _in_a_tree,
        "reduce": _reduce_by_gloo,
    },
}

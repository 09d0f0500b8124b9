# SPDX-License-Identifier: Apache-2.0
"""What ranks run under DeepSpeed whose steps are broken off, at the same place on all of them."""

from collections.abc import Sequence

import torch

import accelfn as af
from tests.internals import all_gather_objects
from tests.laws.broken_off import KINDS, Breaking, Place
from tests.ranks.programs_of_zero import Trained, stepped
from tests.states import bits
from tests.strategies import tensors

Part = tuple[float, float, float]
"""Which file of those that a step comes through, which call in it, and which of its times."""


def broken_off(
    world: af.World, trainings: Sequence[Trained], parts: Sequence[Part], kind: str
) -> None:
    """Check that a state is as before and goes on so, or is over, wherever its step raised."""
    torch.set_num_threads(1)
    for each in trainings:
        state = stepped(each, each.state(world), 1)
        expected = bits(tensors(stepped(each, state.copy(), 2)))
        with Breaking(kind=KINDS[kind]) as counted:
            stepped(each, state.copy(), 1)
        common = _common(world, dict(counted.counts))
        for part in parts:
            place, number = _chosen(common, part)
            hit = state.copy()
            before, error = bits(tensors(hit)), None
            breaking = Breaking(place, number, KINDS[kind])
            try:
                with breaking:
                    stepped(each, hit, 1)
            except KINDS[kind] as raised:
                error = raised
            assert (error is None) == (breaking.raised is None), place
            if not hit.lease.is_over:
                assert bits(tensors(hit)) == before, place
                assert bits(tensors(stepped(each, hit, 2))) == expected, place
            assert bits(tensors(stepped(each, state.copy(), 2))) == expected, place
        af.release_engine(state)


def _common(world: af.World, counts: dict[Place, int]) -> dict[Place, int]:
    """Return the calls that all ranks make, and as often."""
    first, *others = all_gather_objects(counts, world, pickle=True)
    return {
        place: number
        for place, number in sorted(first.items())
        if all(each.get(place) == number for each in others)
    }


def _chosen(counts: dict[Place, int], part: Part) -> tuple[Place, int]:
    file, line, which = part
    files = sorted({each[0] for each in counts})
    lines = [each for each in counts if each[0] == files[int(file * len(files))]]
    place = lines[int(line * len(lines))]
    return place, int(which * counts[place])

# SPDX-License-Identifier: Apache-2.0
"""Runs in simulated worlds and alone, for the laws that compare them."""

import attrs
import torch

import accelfn as af
from accelfn.testing import simulate
from tests.internals import Sums
from tests.ranks import programs
from tests.strategies import Run

Found = dict[str, torch.Tensor]
History = tuple[list[Found], list[dict[str, float]]]

DDP = af.chain(af.shard_data(), af.wrap_ddp())


def single() -> af.World:
    """Return the world of one process."""
    return af.World.single(device="cpu")


def trained(
    size: int, run: Run, *setup: object, sums: Sums = "ring"
) -> tuple[History, ...]:
    """Train with a setup on simulated ranks; return each one's states and metrics.

    Sums are taken as a ring takes them: what is bitwise must not depend on the order.
    """
    split = attrs.evolve(run, setup=af.chain(*setup))
    return simulate(size, lambda w: programs.train(w, split), sums=sums).results


def alone(run: Run, *setup: object) -> History:
    """Train with a setup, by default none, in a world of one."""
    return programs.train(single(), attrs.evolve(run, setup=af.chain(*setup)))


def close_means(one: dict[str, float], two: dict[str, float]) -> bool:
    """Whether metrics are equal within 1e-9 of their size, or of 1."""
    return one.keys() == two.keys() and all(
        abs(one[name] - two[name]) <= 1e-9 * max(1.0, abs(one[name])) for name in one
    )


def params(found: Found) -> Found:
    """Return the parameters among a state's tensors."""
    return {path: found[path] for path in found if path.startswith("params.")}


def without_slots(found: Found) -> Found:
    """Return a state's tensors without those of the transforms' slots."""
    return {path: found[path] for path in found if not path.startswith("slots.")}

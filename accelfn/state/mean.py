# SPDX-License-Identifier: Apache-2.0
"""`mean`: metrics over all ranks, the collective that a log line pays for."""

import torch

from accelfn.base.calling import called
from accelfn.collectives import sum_named
from accelfn.collectives.agreed import check_world
from accelfn.errors import ArgumentError
from accelfn.state.metrics import Metrics
from accelfn.world import World


@called
def mean(
    metrics: Metrics, world: World, *, label: str = "mean of metrics"
) -> dict[str, float]:
    """Return the exact mean of each metric over all ranks: the visible collective.

    Totals and weights are added over ranks and divided once, so the result is the mean
    over all that was seen, however uneven the shares. It reads the device, as a log line
    must; a step does not.

    Args:
        metrics: of this rank.
        world: whose ranks saw them; of ranks that share a layer ("tp") one counts.
        label: what the ranks are doing, for errors.

    Cost: one all-reduce of 16 float64 numbers, six of which tell the names; beyond five names
    a second one, of two numbers each.

    Law: on any number of ranks it is the metric of the union of what they saw.

    Raises:
        CollectiveMismatchError: ranks have metrics of other names, or more.
        PeerFailedError: another rank failed.
    """
    if not isinstance(metrics, Metrics):
        msg = f"af.mean: expected Metrics, got {type(metrics).__name__}; add several first."
        raise ArgumentError(msg)
    check_world("af.mean", world)
    if not metrics:
        return {}
    pairs = {name: (each.total, each.weight) for name, each in metrics.sums.items()}
    for name, (total, _) in pairs.items():
        if isinstance(total, torch.Tensor) and total.is_complex():
            msg = (
                f"af.mean: metric {name!r} is {total!r}; expected one real number. Report"
                " .real and .imag of a complex number as two metrics."
            )
            raise ArgumentError(msg)
    sums = sum_named(pairs, world.loss, kind="mean", label=label, what="metrics")
    return {name: total / w if w else 0.0 for name, (total, w) in sums.items()}

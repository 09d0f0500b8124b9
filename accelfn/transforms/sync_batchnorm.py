# SPDX-License-Identifier: Apache-2.0
"""Let batch normalisation see the samples of all ranks."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from accelfn.definition.transform import transform
from accelfn.engine.engine import MakeRunner
from accelfn.engine.module.synced_norm import Share, sync_norms
from accelfn.engine.read_loss import Samples
from accelfn.engine.runner import Delegating, LossFunction, Runner
from accelfn.state.state import TrainState


@transform
class sync_batchnorm:
    """Normalise batches by the mean and variance over the samples of all ranks.

    The BatchNorm layers of the model see the global batch, or under `accumulate` the
    global micro-batch, and so do their running statistics, which are equal on all ranks.
    What an empty share stands in for counts nowhere. It works on CPUs and in simulated
    worlds too, where torch's SyncBatchNorm does not; layers of that class are taken for
    BatchNorm. Modules other than the state's own, such as `af.frozen` teachers, are
    left alone. In a world of 1 it changes nothing.

    Acts on: runner.

    Law:
        However the batch is shared out, parameters and running statistics are those of one
        rank on the whole batch, up to rounding.

    Cost:
        Two small collectives a layer, one forward and one backward, which wait for the
        slowest rank.

    Raises:
        CompositionError: beside `local_sgd`, whose ranks train apart; or a compiler
            that is to trace the loss as one graph.
        ModelError: when built, a BatchNorm layer has a forward or a process group of its own.

    References:
        Ioffe and Szegedy 2015, "Batch Normalization"; Peng et al. 2018, "MegDet".

    Example:
        >>> sync_batchnorm()
        af.sync_batchnorm()
    """

    tells: ClassVar[Mapping[str, Any]] = {"draws_nothing": True}
    refuses: ClassVar[Mapping[str, str]] = {
        "apart": "normalises by what all ranks see, so that each gradient depends on all, but"
        " under {other!r} ranks train apart. Leave out one of the two.",
        "one_graph": "asks the other ranks in the midst of the forward pass, which {other!r}"
        " cannot trace as one graph. Compile with fullgraph=False, or only regions= without"
        " BatchNorm.",
    }

    def runner(self, make: MakeRunner, state: TrainState) -> MakeRunner:
        """Let the layers of the engine's own module ask the other ranks."""
        world = state.world
        if world.size == 1:
            return make

        compiled = "compiles" in state.setup.facts

        def synced(module: nn.Module) -> Runner:
            share = Share()
            sync_norms(module, world, share, f"{self!r}", compiled=compiled)
            return _CountingRunner(make(module), share)

        return synced


class _CountingRunner(Delegating):
    """Tells the layers whether a share counts."""

    def __init__(self, inner: Runner, share: Share) -> None:
        """Take what runs losses, and what the layers look at."""
        super().__init__(inner)
        self._share = share

    def before(self, loss_fn: LossFunction, samples: Samples) -> LossFunction:
        """Return the loss as it is."""
        self._share.counts = samples.known != 0
        return loss_fn

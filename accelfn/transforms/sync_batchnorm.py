# SPDX-License-Identifier: Apache-2.0
"""Let batch normalisation see the samples of all ranks."""

from typing import Any, ClassVar

import attrs
import torch
from torch import nn

from accelfn.engine.engine import MakeRunner
from accelfn.engine.read_loss import ReadLoss, Samples
from accelfn.engine.runner import LossFunction, Runner
from accelfn.engine.synced_norm import Share, sync_norms
from accelfn.loss import Number
from accelfn.state import TrainState
from accelfn.transform import Transform, has_field, transform


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

    _draws: ClassVar[bool] = False

    def runner(self, make: MakeRunner, state: TrainState) -> MakeRunner:
        """Let the layers of the engine's own module ask the other ranks."""
        world = state.world
        if world.size == 1:
            return make

        compiled = any(hasattr(each, "fullgraph") for each in state.setup)

        def synced(module: nn.Module) -> Runner:
            share = Share()
            sync_norms(module, world, share, f"{self!r}", compiled=compiled)
            return _CountingRunner(make(module), share)

        return synced

    def _refuse(self, others: tuple[Transform, ...]) -> str | None:
        """Refuse what would make statistics, or their gradients, mean something else."""
        for other in others:
            if has_field(other, "reduce") and getattr(other, "reduce", None) is None:
                return (
                    "normalises by what all ranks see, so that each gradient depends on"
                    f" all, but under {other!r} ranks train apart. Leave out one of the two."
                )
            if getattr(other, "fullgraph", False) and other.regions is None:  # type: ignore[attr-defined]
                return (
                    "asks the other ranks in the midst of the forward pass, which"
                    f" {other!r} cannot trace as one graph. Compile with fullgraph=False,"
                    " or only regions= without BatchNorm."
                )
        return None


@attrs.frozen
class _CountingRunner:
    """Tells the layers whether a share counts."""

    inner: Runner
    share: Share

    @property
    def reduces(self) -> bool:
        return self.inner.reduces

    @property
    def expects_unused(self) -> bool:
        return self.inner.expects_unused

    def forward(
        self,
        loss_fn: LossFunction,
        extras: tuple[Any, ...],
        samples: Samples,
        *,
        sync: bool,
    ) -> ReadLoss:
        self.share.counts = samples.known != 0
        return self.inner.forward(loss_fn, extras, samples, sync=sync)

    def backward(
        self, scalar: torch.Tensor, scale: Number | None, weight: Number
    ) -> torch.Tensor | None:
        return self.inner.backward(scalar, scale, weight)

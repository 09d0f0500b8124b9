# SPDX-License-Identifier: Apache-2.0
"""Let batch normalisation see the samples of all ranks."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from accelfn.base.advice import advise
from accelfn.definition.transform import transform
from accelfn.engine.module.synced_norm import BatchNorm, sync_norms
from accelfn.state.state import TrainState


@transform
class sync_batchnorm:
    """Normalise batches by the mean and variance over the samples of all ranks.

    The BatchNorm layers of the model see the global batch, or under `accumulate` the
    global micro-batch, and so do their running statistics, which are equal on all ranks.
    What an empty share stands in for counts nowhere. It works on CPUs and in simulated
    worlds too, where torch's SyncBatchNorm does not; layers of that class are taken for
    BatchNorm, and a model that has neither is warned of. Modules other than the state's
    own, such as `af.frozen` teachers, are left alone. In a world of 1 it changes nothing.

    Acts on: module.

    Law:
        However the batch is shared out, parameters and running statistics are those of one
        rank on the whole batch, up to rounding.

    Cost:
        Two small collectives a layer, one forward and one backward, which wait for the
        slowest rank; and an all-gather of 24 bytes a forward pass, to compare which layers
        ranks ran. Under wrap_fsdp each small collective has one of these.

    Raises:
        CollectiveMismatchError: at a step, ranks ran different layers, or in another order.
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

    def module(self, module: nn.Module, state: TrainState) -> nn.Module:
        """Let the layers of the engine's own module ask the other ranks."""
        ranks = state.world.loss
        has_layers = any(isinstance(each, BatchNorm) for each in module.modules())
        if not has_layers and state.world.is_main:
            advise(
                f"{self!r} has nothing to do: the model has none of torch's BatchNorm layers,"
                " and others are not known by it. Leave it out, or use torch's."
            )
        if ranks.size > 1:
            compiled = "compiles" in state.setup.facts
            sync_norms(module, ranks, f"{self!r}", compiled=compiled)
        return module

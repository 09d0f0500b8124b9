# SPDX-License-Identifier: Apache-2.0
"""Train replicas on every rank with torch's DistributedDataParallel."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias, cast

import attrs
import torch
from torch import nn

from accelfn.base.arguments import (
    advise,
    integer,
    is_integer,
    is_number,
    one_of,
    option,
    satisfies,
    truth,
)
from accelfn.collectives import check_values
from accelfn.data import Plan
from accelfn.definition.transform import transform
from accelfn.engine.ddp import Compression, DDPRunner, LowRank, Narrow
from accelfn.engine.engine import Engine, build_engine
from accelfn.engine.modules import BatchNorm, sync_norms
from accelfn.engine.optimizer import LiveUpdate
from accelfn.engine.runner import binding_of
from accelfn.errors import ArgumentError
from accelfn.state.state import TrainState
from accelfn.state.update import Update
from accelfn.world import World
from accelfn.world.axes import BATCH

_FIRST_BUCKET_MB = 1
"""torch's default. torch.compile splits graphs at buckets of at least this size."""


_is_positive = satisfies(
    lambda value: value is None or (is_number(value) and value > 0),
    "a positive number of MiB",
)
_is_axis = satisfies(
    lambda value: value is None or value in BATCH,
    "an axis along which ranks have different samples,"
    f" {' or '.join(map(repr, BATCH))}",
)


@transform
class wrap_ddp:
    """Train a replica on each rank with torch's DistributedDataParallel.

    DDP wraps a module that computes the loss, in the world's process group. The weights of the
    ranks' losses are reduced with the gradients, so the result is the mean over all samples (or
    tokens) of the update, even if the ranks' shares differ in size. In a world of 1 nothing
    changes.

    With `within` and `local_sgd`, the ranks along an axis form one worker: they average
    gradients and stay equal, and the workers train independently.

    Acts on: engine.

    Args:
        bucket_cap_mb: size of DDP's buckets in MiB; None is torch's own choice, 25 after a
            first one of 1.
        gradient_as_bucket_view: let gradients be views into the buckets, which halves their
        memory and saves a copy. On by default here; off in torch.
        find_unused_parameters: allow parameters that take no part in the loss.
        static_graph: promise the same graph at every step, so that DDP learns it once.
        forward_sync_buffers: broadcast rank 0's buffers before each forward pass (torch's
        `broadcast_buffers`).
        within: the axis of the world along which gradients are averaged, such as "dp_shard";
        None means all ranks. `local_sgd`, or another transform with `reduce = None`, then
        synchronizes the workers along the other axis.

    Law:
        After every update all ranks hold bitwise the same parameters, and they equal those of
        one process on the whole batch, up to rounding. With `within` this holds within a
        worker, and a worker of n ranks acts as one rank with the samples of n.

    Cost:
        One all-reduce of the gradients per update, overlapped with the backward pass; with
        `within`, only within a worker.

    Raises:
        CompositionError: with a transform that defines `reduce`, such as `local_sgd` without
        `within`; `static_graph` with a transform that runs several backward passes; when
        applied, `within` without a transform that synchronizes the workers.
        WorldError: when applied, `within` names an axis that the world does not have.
        ReplicaMismatchError: when built, the ranks hold different models.
        UnusedParametersError: at a step, a parameter took no part in the loss.

    References:
        Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel
        Training".

    Example:
        >>> wrap_ddp(bucket_cap_mb=10)
        af.wrap_ddp(bucket_cap_mb=10)
    """

    bucket_cap_mb: float | None = option(None, _is_positive)
    gradient_as_bucket_view: bool = option(default=True, validator=truth())
    find_unused_parameters: bool = option(default=False, validator=truth())
    static_graph: bool = option(default=False, validator=truth())
    forward_sync_buffers: bool = option(default=True, validator=truth())
    within: str | None = option(None, _is_axis)

    def __attrs_post_init__(self) -> None:
        """Reject two ways of finding unused parameters: torch drops one of them."""
        if self.static_graph and self.find_unused_parameters:
            msg = (
                "af.wrap_ddp(static_graph=True, find_unused_parameters=True): a static graph"
                " finds unused parameters itself, in the first step. Give one of the two."
            )
            raise ArgumentError(msg)

    @property
    def tells(self) -> Mapping[str, Any]:
        """Facts about the buckets, and whether unused parameters are allowed."""
        cap, unused = self.bucket_cap_mb, ("find_unused_parameters", "static_graph")
        return {
            "buckets": True,
            "within": self.within,
            "small_buckets": cap is not None and cap < _FIRST_BUCKET_MB,
            "finds_unused": next(
                (f"{n}=True" for n in unused if getattr(self, n)), None
            ),
        }

    @property
    def refuses(self) -> Mapping[str, str]:
        """Transforms that break torch's DDP or leave it without work."""
        refused = {
            "reduce": "would never reduce a gradient: {other!r} says how they cross ranks."
            " Leave out one of the two.",
        }
        if self.within is None:
            refused["stays"] = (
                "would never reduce a gradient: under {other!r} each rank keeps its own."
                " Leave out one of the two, or say along which axis ranks are one worker,"
                ' as within="dp_shard".'
            )
        if self.static_graph:
            refused["value_and_grad"] = (
                "expects one backward pass an update, but {other!r} runs several."
                " Leave out static_graph=True."
            )
        return refused

    @property
    def needs(self) -> Mapping[str, str]:
        """With `within`: a transform that synchronizes the workers."""
        if self.within is None:
            return {}
        return {
            "stays": "lets workers train apart, and nothing brings them together. Add"
            " af.local_sgd(sync_every=...), or leave out within=."
        }

    def engine(self, state: TrainState) -> Engine:
        """Build DistributedDataParallel around the state's tensors."""
        ranks = state.definition.copy
        own = ("name", "within")
        options = attrs.asdict(self, filter=lambda field, _: field.name not in own)
        (made,) = state.setup.facts.get("compression", (None,))
        compression = None if made is None else made(state)

        def make(module: nn.Module, live: LiveUpdate | None) -> DDPRunner:
            return DDPRunner(module, ranks, options, compression, live)

        return build_engine(state, binding_of(state), make, compression=compression)


# `compress`: reduce gradients in fewer bytes.


Slot: TypeAlias = dict[str, Any]

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_POWERSGD = "powersgd"
_DEFAULTS: Mapping[str, float] = {
    "matrix_approximation_rank": 1,
    "start_powerSGD_iter": 1000,
    "min_compression_rate": 2.0,
}


def _of_powersgd(least: float) -> Any:
    """Return an option of PowerSGD, a number of at least `least`."""

    def check(owner: Any, field: Any, value: Any) -> None:
        if value is None:
            return
        if owner.method != _POWERSGD:
            msg = (
                f"af.compress({owner.method!r}, {field.name}={value!r}): only 'powersgd'"
                " has this option. Leave it out."
            )
            raise ArgumentError(msg)
        whole = isinstance(_DEFAULTS[field.name], int)
        is_kind = is_integer if whole else is_number
        if not is_kind(value) or not value >= least:
            what = "an integer" if whole else "a number"
            msg = f"af.compress({field.name}={value!r}): expected {what} of at least {least}."
            raise ArgumentError(msg)

    return attrs.field(default=None, validator=check, kw_only=True)


@transform
class compress:
    """Let `wrap_ddp` reduce gradients in fewer bytes, by a communication hook of DDP.

    "fp16" and "bf16" sum gradients in 16 bits; parameters and the optimizer keep their dtype.
    Gradients are first divided by the update's weight, or the next power of 2, so a total over
    many samples does not overflow before the mean would; under a loss scale
    (`autocast("fp16")`) they keep that scale. "powersgd" sends a matrix as the product of two
    thin ones; each rank adds its approximation error to its next gradient. The errors are in
    the slot: they are saved, and a skipped update does not change them. The weight of the
    losses is summed exactly. `af.sync_grads` does not compress.

    Acts on: the reduction of `wrap_ddp`; with "powersgd" also init, merge.

    Args:
        method: "fp16", "bf16" or "powersgd".
        matrix_approximation_rank: the number of columns of the thin matrices; 1.
        start_powerSGD_iter: the number of first updates without compression; 1000.
        min_compression_rate: compress only matrices that become smaller by more than this
        factor; 2. Vectors are not compressed.

    Law:
        Ranks agree bitwise, and in a world of 1 nothing changes. In 16 bits the result is the
        uncompressed one, up to 16-bit rounding. With PowerSGD the applied gradients plus the
        remaining errors sum to the true gradients; at full rank there is no error.

    Cost:
        Half the bytes, and a pass over the gradients. PowerSGD sends (n + m) r numbers for an n
        by m matrix, computes two matrix products and two decompositions, needs the memory of
        one more gradient, and does not overlap with the backward pass. Every method all-reduces
        one more number before the backward pass.

    Raises:
        ArgumentError: an unknown method, or an option of another method.
        CompositionError: without `wrap_ddp`; or PowerSGD with parameters that may be unused,
        because their errors would be lost.

    References:
        Vogels et al. 2019, "PowerSGD: Practical Low-Rank Gradient Compression for
        Distributed Optimization".

    Example:
        >>> compress("powersgd", matrix_approximation_rank=2)
        af.compress('powersgd', matrix_approximation_rank=2)
    """

    needs: ClassVar[Mapping[str, str]] = {
        "buckets": "is about gradients that af.wrap_ddp() reduces, which the setup lacks. Put"
        " af.wrap_ddp() into the chain, or leave it out."
    }
    method: str = attrs.field(validator=one_of(*_DTYPES, _POWERSGD))
    matrix_approximation_rank: int | None = _of_powersgd(1)
    start_powerSGD_iter: int | None = _of_powersgd(0)  # noqa: N815 - torch's name
    min_compression_rate: float | None = _of_powersgd(0)

    @property
    def tells(self) -> Mapping[str, Any]:
        """How buckets are reduced, and which slot entries differ by rank."""
        return {
            "draws_nothing": True,
            "compression": self._compression,
            "by_rank": ("error",) if self.method == _POWERSGD else (),
        }

    @property
    def gives_up(self) -> Mapping[str, str]:
        """PowerSGD applies a part of each gradient later."""
        late = {
            "splits_alike": "what is left out of a gradient is added to a later one"
        }
        return late if self.method == _POWERSGD else {}

    @property
    def refuses(self) -> Mapping[str, str]:
        """Setups in which PowerSGD would lose errors."""
        if self.method != _POWERSGD:
            return {}
        return {
            "finds_unused": "keeps what is left out of a gradient for the next update, and"
            " would lose that of parameters that {other!r} allows to be unused. Leave out"
            " {told}.",
        }

    @property
    def without(self) -> tuple[str, ...]:
        """Skip `init` and `merge` for sums in 16 bits: they have no slot."""
        return () if self.method == _POWERSGD else ("init", "merge")

    def _option(self, name: str) -> Any:
        given = getattr(self, name)
        return _DEFAULTS[name] if given is None else given

    def init(self, state: TrainState) -> Slot:
        """Begin without errors."""
        del state
        return {"iter": 0, "error": {}, "q": {}}

    def merge(self, slots: Sequence[Slot], _: World) -> tuple[list[float], Slot]:
        """Give every rank the mean of the errors, which keeps their mean."""
        first, count = slots[0], len(slots)
        errors = {
            name: torch.stack([slot["error"][name] for slot in slots]).sum(0) / count
            for name in first["error"]
        }
        return [1.0] * count, {**first, "error": errors}

    def _compression(self, state: TrainState) -> Compression:
        """Return the compression of one engine's gradients."""
        name: str = cast("Any", self).name
        ranks = state.definition.copy
        if self.method != _POWERSGD:
            return Narrow(name, _DTYPES[self.method], ranks)
        return LowRank(
            name,
            state.name,
            ranks,
            rank=self._option("matrix_approximation_rank"),
            start=self._option("start_powerSGD_iter"),
            rate=self._option("min_compression_rate"),
        )


# `sync_batchnorm`: batch normalization over all ranks.


@transform
class sync_batchnorm:
    """Normalize batches by mean and variance over the samples of all ranks.

    The BatchNorm layers of the model see the global batch, or under `accumulate` the
    global micro-batch, and so do their running statistics, which are equal on all ranks.
    The placeholder sample of an empty share does not count. It also works on CPUs and in
    simulated worlds, where torch's SyncBatchNorm does not; SyncBatchNorm layers are treated as
    BatchNorm, and a model with neither gets a warning. Modules other than the state's own, such
    as `af.frozen` teachers, do not change. In a world of 1 nothing changes.

    Acts on: module.

    Law:
        For any split of the batch, parameters and running statistics are those of one rank on
        the whole batch, up to rounding.

    Cost:
        Two small collectives per layer, one forward and one backward, which wait for the
        slowest rank; and an all-gather of 24 bytes per forward pass, to compare which layers
        ranks ran (under wrap_fsdp, one per small collective).

    Raises:
        CollectiveMismatchError: at a step, ranks ran different layers, or in another order.
        CompositionError: with `local_sgd`, because its ranks train independently; or with a
        compiler that traces the loss as one graph.
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
        """Synchronize the BatchNorm layers of the engine's module over ranks."""
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


# `shard_data`: split every batch over the ranks.


@transform
class shard_data:
    """Give each rank its share of every batch.

    The global batch is cut into contiguous shares before any sample is read; their sizes differ
    by at most one. A short last batch is cut the same way. A rank with an empty share takes
    part with one sample of weight 0.

    Acts on: data.

    Law:
        The order of samples, and with `wrap_ddp` the result of a step, do not depend on the
        number of ranks (up to rounding, and except for batch statistics).

    Cost:
        Arithmetic on two integers per batch.

    Example:
        >>> shard_data()
        af.shard_data()
    """

    def data(self, plan: Plan) -> Plan:
        """Cut a batch into one share per rank."""
        return plan.sharded()


# `check_replicas`: compare the ranks' parameters every few updates.


_ADVICE = (
    "They were trained alike and have drifted apart. Look for what differs by rank in"
    " transforms and steps of your own, for parameters that are written outside of a step,"
    " and for operations that are not deterministic."
)


@transform
class check_replicas:
    """Raise on all ranks when their parameters differ, checked every few updates.

    It checks after each update number that is a multiple of `every`, before the new state is
    returned. Buffers are not compared: batch statistics differ by rank. For a split model, it
    compares the copies of the model, if there are several. If ranks differ on purpose, as under
    `local_sgd`, it raises.

    Acts on: after_update.

    Args:
        every: the number of updates between checks.

    Law:
        If one element of one parameter differs on one rank, all ranks raise at the next check.
        Otherwise training is bitwise unchanged.

    Cost:
        A sum over every parameter and a small all-reduce every `every` updates; the host waits
        for the result.

    Raises:
        ReplicaMismatchError: names the first parameter that differs, with one row per rank.

    Example:
        >>> check_replicas(every=100)
        af.check_replicas(every=100)
    """

    tells: ClassVar[Mapping[str, Any]] = {"draws_nothing": True}
    refuses: ClassVar[Mapping[str, str]] = {
        "apart": "would raise beside {other!r}, under which ranks differ on purpose."
        " Leave it out; af.assert_replicas_agree(state) looks once."
    }
    every: int = attrs.field(validator=integer(1, "a number of updates"), kw_only=True)

    def after_update(
        self, state: TrainState, slot: None, update: Update
    ) -> tuple[TrainState, None]:
        """Compare parameters, if a check is due."""
        if state.step % self.every == 0:
            label = f"check_replicas at update {state.step}"
            check_values(state.params, state.world, label=label, advice=_ADVICE)
        return state, slot

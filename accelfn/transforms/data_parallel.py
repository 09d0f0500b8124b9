# SPDX-License-Identifier: Apache-2.0
"""Data parallelism: split the data, and replicate the model or split it over the ranks."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, cast

import attrs
import torch
import torch.distributed as dist
from torch import nn

from accelfn.base.arguments import (
    advise,
    integer,
    mebibytes,
    number,
    one_of,
    option,
    option_of,
    satisfies,
    truth,
    value_of,
)
from accelfn.base.system import check_new
from accelfn.collectives.replicas import check_values
from accelfn.data import Plan
from accelfn.definition.transform import facts_of, transform
from accelfn.engine.ddp import Compression, DDPRunner, LowRank, Narrow
from accelfn.engine.engine import Engine, build_engine
from accelfn.engine.modules import BatchNorm, Regions, are_regions, sync_norms
from accelfn.engine.optimizer import LiveUpdate, check_elements
from accelfn.engine.runner import Runner, binding_of
from accelfn.errors import ArgumentError, CompositionError, WorldError
from accelfn.state.state import TrainState
from accelfn.state.update import Update
from accelfn.world import World
from accelfn.world.axes import BATCH, fold_cp

_FIRST_BUCKET_MB = 1
"""torch's size of the first bucket. torch.compile needs buckets of at least this size."""


_is_axis = satisfies(
    lambda value: value is None or value in BATCH,
    f"an axis along which ranks have different samples, {' or '.join(map(repr, BATCH))}",
)


@transform
class wrap_ddp:
    """Train a replica on each rank with torch's DistributedDataParallel.

    DDP wraps a module that computes the loss, and uses the world's process group. The weights
    of the ranks' losses are reduced together with the gradients. So the result is the mean over
    all samples (or tokens) of the update, even if the ranks' shares differ in size. In a world
    of 1 nothing changes.

    With `within` and `local_sgd`, the ranks along an axis are one worker. They average their
    gradients and stay equal, and the workers train independently.

    Acts on: engine.

    Args:
        bucket_cap_mb: the size of DDP's buckets in MiB; with None, torch's default of 1 for
        the first bucket and 25 for the others.
        gradient_as_bucket_view: make gradients views into the buckets, which halves their
        memory and saves a copy. The default here is True, in torch it is False.
        find_unused_parameters: allow parameters that take no part in the loss.
        static_graph: promise that the graph is the same at every step, so that DDP records it
        only once.
        forward_sync_buffers: broadcast rank 0's buffers before each forward pass (torch's
        `broadcast_buffers`).
        within: the axis of the world along which gradients are averaged, such as "dp_shard";
        None means all ranks. `local_sgd`, or another transform with `reduce = None`, then
        synchronizes the workers along the other axis.

    Law:
        After every update all ranks hold bitwise equal parameters. They equal those of one
        process on the whole batch, up to rounding. With `within` this is true for the ranks of
        one worker, and a worker of n ranks trains like one rank with the samples of all n.

    Cost:
        One all-reduce of the gradients per update, which overlaps with the backward pass; with
        `within`, only over the ranks of a worker.

    Raises:
        CompositionError: with a transform that defines `reduce`, such as `local_sgd` without
        `within`; with `static_graph`, a transform that runs several backward passes; when
        applied, `within` without a transform that synchronizes the workers.
        WorldError: when applied, `within` names an axis that the world does not have.
        ReplicaMismatchError: when the engine is built, the ranks hold different models.
        UnusedParametersError: at a step, a parameter took no part in the loss.

    References:
        Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel
        Training".

    Example:
        >>> wrap_ddp(bucket_cap_mb=10)
        af.wrap_ddp(bucket_cap_mb=10)
    """

    bucket_cap_mb: float | None = option(None, attrs.validators.optional(mebibytes()))
    gradient_as_bucket_view: bool = option(default=True, validator=truth())
    find_unused_parameters: bool = option(default=False, validator=truth())
    static_graph: bool = option(default=False, validator=truth())
    forward_sync_buffers: bool = option(default=True, validator=truth())
    within: str | None = option(None, _is_axis)

    def __attrs_post_init__(self) -> None:
        """Raise if both ways to find unused parameters are on: torch ignores one of them."""
        if self.static_graph and self.find_unused_parameters:
            msg = (
                "af.wrap_ddp(static_graph=True, find_unused_parameters=True): with a static graph,"
                " DDP already finds unused parameters in the first step. Pass only one of the two."
            )
            raise ArgumentError(msg)

    @property
    def tells(self) -> Mapping[str, Any]:
        """Tell other transforms about the buckets, and whether parameters may be unused."""
        cap, flags = self.bucket_cap_mb, ("find_unused_parameters", "static_graph")
        return {
            "buckets": True,
            "within": self.within,
            "small_buckets": cap is not None and cap < _FIRST_BUCKET_MB,
            "finds_unused": next(
                (f"{n}=True" for n in flags if getattr(self, n)), None
            ),
        }

    @property
    def refuses(self) -> Mapping[str, str]:
        """Reject transforms that break torch's DDP, or leave it no gradients to reduce."""
        reasons = {
            "reduce": "would have no gradients to reduce, because {other!r} reduces them."
            " Leave out one of the two."
        }
        if self.within is None:
            reasons["stays"] = (
                "would have no gradients to reduce, because under {other!r} each rank keeps"
                " its own. Leave out af.wrap_ddp(). Or reduce gradients within groups of ranks,"
                ' with the axis of a group: af.wrap_ddp(within="dp_shard").'
            )
        if self.static_graph:
            reasons["value_and_grad"] = (
                "expects one backward pass per update, but {other!r} runs several. Leave out"
                " static_graph=True."
            )
        return reasons

    @property
    def needs(self) -> Mapping[str, str]:
        """With `within`, require a transform that synchronizes the workers."""
        if self.within is None:
            return {}
        return {
            "stays": "reduces gradients only within each worker, and no transform synchronizes the"
            " workers. Add af.local_sgd(sync_every=...) to the setup, or leave out within=."
        }

    def engine(self, state: TrainState) -> Engine:
        """Build DistributedDataParallel around the state's tensors."""
        ranks = state.definition.copy
        fields = ("name", "within")
        options = attrs.asdict(self, filter=lambda field, _: field.name not in fields)
        (factory,) = state.setup.facts.get("compression", (None,))
        compression = None if factory is None else factory(state)

        def make(module: nn.Module, live: LiveUpdate | None) -> DDPRunner:
            return DDPRunner(module, ranks, options, compression, live)

        return build_engine(state, binding_of(state), make, compression=compression)


# `compress_grads`: reduce gradients with fewer bytes.


Slot: TypeAlias = dict[str, Any]

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_POWERSGD = "powersgd"


_is_rate = number(lambda rate: rate >= 0, "a number of at least 0")


@transform
class compress_grads:
    """Let `wrap_ddp` reduce gradients with fewer bytes, by a communication hook of DDP.

    "fp16" and "bf16" sum gradients in 16 bits; parameters and the optimizer keep their dtype.
    Gradients are first divided by a power of 2 near the update's weight, so that a total over
    many samples does not overflow. Under a loss scale (`autocast("fp16")`) they keep that scale
    instead. "powersgd" sends each matrix as the product of two thin matrices. Each rank adds
    the error of this approximation to its next gradient. The errors are in the slot: they are
    saved, and a skipped update does not change them. The weight of the losses is always summed
    exactly. `af.sync_grads` does not compress.

    Acts on: the reduction of `wrap_ddp`; with "powersgd" also init, merge.

    Args:
        method: "fp16", "bf16" or "powersgd".
        matrix_approximation_rank: the number of columns of the thin matrices; 1.
        start_powerSGD_iter: the number of updates before compression starts; 1000.
        min_compression_rate: compress only matrices that become smaller by more than this
        factor; 2. Vectors are not compressed.

    Law:
        Ranks have bitwise equal gradients, and in a world of 1 nothing changes. In 16 bits the
        result equals the uncompressed one, up to 16-bit rounding. With PowerSGD the applied
        gradients plus the remaining errors sum to the true gradients; at full rank there is no
        error.

    Cost:
        Half the bytes, and one pass over the gradients. PowerSGD sends (n + m) r numbers for
        an n by m matrix, and computes two matrix products and two decompositions. It needs
        memory for one more gradient, and does not overlap with the backward pass. Every
        method all-reduces one more number before the backward pass.

    Raises:
        ArgumentError: the method is unknown, or an option belongs to another method.
        CompositionError: the setup has no `wrap_ddp`; or PowerSGD is used with parameters that
        may be unused, because their errors would be lost.

    References:
        Vogels et al. 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
        Optimization".

    Example:
        >>> compress_grads("powersgd", matrix_approximation_rank=2)
        af.compress_grads('powersgd', matrix_approximation_rank=2)
    """

    needs: ClassVar[Mapping[str, str]] = {
        "buckets": "compresses the gradients that af.wrap_ddp() reduces, but the setup has no"
        " af.wrap_ddp(). Add af.wrap_ddp() to the setup, or leave this transform out."
    }
    method: Literal["fp16", "bf16", "powersgd"] = attrs.field(
        validator=one_of(*_DTYPES, _POWERSGD)
    )
    matrix_approximation_rank: int | None = option_of(
        "method", _POWERSGD, integer(1), 1
    )
    start_powerSGD_iter: int | None = option_of(  # noqa: N815 - torch's name
        "method", _POWERSGD, integer(0), 1000
    )
    min_compression_rate: float | None = option_of("method", _POWERSGD, _is_rate, 2.0)

    @property
    def tells(self) -> Mapping[str, Any]:
        """Tell other transforms how buckets are reduced, and which slot entries differ by rank."""
        return {
            "draws_nothing": True,
            "compression": self._compression,
            "by_rank": ("error",) if self.method == _POWERSGD else (),
        }

    @property
    def gives_up(self) -> Mapping[str, str]:
        """Name the law that PowerSGD violates: some of each gradient is applied later."""
        late = {
            "splits_alike": "the compression error of a gradient is added to a later gradient"
        }
        return late if self.method == _POWERSGD else {}

    @property
    def refuses(self) -> Mapping[str, str]:
        """Reject setups that would let PowerSGD lose errors."""
        if self.method != _POWERSGD:
            return {}
        return {
            "finds_unused": "adds the compression error of each gradient to the next one, and"
            " would lose the errors of parameters that {other!r} allows to be unused. Leave"
            " out {told}."
        }

    @property
    def without(self) -> tuple[str, ...]:
        """Leave out `init` and `merge` for sums in 16 bits, which have no slot."""
        return () if self.method == _POWERSGD else ("init", "merge")

    def init(self, state: TrainState) -> Slot:
        """Create the slot; no approximation error is kept yet."""
        del state
        return {"iter": 0, "error": {}, "q": {}}

    def merge(self, slots: Sequence[Slot], _: World) -> tuple[list[float], Slot]:
        """Return a slot with the mean of the ranks' errors, so that no error is lost."""
        first, count = slots[0], len(slots)
        errors = {
            name: torch.stack([slot["error"][name] for slot in slots]).sum(0) / count
            for name in first["error"]
        }
        return [1.0] * count, {**first, "error": errors}

    def _compression(self, state: TrainState) -> Compression:
        """Return the object that compresses one engine's gradients."""
        name: str = cast("Any", self).name
        ranks = state.definition.copy
        if self.method != _POWERSGD:
            return Narrow(name, _DTYPES[self.method], ranks)
        return LowRank(
            name,
            state.name,
            ranks,
            rank=value_of(self, "matrix_approximation_rank"),
            start=value_of(self, "start_powerSGD_iter"),
            rate=value_of(self, "min_compression_rate"),
        )


# `sync_batchnorm`: batch normalization over all ranks.


@transform
class sync_batchnorm:
    """Normalize batches by mean and variance over the samples of all ranks.

    The BatchNorm layers of the model use the global batch, or under `accumulate` the global
    micro-batch. So do their running statistics, which are equal on all ranks. The filler sample
    of an empty share does not count. This also works on CPUs and in simulated worlds, where
    torch's SyncBatchNorm does not work. SyncBatchNorm layers are treated like BatchNorm. If the
    model has neither, a warning is shown. Other models, such as a teacher of
    `af.snapshot_model`, do not change. In a world of 1 nothing changes.

    Acts on: module.

    Law:
        For any split of the batch, parameters and running statistics equal those of one rank
        with the whole batch, up to rounding.

    Cost:
        Two small collectives per layer, one in the forward and one in the backward pass, which
        wait for the slowest rank. Also an all-gather of 24 bytes per forward pass, to compare
        which layers the ranks ran (under wrap_fsdp, one all-gather per small collective).

    Raises:
        CollectiveMismatchError: at a step, ranks ran different layers, or ran them in different
        orders.
        CompositionError: with `local_sgd`, because its ranks train independently; or with a
        compiler that traces the loss as one graph.
        ModelError: when the engine is built, a BatchNorm layer has a custom forward or its own
        process group.

    References:
        Ioffe and Szegedy 2015, "Batch Normalization"; Peng et al. 2018, "MegDet".

    Example:
        >>> sync_batchnorm()
        af.sync_batchnorm()
    """

    tells: ClassVar[Mapping[str, Any]] = {"draws_nothing": True}
    refuses: ClassVar[Mapping[str, str]] = {
        "apart": "normalizes over the samples of all ranks, so each gradient depends on all"
        " ranks, but under {other!r} ranks train independently. Leave out one of the two.",
        "one_graph": "runs collectives in the forward pass, which {other!r} cannot trace as"
        " one graph. Pass fullgraph=False, or regions= without BatchNorm layers.",
    }

    def module(self, module: nn.Module, state: TrainState) -> nn.Module:
        """Synchronize the BatchNorm layers of the engine's module over ranks."""
        ranks = state.world.loss
        has_layers = any(isinstance(m, BatchNorm) for m in module.modules())
        if not has_layers and state.world.is_main:
            advise(
                f"{self!r} has no effect: the model has no BatchNorm layer of torch, and other"
                " classes are not supported. Leave this transform out, or use torch's"
                " BatchNorm layers."
            )
        if ranks.size > 1:
            compiles = "compiles" in state.setup.facts
            sync_norms(module, ranks, f"{self!r}", compiles=compiles)
        return module


# `shard_data`: split every batch over the ranks.


@transform
class shard_data:
    """Give each rank its share of every batch.

    The global batch is cut into contiguous shares before any sample is read. Their sizes differ
    by at most one sample. A short last batch is cut in the same way. A rank with an empty share
    still takes part, with one filler sample of weight 0.

    Acts on: data.

    Law:
        The order of samples does not depend on the number of ranks. With `wrap_ddp`, the result
        of a step does not depend on this number either, up to rounding and except for batch
        statistics.

    Cost:
        Arithmetic on two integers per batch.

    Example:
        >>> shard_data()
        af.shard_data()
    """

    def data(self, plan: Plan) -> Plan:
        """Split a batch into one share per rank."""
        return plan.sharded()


# `check_replicas`: compare the ranks' parameters every few updates.


_ADVICE = (
    "They were equal before. Look for transforms or steps of yours that depend on the rank,"
    " for writes to parameters outside a step, and for nondeterministic operations."
)


@transform
class check_replicas:
    """Raise on all ranks if their parameters differ, checked every few updates.

    The check runs after each update whose number is a multiple of `every`, before the step
    returns the new state. Buffers are not compared, because batch statistics differ between
    ranks. If the model is split and there are several copies, the copies are compared. Do not
    use it if ranks differ on purpose, as under `local_sgd`: that raises an error.

    Acts on: after_update.

    Args:
        every: the number of updates between checks.

    Law:
        If one element of one parameter differs on one rank, all ranks raise an error at the
        next check. Otherwise training is bitwise unchanged.

    Cost:
        Every `every` updates, a sum over every parameter and a small all-reduce; the host waits
        for the result.

    Raises:
        ReplicaMismatchError: the ranks differ. The error names the first parameter that
        differs, with one row per rank.

    Example:
        >>> check_replicas(every=100)
        af.check_replicas(every=100)
    """

    tells: ClassVar[Mapping[str, Any]] = {"draws_nothing": True}
    refuses: ClassVar[Mapping[str, str]] = {
        "apart": "would always raise an error, because under {other!r} ranks differ on"
        " purpose. Leave it out. To compare ranks once, call af.assert_replicas_agree(state)."
    }
    every: int = attrs.field(validator=integer(1, "a number of updates"), kw_only=True)

    def after_update(
        self, state: TrainState, slot: None, update: Update
    ) -> tuple[TrainState, None]:
        """Compare the ranks' parameters, if a check is due."""
        if state.step % self.every == 0:
            label = f"check_replicas at update {state.step}"
            check_values(state.params, state.world, label=label, advice=_ADVICE)
        return state, slot


# `wrap_fsdp`: shard the model over the ranks with torch's fully_shard.


_is_dtype = satisfies(
    lambda value: (
        value is None or (isinstance(value, torch.dtype) and value.is_floating_point)
    ),
    "a floating-point dtype, such as torch.bfloat16, or None for the dtype of the parameters",
)


@transform
class wrap_fsdp:
    """Shard the model over the ranks with torch's `fully_shard` (FSDP2).

    Each rank holds some rows of every parameter, and the same rows of its gradient, its
    optimizer state and its slots of the same shape. torch's `fully_shard` runs a module that
    computes the loss. It gathers a unit before its forward pass, reshards it afterwards,
    gathers it again for its backward pass, and then reduce-scatters its gradients. The root
    (all parameters outside units) is gathered once for the whole loss. The weights of the
    ranks' losses are summed with the gradients. So the result is the mean over all samples (or
    tokens) of the update, even if the ranks' shares differ in size. In a world of 1 nothing
    changes.

    In a world without axes, all ranks together hold one copy of the model. With
    {"dp_replicate": m, "dp_shard": n} there are m copies, each over n neighboring ranks (HSDP).
    With `local_sgd` the copies train independently, and gradients are summed only within a
    copy.

    Acts on: layout, engine; init (checks the model).

    Args:
        units: the modules that are gathered together: a class, a tuple of classes, or a
        function (name, module) -> bool. By default the members of each outermost nn.ModuleList,
        such as the blocks of a transformer. The model must call a unit's forward. Containers
        such as nn.ModuleList have no forward.
        reshard_after_forward: whether units are resharded between their forward and backward
        passes. If False, an update gathers each unit once, and at the end of the forward pass
        the whole model is gathered.
        gather_dtype: the dtype of gathered parameters, such as torch.bfloat16; None means the
        dtype of the parameters. The inputs of the model are cast to the same dtype. The
        optimizer's shards keep their dtype.
        reduce_dtype: the dtype for summing gradients over ranks; None means the dtype of the
        parameters, even with gather_dtype.
        keep_grads: if there are several micro-batches, "whole" keeps full gradients on each
        rank, and reduces only in the last micro-batch; "sharded" reduces in each micro-batch
        and keeps shards: 1/n of the memory, but one reduce-scatter per unit and micro-batch.
        find_unused_parameters: allow parameters that take no part in the loss.
        cpu_offload: keep a rank's shards of parameters, gradients, optimizer state and slots in
        host memory. Parameters are copied to the device to be gathered, gradients are copied
        back after reduction, and the optimizer runs on the host. Scalars stay on the device.

    Law:
        Parameters and optimizer state equal those of one process on the whole batch, up to
        rounding, for any units, axes and number of ranks. gather_dtype and reduce_dtype round
        to their precision. A checkpoint can be loaded into any other layout, bitwise.

    Cost:
        With n ranks per copy, each rank holds 1/n of parameters, gradients, optimizer state
        and slots, rounded up to whole rows. It also holds the gathered root, the current
        unit and the next unit. An update makes two all-gathers and one reduce-scatter per
        unit, one of each for the root, and an all-reduce of 8 bytes. Each pass adds an
        all-gather of 24 bytes, to agree on the order of units. If ranks run a unit in
        another order than in their last pass, there is one more all-gather. In total a rank
        sends at most 3 (n - 1) / n of the parameters' bytes; DistributedDataParallel sends
        2 (n - 1) / n. Each further micro-batch gathers again. m copies add an all-reduce of a
        rank's shards. Buffers are broadcast from rank 0 before an update's first forward pass.

        With cpu_offload the device holds only gathered units, their gradients and activations.
        Each all-gather copies a rank's shards from pinned host memory to the device, and each
        reduce-scatter copies them back. The update waits for the device and runs on the CPU.

        `TrainState.create(setup=...)` creates the whole model in each rank's host memory before
        it is sharded; with init="shard", one module at a time.

    Raises:
        ArgumentError: an option is invalid.
        CompositionError: when composed with `wrap_ddp`, a transform that defines `reduce`,
        `optimizer_in_backward`, or `compile` as one graph; when the state is created with a
        transform other than `local_sgd` that lets ranks differ.
        WorldError: when the state is created in a world with axes but without "dp_shard" or
        "cp", or in a world without axes under `local_sgd`. With cpu_offload: the ranks compute
        on the CPU; the world has one rank; or no backend connects the CPUs of the ranks.
        ModelError: when the state is created, `units` select no module or a container without a
        forward; a parameter is tied over two units; or a unit has parameters of two dtypes or
        complex parameters.
        OptimizerError: when the state is created, the optimizer is not elementwise. accelfn
        tests this with small parameters, whole and sharded.
        ReplicaMismatchError: when the state is created, the ranks have different models.
        LossError: at a step, the loss used a unit's parameters without calling the unit.
        CollectiveMismatchError: at a step, ranks ran different collectives inside the loss.
        UnusedParametersError: at a step, a parameter took no part in the loss.

    References:
        Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
        Models"; Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data
        Parallel".

    Example:
        >>> wrap_fsdp(reshard_after_forward=False)
        af.wrap_fsdp(reshard_after_forward=False)
    """

    refuses: ClassVar[Mapping[str, str]] = {
        "reduce": "reduces gradients to shards, but {other!r} reduces whole gradients. Leave"
        " out one of the two.",
        "steps_in_backward": "reduces the gradients of a unit together when all are complete, but"
        " {other!r} frees each gradient as soon as it is complete. Leave out one of the two.",
        "one_graph": "gathers parameters during the forward pass, which {other!r} cannot compile"
        " as one graph. Pass regions= with the units, so that only the units are compiled.",
    }
    units: Regions | None = attrs.field(default=None, validator=are_regions)
    reshard_after_forward: bool = option(default=True, validator=truth())
    gather_dtype: torch.dtype | None = option(None, _is_dtype)
    reduce_dtype: torch.dtype | None = option(None, _is_dtype)
    keep_grads: Literal["whole", "sharded"] = option(
        "whole", one_of("whole", "sharded")
    )
    find_unused_parameters: bool = option(default=False, validator=truth())
    cpu_offload: bool = option(default=False, validator=truth())

    def __attrs_post_init__(self) -> None:
        """Raise if torch is too old."""
        check_new(self)

    @property
    def tells(self) -> Mapping[str, Any]:
        """Tell others whether parameters may be unused, are offloaded, have whole gradients."""
        flag = "find_unused_parameters=True" if self.find_unused_parameters else None
        return {
            "draws_nothing": True,
            "finds_unused": flag,
            "offloads": self.cpu_offload,
            "whole_gradients": self.keep_grads == "whole",
        }

    def layout(
        self, name: str, meta: torch.Tensor, axes: Mapping[str, int]
    ) -> Mapping[str, int] | None:
        """Shard rows along dp_shard, except for scalars and empty parameters."""
        del name, axes
        return {"dp_shard": 0} if meta.ndim and meta.numel() else None

    def init(self, state: TrainState) -> None:
        """Raise if the world, the model or the optimizer do not support sharding."""
        module = state.definition.skeleton.module
        self._check_axes(state.world)
        if self.cpu_offload:
            self._check_offload(state.world)
        self._check_apart(state)
        from accelfn.engine.fsdp import check_units  # noqa: PLC0415 - a slow import

        check_units(module, self._units(module), f"{self!r}")
        check_elements(state, f"{self!r}", dims=(0,))

    def engine(self, state: TrainState) -> Engine:
        """Build torch's units around the state's shards."""
        from accelfn.engine.fsdp import FSDPRunner, ShardBinding, Splitter  # noqa: PLC0415

        splitter = Splitter(
            mesh=state.definition.splits.mesh,
            units=self._units,
            reshard_after_forward=self.reshard_after_forward,
            gather_dtype=self.gather_dtype,
            reduce_dtype=self.reduce_dtype,
            device=state.world.device,
            cpu_offload=self.cpu_offload,
        )
        home = ShardBinding(state.definition, splitter, state.params, state.buffers)

        def make(module: nn.Module, _: object) -> Runner:
            return FSDPRunner(
                module,
                home,
                ranks=state.definition.copy,
                in_parts=self.keep_grads == "sharded",
                finds_unused=self.find_unused_parameters,
            )

        return build_engine(state, home, make)

    def _units(self, module: nn.Module) -> list[nn.Module]:
        from accelfn.engine.fsdp import units_of  # noqa: PLC0415 - a slow import

        return units_of(module, self.units, f"{self!r}")

    def _check_apart(self, state: TrainState) -> None:
        """Raise if ranks of one copy may differ, or if no axis gives the number of copies.

        Raises:
            CompositionError: a transform lets ranks differ although their gradients are summed.
            WorldError: copies train independently, and no axis gives their number.
        """
        for owner in state.setup:
            facts = facts_of(owner)
            if "stays" in facts and not state.world.axes and state.world.loss.size > 1:
                msg = (
                    f"{self!r}: in a world without axes, all ranks hold one copy of the model,"
                    f" but {owner!r} trains several. Set the number of copies, for example 2:"
                    f" World.from_env(axes={{'dp_replicate': 2, 'dp_shard': -1}})."
                )
                raise WorldError(msg)
            if "apart" in facts and "stays" not in facts:
                msg = (
                    f"{self!r} splits one model over the ranks, but under {owner!r} each rank"
                    " trains its own model. Leave out one of the two."
                )
                raise CompositionError(msg)

    def _check_offload(self, world: World) -> None:
        """Raise if cpu_offload cannot work in a world, or has no effect.

        A single rank on the CPU is allowed, so that you can try a script that is for devices.

        Raises:
            WorldError: several ranks compute on the CPU, a device has only one rank, or no
            backend connects the CPUs.
        """
        kind, several = world.device.type, world.loss.size > 1
        if several == (kind == "cpu"):
            why = (
                "computes on the CPU, so all tensors are already in host memory"
                if several
                else "has only one rank, so the parameters are not sharded"
            )
            msg = (
                f"{self!r}: cpu_offload has no effect, because this world {why}. Leave it out"
                " here. A script for both cases can pass cpu_offload=world.size > 1 and"
                ' world.device.type != "cpu".'
            )
            raise WorldError(msg)
        if several and not world.connection.joins(torch.device("cpu")):
            backends = dist.Backend.default_device_backend_map
            backend = f"cpu:gloo,{kind}:{backends.get(kind, '...')}"
            msg = (
                f"{self!r}: cpu_offload keeps shards on the CPU, but this world's backend does"
                " not connect the CPUs of the ranks. Leave backend= out, or pass a backend for both"
                f' devices: World.from_env(backend="{backend}").'
            )
            raise WorldError(msg)

    def _check_axes(self, world: World) -> None:
        """Raise if the world has axes, but no dp_shard axis of several ranks."""
        if not world.axes or world.loss.size == 1:
            return
        if fold_cp(world.axes).get("dp_shard", 1) == 1:
            msg = (
                f'{self!r} splits parameters over the axis "dp_shard", but in this world that'
                f" axis is missing or has one rank: the axes are {dict(world.axes)}. Write"
                f" World.from_env(axes={{'dp_shard': -1}}), or use af.wrap_ddp() instead."
            )
            raise WorldError(msg)

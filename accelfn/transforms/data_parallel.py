# SPDX-License-Identifier: Apache-2.0
"""Data parallelism: shard the data, and replicate the model or split it over the ranks."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, cast

import attrs
import torch
import torch.distributed as dist
from torch import nn

from accelfn.base.arguments import (
    advise,
    integer,
    is_number,
    mebibytes,
    one_of,
    option,
    option_of,
    satisfies,
    truth,
)
from accelfn.collectives.replicas import check_values
from accelfn.data import Plan
from accelfn.definition.transform import facts_of, transform
from accelfn.engine.ddp import Compression, DDPRunner, LowRank, Narrow
from accelfn.engine.engine import Engine, build_engine
from accelfn.engine.modules import BatchNorm, Regions, are_regions, sync_norms
from accelfn.engine.optimizer import LiveUpdate, check_elements
from accelfn.engine.runner import binding_of
from accelfn.errors import ArgumentError, CompositionError, WorldError
from accelfn.state.state import TrainState
from accelfn.state.update import Update
from accelfn.world import World
from accelfn.world.axes import BATCH, fold_cp

if TYPE_CHECKING:
    from accelfn.engine.fsdp import FSDPRunner

_FIRST_BUCKET_MB = 1
"""torch's default. torch.compile splits graphs at buckets of at least this size."""


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

    bucket_cap_mb: float | None = option(None, attrs.validators.optional(mebibytes()))
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
        """Transforms that break torch's DDP or leave it without work."""
        reasons = {
            "reduce": "would never reduce a gradient: {other!r} says how they cross ranks."
            " Leave out one of the two."
        }
        if self.within is None:
            reasons["stays"] = (
                "would never reduce a gradient: under {other!r} each rank keeps its own."
                " Leave out one of the two, or say along which axis ranks are one worker,"
                ' as within="dp_shard".'
            )
        if self.static_graph:
            reasons["value_and_grad"] = (
                "expects one backward pass an update, but {other!r} runs several."
                " Leave out static_graph=True."
            )
        return reasons

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
        fields = ("name", "within")
        options = attrs.asdict(self, filter=lambda field, _: field.name not in fields)
        (factory,) = state.setup.facts.get("compression", (None,))
        compression = None if factory is None else factory(state)

        def make(module: nn.Module, live: LiveUpdate | None) -> DDPRunner:
            return DDPRunner(module, ranks, options, compression, live)

        return build_engine(state, binding_of(state), make, compression=compression)


# `compress_grads`: reduce gradients in fewer bytes.


Slot: TypeAlias = dict[str, Any]

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_POWERSGD = "powersgd"
_DEFAULTS: Mapping[str, float] = {
    "matrix_approximation_rank": 1,
    "start_powerSGD_iter": 1000,
    "min_compression_rate": 2.0,
}


_is_rate = satisfies(
    lambda value: is_number(value) and value >= 0, "a number of at least 0"
)


@transform
class compress_grads:
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
        >>> compress_grads("powersgd", matrix_approximation_rank=2)
        af.compress_grads('powersgd', matrix_approximation_rank=2)
    """

    needs: ClassVar[Mapping[str, str]] = {
        "buckets": "is about gradients that af.wrap_ddp() reduces, which the setup lacks. Put"
        " af.wrap_ddp() into the chain, or leave it out."
    }
    method: Literal["fp16", "bf16", "powersgd"] = attrs.field(
        validator=one_of(*_DTYPES, _POWERSGD)
    )
    matrix_approximation_rank: int | None = option_of("method", _POWERSGD, integer(1))
    start_powerSGD_iter: int | None = option_of(  # noqa: N815 - torch's name
        "method", _POWERSGD, integer(0)
    )
    min_compression_rate: float | None = option_of("method", _POWERSGD, _is_rate)

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
            " {told}."
        }

    @property
    def without(self) -> tuple[str, ...]:
        """Skip `init` and `merge` for sums in 16 bits: they have no slot."""
        return () if self.method == _POWERSGD else ("init", "merge")

    def _option(self, name: str) -> Any:
        value = getattr(self, name)
        return _DEFAULTS[name] if value is None else value

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
    as `af.snapshot_model` teachers, do not change. In a world of 1 nothing changes.

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
        has_layers = any(isinstance(m, BatchNorm) for m in module.modules())
        if not has_layers and state.world.is_main:
            advise(
                f"{self!r} has nothing to do: the model has none of torch's BatchNorm layers,"
                " and others are not known by it. Leave it out, or use torch's."
            )
        if ranks.size > 1:
            compiles = "compiles" in state.setup.facts
            sync_norms(module, ranks, f"{self!r}", compiles=compiles)
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


# Split the model over the ranks with torch's fully_shard.


_is_dtype = satisfies(
    lambda value: (
        value is None or (isinstance(value, torch.dtype) and value.is_floating_point)
    ),
    "a dtype of real numbers, such as torch.bfloat16, or None for the parameters' own",
)


@transform
class wrap_fsdp:
    """Shard the model over the ranks with torch's `fully_shard` (FSDP2).

    Each rank holds some rows of every parameter, and the same rows of its gradient, its
    optimizer state and slots in its shape. torch's `fully_shard` runs a module that computes
    the loss: a unit is gathered before its forward pass, resharded after it, and gathered again
    for its backward pass; then its gradients are reduce-scattered. The root (all parameters
    outside units) is gathered once for the whole loss. The weights of the ranks' losses are
    summed with the gradients, so the result is the mean over all samples (or tokens) of the
    update, even if the ranks' shares differ in size. In a world of 1 nothing changes.

    Without axes, all ranks together hold one copy of the model. With {"dp_replicate": m,
    "dp_shard": n} there are m copies, each over n neighboring ranks (HSDP). With `local_sgd`
    the copies train independently, and gradients are summed only within a copy.

    Acts on: layout, engine; init (checks the model).

    Args:
        units: the modules that are gathered as one: a class, a tuple of classes, or a function
        (name, module) -> bool. Default: the members of each outermost nn.ModuleList, such as
        the blocks of a transformer. The model must call a unit's forward. Containers such as
        nn.ModuleList have no forward.
        reshard_after_forward: whether units are resharded between their forward and backward
        passes. If False, an update gathers each unit once, and the whole model is gathered at
        the end of the forward pass.
        gather_dtype: the dtype of gathered parameters, such as torch.bfloat16. The model's
        inputs are cast to it. None means the parameters' own. The shards that the optimizer
        steps keep their dtype.
        reduce_dtype: the dtype of sums of gradients over ranks; None means the parameters' own,
        independent of gather_dtype.
        keep_grads: with several micro-batches, "whole" keeps full gradients on each rank and
        reduces only with the last one; "sharded" reduces with each and keeps shards: 1/n of the
        memory, and one reduce-scatter per unit and micro-batch.
        find_unused_parameters: allow parameters that take no part in the loss.
        cpu_offload: whether a rank's shards of parameters, gradients, optimizer state and slots
        are in host memory. They are copied to the device to be gathered, gradients are copied
        back after reduction, and the optimizer steps on the host. Scalars stay on the device.

    Law:
        Parameters and optimizer state are those of one process on the whole batch, up to
        rounding, for any units, axes and number of ranks; gather_dtype and reduce_dtype round
        to their own precision. A checkpoint of one layout loads into any other bitwise.

    Cost:
        With n ranks per copy, each rank holds 1/n of parameters, gradients, optimizer state and
        slots (rounded up to whole rows), plus the gathered root, the current unit and the next
        one. An update makes two all-gathers and one reduce-scatter per unit, one of each for
        the root, and an all-reduce of 8 bytes. Each pass adds an all-gather of 24 bytes:
        ranks agree on the order of units. A unit that ranks run in another order than in their
        last pass adds one more. In total a rank sends at most 3 (n - 1) / n of
        the parameters' bytes; DistributedDataParallel sends 2 (n - 1) / n. Each further
        micro-batch gathers again. m copies add an all-reduce of a rank's shards. Buffers are
        broadcast from rank 0 before an update's first forward pass.

        With cpu_offload the device only holds gathered units, their gradients and activations.
        Each all-gather copies a rank's shards to the device, and each reduce-scatter copies
        them back, from and to pinned memory. The update waits for the device and runs on the
        CPU.

        `TrainState.create(setup=...)` creates the whole model in each rank's host memory before
        sharding; with init="shard", one module at a time.

    Raises:
        ArgumentError: an invalid option.
        CompositionError: when composed with `wrap_ddp`, a transform that defines `reduce`,
        `optimizer_in_backward`, or `compile` as one graph; when the state is created with a
        transform other than `local_sgd` that lets ranks differ.
        WorldError: when the state is created in a world with axes but without "dp_shard" or
        "cp", or in a world without axes under `local_sgd`. With cpu_offload: the ranks compute
        on the CPU; the world has one rank; or no backend joins the ranks' CPUs.
        ModelError: when the state is created, `units` match no module or a container without a
        forward; a parameter is tied over two units; or a unit has parameters of two dtypes or
        complex parameters.
        OptimizerError: when the state is created, the optimizer is not elementwise; accelfn
        tries it on small parameters, whole and sharded.
        ReplicaMismatchError: when the state is created, the ranks have different models.
        LossError: at a step, the loss used a unit's parameters without calling the unit.
        CollectiveMismatchError: at a step, ranks run different collectives inside the loss.
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
        "reduce": "reduces gradients to the parts that ranks hold, and {other!r} says how"
        " whole ones cross the ranks. Leave out one of the two.",
        "steps_in_backward": "reduces the gradients of a unit at once, when all are there,"
        " and {other!r} frees each as soon as it is complete. Leave out one of the two.",
        "one_graph": "gathers units between the parts of the model, and {other!r} makes one"
        " graph of it. Give regions=, the units.",
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

    @property
    def tells(self) -> Mapping[str, Any]:
        """Facts about unused parameters, offloading and partial gradients."""
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
        """Shard rows along dp_shard; scalars and empty parameters stay whole."""
        del name, axes
        return {"dp_shard": 0} if meta.ndim and meta.numel() else None

    def init(self, state: TrainState) -> None:
        """Reject models and optimizers that sharding would change."""
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

        def make(module: nn.Module, live: object) -> "FSDPRunner":
            del live
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
        """Reject transforms that let ranks of one copy differ, and a missing copy axis.

        Raises:
            CompositionError: a transform lets ranks differ although their gradients are summed.
            WorldError: copies train independently, and no axis gives their number.
        """
        for owner in state.setup:
            facts = facts_of(owner)
            if "stays" in facts and not state.world.axes and state.world.loss.size > 1:
                msg = (
                    f"{self!r}: without axes all ranks have one copy of the model together, and"
                    f" {owner!r} trains copies apart. Say how many there are, as"
                    " World.from_env(axes={'dp_replicate': 2, 'dp_shard': -1})."
                )
                raise WorldError(msg)
            if "apart" in facts and "stays" not in facts:
                msg = (
                    f"{self!r}: has one model that is split over the ranks, and under {owner!r}"
                    " each rank has its own model. Leave out one of the two."
                )
                raise CompositionError(msg)

    def _check_offload(self, world: World) -> None:
        """Reject worlds in which cpu_offload cannot work or has no effect.

        One rank on the CPU is allowed, to try out a script for devices.

        Raises:
            WorldError: there is no device, only one rank, or no CPU backend.
        """
        kind, several = world.device.type, world.loss.size > 1
        if several == (kind == "cpu"):
            why = (
                "computes on the CPU, where all lies in the host's memory already"
                if several
                else "has one rank, whose device has the model whole"
            )
            msg = (
                f"{self!r}: this world {why}. Leave cpu_offload out here; where a script runs on"
                ' both: cpu_offload=world.size > 1 and world.device.type != "cpu".'
            )
            raise WorldError(msg)
        if several and not world.connection.joins(torch.device("cpu")):
            backends = dist.Backend.default_device_backend_map
            backend = f"cpu:gloo,{kind}:{backends.get(kind, '...')}"
            msg = (
                f"{self!r}: parts lie on the CPU, and this world's backend joins no ranks"
                f' there. Name one for both, as World.from_env(backend="{backend}"),'
                " or none: that is what from_env takes by itself."
            )
            raise WorldError(msg)

    def _check_axes(self, world: World) -> None:
        """Reject a world with axes but no dp_shard axis of several ranks."""
        if not world.axes or world.loss.size == 1:
            return
        if fold_cp(world.axes).get("dp_shard", 1) == 1:
            msg = (
                f"{self!r}: the world has no dp_shard of several ranks to split over:"
                f" {dict(world.axes)}. Name one, as axes={{'dp_shard': -1}}, or take"
                " af.wrap_ddp()."
            )
            raise WorldError(msg)

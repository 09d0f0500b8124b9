# SPDX-License-Identifier: Apache-2.0
"""`wrap_deepspeed`: shard optimizer state, gradients and parameters with DeepSpeed's ZeRO."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

import attrs
import torch
import torch.distributed as dist
from torch import nn

from accelfn import TrainState, World, chain, transform
from accelfn.deepspeed.settings import check_settings, settings_of
from accelfn.errors import CompositionError, ModelError, OptimizerError, WorldError
from accelfn.plug import (
    arguments,
    build_engine,
    check_elements,
    counts_by_group,
    sharded_lender,
)

_NOTHING: Mapping[str, Any] = {}
_is_stage = arguments.satisfies(
    lambda value: value in (1, 2, 3) and value is not True,
    "1 (shards the optimizer's state), 2 (also gradients), or 3 (also parameters)",
)
_is_config = arguments.satisfies(
    lambda value: isinstance(value, Mapping),
    "a dict of DeepSpeed's settings, such as"
    ' {"zero_optimization": {"overlap_comm": True}}',
)


@transform
class wrap_deepspeed:
    """Shard optimizer state, gradients and parameters over the ranks with DeepSpeed's ZeRO.

    DeepSpeed runs the loss, its hooks reduce the gradients, and its optimizer updates each rank's
    shard of the parameters. Parameters, optimizer state and slots are DTensors with the same
    shards (rows) as under `wrap_fsdp`. So you save, load, average, evaluate and reshard a state
    like any other, and checkpoints contain nothing of DeepSpeed. Between steps the elements are
    in DeepSpeed's own order, and accelfn converts them to rows when you read them: **reading
    `state.params` or `state.opt_state` after a step is a collective** that all ranks must run,
    like every operation on a DTensor. In a world of 1, `wrap_deepspeed` changes nothing.

    The weights of the ranks' losses are summed with the gradients, and DeepSpeed divides by the
    total weight before it clips. So gradients are means over all samples (or tokens) of the
    update, even if the ranks' shares differ in size. If gradients are not finite, all ranks skip
    the update, and `metrics["skipped"]` counts it. With `skip_nonfinite`, the loss can also be
    infinite or NaN, and too many skipped updates raise an error.

    DeepSpeed reduces each gradient as soon as it is computed. At stages 1 and 2, accelfn makes
    gradients wait until all ranks can reduce them in the same order, which is rank 0's order in
    the first pass. So ranks may run the modules in different orders. At stage 3, DeepSpeed
    gathers a module's parameters when the module runs, so all ranks must run the modules in the
    same order. Ranks compare their orders, unless all of them follow an order that they compared
    before. A rank that leaves a known order asks the other ranks, and raises an error after half
    of the world's timeout.

    Acts on: layout, engine; init (checks the model).

    Args:
        stage: 1 shards the optimizer's state, 2 also gradients, 3 also parameters.
        config: DeepSpeed's own settings for `zero_optimization` and communication. Settings that
            accelfn controls, such as batch size, learning rates, clipping or checkpoints, raise
            an error.
        keep_grads: for updates with several micro-batches. "whole" keeps full gradients on each
            rank, and reduces them with the last micro-batch. "sharded" reduces gradients with
            each micro-batch, and at stages 2 and 3 keeps only shards.

    Law:
        Parameters and optimizer state equal those of one process that trains on the whole batch,
        up to rounding, for any number of ranks. Steps on other states do not change a state,
        bitwise. A checkpoint can be loaded into any other layout, bitwise.

    Cost:
        Stages 1 and 2 keep full parameters and a float32 shard on each rank, and all stages keep
        1/n of the optimizer's state. A step on a different state than before
        swaps pointers, and needs one gather at stages 1 and 2. A state that was loaded, or
        updated by another engine, is first converted to DeepSpeed's order, with an all-to-all of
        its bytes. Reading a state converts it back, at most once per update. The first step
        builds DeepSpeed's engine, and each rank needs memory for the full model at that time.

    Raises:
        ArgumentError: a setting is invalid or controlled by accelfn, or DeepSpeed is not
            installed.
        CompositionError: the setup has a transform that reads gradients (except `clip_grad_norm`
            and `skip_nonfinite`), reduces gradients, or changes how the model runs. Raised when
            you compose the setup, or create the state.
        WorldError: when the state is created: the world is simulated, has only some of the job's
            ranks, or has axes other than "dp_shard".
        ModelError: when the state is created: a parameter is not float32, or has no elements.
        OptimizerError: when the state is created: the optimizer is not elementwise, a parameter
            group has no trained parameter, or at stage 3 the optimizer counts updates per group.
            At a step: parameters of a group have different update counts.
        UnusedParametersError: at a step: the loss did not use a parameter on some or all ranks.
            All ranks raise an error that names the parameter.
        LossError: at stage 3: in the first pass of a loss function, the loss used a parameter that
            was not gathered; or ranks ran modules in different orders. If only one rank left a
            known order, the other ranks may raise `PeerFailedError`.
        GradsError: at `apply_grads`: DeepSpeed no longer has these gradients.

    References:
        Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
        Models".

    Example:
        >>> wrap_deepspeed(stage=2)
        af.wrap_deepspeed(2)
    """

    refuses: ClassVar[Mapping[str, str]] = {
        "reduce": "lets DeepSpeed reduce gradients, but {other!r} also reduces them. Remove one"
        " of the two.",
        "stays": "lets DeepSpeed reduce gradients, but {other!r} keeps them on their rank. Remove"
        " one of the two.",
        "steps_in_backward": "lets DeepSpeed update all parameters at once, but {other!r} updates"
        " each parameter as soon as its gradient is complete. Remove one of the two.",
        "compression": "lets DeepSpeed reduce gradients, but {other!r} only compresses gradients"
        " that af.wrap_ddp() reduces. Remove one of the two.",
        "compiles": "needs DeepSpeed's hooks between the modules of the model, but {other!r}"
        " compiles the modules as one. Remove one of the two.",
        "loss_scale": "keeps weights in float32, and its loss cannot be scaled, but {other!r}"
        ' scales the loss. Use af.autocast("bf16") instead.',
        "eight_bits": "lets DeepSpeed manage the weights, but {other!r} keeps copies of them in 8"
        " bits. Remove one of the two.",
        "splits_layers": "lets DeepSpeed shard parameters, but {other!r} splits the same"
        " parameters over ranks. Use af.wrap_fsdp() with {other!r}.",
        "splits_sequences": "lets DeepSpeed average gradients over all ranks, but under {other!r}"
        " some ranks have parts of the same sample. Use af.wrap_fsdp() with {other!r}.",
    }
    stage: Literal[1, 2, 3] = attrs.field(validator=_is_stage)
    config: Mapping[str, Any] = attrs.field(
        default=_NOTHING, validator=_is_config, hash=False
    )
    keep_grads: Literal["whole", "sharded"] = attrs.field(
        default="whole", validator=arguments.one_of("whole", "sharded")
    )

    def __attrs_post_init__(self) -> None:
        """Raise an error if a setting is invalid, or DeepSpeed is not installed."""
        check_settings(self.config)

    @property
    def tells(self) -> Mapping[str, Any]:
        """Facts: the transform draws no random numbers, and how it keeps gradients."""
        return {"draws_nothing": True, "whole_gradients": self.keep_grads == "whole"}

    def layout(
        self, name: str, meta: torch.Tensor, axes: Mapping[str, int]
    ) -> Mapping[str, int] | None:
        """Shard each parameter by rows along "dp_shard", as `wrap_fsdp` does."""
        del name, axes
        return {"dp_shard": 0} if meta.ndim and meta.numel() else None

    def init(self, state: TrainState) -> None:
        """Raise an error for a state that DeepSpeed cannot train, or would train differently."""
        self._check(state)
        check_elements(state, f"{self!r}", dims=(0,))

    def engine(self, state: TrainState) -> object:
        """Build the engine that trains a state with DeepSpeed."""
        from accelfn.deepspeed.home import ZeroBinding, ZeroOptimizer, ZeroRunner  # noqa: PLC0415

        if state.definition.layout is None:
            msg = f"{self!r}: the model has only scalar parameters, which cannot be sharded."
            raise ModelError(msg)
        # again, because with_setup and with_trainable do not call init
        self._check(state)
        max_norm = min(state.definition.setup.facts.get("clips", ()), default=None)
        config = settings_of(self.config, stage=self.stage, max_norm=max_norm)
        ranks = state.definition.copy
        lend = sharded_lender(state.definition, f"{self!r}")
        home = ZeroBinding(state, lend, config, ranks)

        def runner(module: nn.Module, live: object) -> ZeroRunner:
            del live
            in_parts = self.keep_grads == "sharded"
            return ZeroRunner(module, home, ranks, in_parts=in_parts)

        return build_engine(state, home, runner, optimizer=ZeroOptimizer(home))

    def _check(self, state: TrainState) -> None:
        problems = {
            WorldError: _world_problems(state.world),
            CompositionError: _grad_problems(state),
            ModelError: _model_problems(state),
            OptimizerError: _optimizer_problems(state, self.stage),
        }
        for kind, texts in problems.items():
            for text in texts:
                msg = f"{self!r}: {text}"
                raise kind(msg)


def _world_problems(world: World) -> Iterator[str]:
    """Yield why a world is not the group of all processes."""
    if world.connection.simulated is not None:
        yield (
            "DeepSpeed needs a process for each rank, but simulated ranks share one process."
            " Start processes with accelfn launch, torchrun or accelfn.testing.run_processes."
            " Or use af.wrap_fsdp()."
        )
    axes = {n: s for n, s in world.axes.items() if s > 1 and n != "dp_shard"}
    if axes:
        yield (
            "DeepSpeed shards over all ranks, but the world has axes other than dp_shard:"
            f" {axes}. Use af.wrap_fsdp() instead."
        )
    run = world.whole
    is_own = run.group is dist.group.WORLD or run.connection.is_branch
    if run.size > 1 and not is_own:
        yield (
            "DeepSpeed uses the group of all processes, but this world has only some of them."
            " Use the world of World.from_env()."
        )


def _grad_problems(state: TrainState) -> Iterator[str]:
    """Yield which transforms read gradients, because DeepSpeed does not return them."""
    for owner in state.setup.owners["grads"]:
        if not {"clips", "skips_alone"} & chain(owner).facts.keys():
            hint = f"Use {owner!r} with af.wrap_fsdp() instead."
            if type(owner).__name__ == "clip_grad_norm":
                hint = "DeepSpeed only clips by the global 2-norm: af.clip_grad_norm(max_norm)."
            yield f"DeepSpeed keeps the gradients, but {owner!r} reads them. {hint}"


def _model_problems(state: TrainState) -> Iterator[str]:
    """Yield which parameters DeepSpeed would convert or cannot shard."""
    metas = dict(state.definition.skeleton.module.named_parameters())
    odd = [n for n, meta in metas.items() if meta.dtype is not torch.float32]
    if odd:
        yield (
            f"DeepSpeed keeps and updates parameters in float32, but {', '.join(odd[:5])} are"
            f" {metas[odd[0]].dtype}. Create the model in float32. To compute in 16 bits, add"
            ' af.autocast("bf16").'
        )
    empty = [n for n, meta in metas.items() if not meta.numel()]
    if empty:
        yield f"{', '.join(empty[:5])} have no elements; DeepSpeed cannot shard them."


def _optimizer_problems(state: TrainState, stage: int) -> Iterator[str]:
    """Yield why DeepSpeed would replace an optimizer or run it differently."""
    optimizer, skeleton = state.definition.optimizer, state.definition.skeleton
    kind = type(optimizer).__name__
    is_of_parts = hasattr(optimizer, "parts")  # from af.combine_optimizers
    if is_of_parts or isinstance(optimizer, torch.optim.Adagrad):
        yield (
            f"DeepSpeed would replace {kind} or change it. Use one optimizer such as AdamW, or"
            " use af.wrap_fsdp()."
        )
    if stage == 3 and counts_by_group(state):
        yield (
            f"{kind} counts updates per parameter group. At stage 3 DeepSpeed steps a group in"
            " several parts, and each part would count as an update. Use stage 1 or 2, or"
            " af.wrap_fsdp()."
        )
    metas = dict(skeleton.module.named_parameters())
    ids = {id(metas[name]) for name in skeleton.trainable}
    for i, group in enumerate(optimizer.param_groups):
        if not any(id(param) in ids for param in group["params"]):
            yield (
                f"parameter group {i} has no trained parameter, which DeepSpeed does not support."
                " Remove the group, or train one of its parameters."
            )

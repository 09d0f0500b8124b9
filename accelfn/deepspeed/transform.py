# SPDX-License-Identifier: Apache-2.0
"""Split the optimizer, the gradients and the model over the ranks with DeepSpeed's ZeRO."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, cast

import attrs
import torch
import torch.distributed as dist
from torch import nn

from accelfn import TrainState, World, chain, transform
from accelfn.deepspeed.settings import (
    check_installed,
    check_settings,
    check_values,
    settings_of,
)
from accelfn.errors import (
    ArgumentError,
    CompositionError,
    ModelError,
    OptimizerError,
    WorldError,
)
from accelfn.plug import (
    build_engine,
    check_elements,
    counts_by_group,
    sharded_lender,
)

_NOTHING: Mapping[str, Any] = {}


def _is_stage(_owner: object, _field: object, value: object) -> None:
    if isinstance(value, bool) or value not in (1, 2, 3):
        msg = (
            f"af.wrap_deepspeed(stage={value!r}): expected 1, which splits the optimizer's"
            " state, 2, gradients too, or 3, parameters too."
        )
        raise ArgumentError(msg)


def _is_config(_owner: object, _field: object, value: object) -> None:
    if not isinstance(value, Mapping):
        msg = (
            f"af.wrap_deepspeed(config={value!r}): expected a dict of DeepSpeed's settings,"
            ' such as {"zero_optimization": {"overlap_comm": True}}.'
        )
        raise ArgumentError(msg)
    check_settings("af.wrap_deepspeed", cast("Mapping[str, Any]", value))


def _is_way(_owner: object, field: Any, value: object) -> None:
    if value not in ("whole", "sharded"):
        msg = (
            f'af.wrap_deepspeed({field.name}={value!r}): expected "whole" or "sharded".'
        )
        raise ArgumentError(msg)


@transform
class wrap_deepspeed:
    """Shard optimizer state, gradients and parameters over the ranks with DeepSpeed's ZeRO.

    DeepSpeed runs the loss, its hooks reduce the gradients, and its optimizer steps a rank's
    shard of the parameters. A state has the same rows of parameters, optimizer state and slots
    as under `wrap_fsdp`, so you save, load, average, evaluate and reshard it like any other
    state, and checkpoints contain nothing of DeepSpeed. Between steps the elements are in
    DeepSpeed's own order, and are converted to rows when you read them: **reading
    `state.params` or `state.opt_state` after a step is a collective** that all ranks must run,
    like every operation on a DTensor. In a world of 1 nothing changes.

    The weights of the ranks' losses are summed with the gradients, and DeepSpeed divides by the
    total before it clips, so the result is the mean over all samples (or tokens) of the update,
    even if the ranks' shares differ in size. All ranks skip an update with gradients that are
    not finite, and `metrics["skipped"]` reports it. With `skip_nonfinite` the loss may be
    infinite or NaN too, and too many skips raise an error.

    DeepSpeed reduces gradients as they come. At stages 1 and 2 accelfn makes each gradient wait
    for its turn, in rank 0's first order, so ranks may use the model in different orders. At
    stage 3 modules are gathered as they run, which cannot wait. Ranks therefore compare the
    order of modules, except along an order that all have followed before. A rank that leaves a
    known order asks the others, and gives up after half of the world's timeout.

    Acts on: layout, engine; init (checks the model).

    Args:
        stage: 1 shards the optimizer's state, 2 also gradients, 3 also parameters.
        config: DeepSpeed's own settings: `zero_optimization` and communication. Settings that
        accelfn makes, such as batch size, rates, clipping or checkpoints, raise an error.
        keep_grads: with several micro-batches, "whole" keeps full gradients on each rank and
        reduces only with the last one; "sharded" reduces with each, and at stages 2 and 3 keeps
        shards.

    Law:
        Parameters and optimizer state are those of one process on the whole batch, up to
        rounding, for any number of ranks. Stepping other states in between does not change a
        state, bitwise. A checkpoint loads into any other layout, bitwise.

    Cost:
        DeepSpeed's own: stages 1 and 2 hold whole parameters on each rank, and a float32 shard;
        all stages hold 1/n of the optimizer's state. Binding another state swaps pointers, plus
        one gather at stages 1 and 2. A state that was loaded, or stepped by another engine, is
        first converted to DeepSpeed's order by an all-to-all of its bytes. Reading a state
        converts it back, at most once per update. The first step builds DeepSpeed's engine, for
        which each rank holds the whole model.

    Raises:
        ArgumentError: an invalid setting, or one that accelfn makes; DeepSpeed is not installed.
        CompositionError: when composed or built with a transform that reads gradients (except
        `clip_grad_norm` and `skip_nonfinite`), reduces gradients, or changes how the model
        runs.
        WorldError: when the state is created in a simulated world, in a part of the process's
        world, or in a world with axes other than "dp_shard".
        ModelError: when the state is created, a parameter is not float32, or has no elements.
        OptimizerError: when the state is created, the optimizer is not elementwise, a parameter
        group trains nothing, or at stage 3 the optimizer counts updates in its groups; at a
        step, parameters of a group have different counts.
        UnusedParametersError: at a step, a parameter took no part in the loss on some or all
        ranks; all ranks raise and name it.
        LossError: at stage 3, in a loss function's first pass, the loss used a parameter that
        was not gathered; or at a step, ranks ran modules in different orders. If only one rank
        left a known order, the other ranks may raise `PeerFailedError`.
        GradsError: at `apply_grads`, DeepSpeed no longer holds these gradients.

    References:
        Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
        Models".

    Example:
        >>> wrap_deepspeed(stage=2)
        af.wrap_deepspeed(2)
    """

    refuses: ClassVar[Mapping[str, str]] = {
        "reduce": "has DeepSpeed reduce gradients, and {other!r} says how they cross the ranks."
        " Leave out one of the two.",
        "stays": "has DeepSpeed reduce gradients, and under {other!r} they stay on their rank."
        " Leave out one of the two.",
        "steps_in_backward": "has DeepSpeed step all parameters at once, and {other!r} steps each"
        " as soon as its gradient is complete. Leave out one of the two.",
        "compression": "has DeepSpeed reduce gradients, and {other!r} compresses those that"
        " af.wrap_ddp() reduces. Leave out one of the two.",
        "compiles": "has DeepSpeed's hooks between the parts of the model, which {other!r} makes"
        " one piece. Leave out one of the two.",
        "loss_scale": "has float32 weights, and no scale of the loss beside its own; {other!r}"
        ' scales it. Take af.autocast("bf16").',
        "eight_bits": "has DeepSpeed lend the weights, and {other!r} keeps copies of them in 8"
        " bits. Leave out one of the two.",
        "splits_layers": "has DeepSpeed cut parameters, of which {other!r} gives ranks parts."
        " Take af.wrap_fsdp() with it.",
        "splits_sequences": "has DeepSpeed average over all ranks, and under {other!r} some have"
        " parts of the same sample. Take af.wrap_fsdp() with it.",
    }
    stage: Literal[1, 2, 3] = attrs.field(validator=_is_stage)
    config: Mapping[str, Any] = attrs.field(
        default=_NOTHING, validator=_is_config, hash=False
    )
    keep_grads: Literal["whole", "sharded"] = attrs.field(
        default="whole", validator=_is_way
    )

    def __attrs_post_init__(self) -> None:
        """Raise if DeepSpeed is not installed, or rejects a setting."""
        check_installed("af.wrap_deepspeed")
        check_values("af.wrap_deepspeed", self.config)

    @property
    def tells(self) -> Mapping[str, Any]:
        """Facts about random numbers and partial gradients."""
        return {"draws_nothing": True, "whole_gradients": self.keep_grads == "whole"}

    def layout(
        self, name: str, meta: torch.Tensor, axes: Mapping[str, int]
    ) -> Mapping[str, int] | None:
        """Shard rows along dp_shard, as af.wrap_fsdp does."""
        del name, axes
        return {"dp_shard": 0} if meta.ndim and meta.numel() else None

    def init(self, state: TrainState) -> None:
        """Reject states that DeepSpeed cannot train, or would train differently."""
        self._check_world(state.world)
        self._check_grads(state)
        self._check_model(state)
        self._check_optimizer(state)
        check_elements(state, f"{self!r}", dims=(0,))

    def engine(self, state: TrainState) -> object:
        """Build DeepSpeed's engine, and bind the state's elements."""
        from accelfn.deepspeed.home import ZeroBinding, ZeroOptimizer, ZeroRunner  # noqa: PLC0415

        if state.definition.layout is None:
            msg = f"{self!r}: the model has lone numbers alone, and nothing to split."
            raise ModelError(msg)
        self._check_grads(state)  # with_setup and with_trainable do not call init again
        self._check_optimizer(state)
        clips = state.definition.setup.facts.get("clips", ())
        config = settings_of(
            self.config, stage=self.stage, max_norm=min(clips, default=None)
        )
        ranks = state.definition.copy
        lend = sharded_lender(state.definition, f"{self!r}")
        home = ZeroBinding(state, lend, config, ranks)

        def runner(module: nn.Module, live: object) -> ZeroRunner:
            del live
            in_parts = self.keep_grads == "sharded"
            return ZeroRunner(module, home, ranks, in_parts=in_parts)

        return build_engine(state, home, runner, optimizer=ZeroOptimizer(home))

    def _check_world(self, world: World) -> None:
        """Reject worlds other than the process's whole group."""
        if world.connection.simulated is not None:
            msg = (
                f"{self!r}: DeepSpeed talks through the one group of a process, and simulated"
                " ranks share a process: run on processes, as accelfn launch, torchrun or"
                " accelfn.testing.run_processes start them. af.wrap_fsdp() splits in simulated"
                " worlds, too."
            )
            raise WorldError(msg)
        axes = {n: s for n, s in world.axes.items() if s > 1 and n != "dp_shard"}
        if axes:
            msg = (
                f"{self!r}: splits over all ranks, and the world has other axes than dp_shard:"
                f" {axes}. Take af.wrap_fsdp() there."
            )
            raise WorldError(msg)
        run = world.whole
        is_own = run.group is dist.group.WORLD or run.connection.is_branch
        if run.size > 1 and not is_own:
            msg = (
                f"{self!r}: DeepSpeed talks through the process's own group, and this world is"
                " not all of it. Take the world of World.from_env()."
            )
            raise WorldError(msg)

    def _check_grads(self, state: TrainState) -> None:
        """Reject transforms that read gradients, which DeepSpeed holds."""
        for owner in state.setup.owners["grads"]:
            if not {"clips", "skips_alone"} & chain(owner).facts.keys():
                hint = (
                    " It clips by the global 2-norm alone: af.clip_grad_norm(max_norm)."
                    if type(owner).__name__ == "clip_grad_norm"
                    else " Take af.wrap_fsdp() with it, which shows them."
                )
                msg = (
                    f"{self!r}: has DeepSpeed hold the gradients until the update, and {owner!r}"
                    f" looks at them.{hint}"
                )
                raise CompositionError(msg)

    def _check_model(self, state: TrainState) -> None:
        """Reject parameters that DeepSpeed would convert or cannot shard."""
        metas = dict(state.definition.skeleton.module.named_parameters())
        odd = [n for n, meta in metas.items() if meta.dtype is not torch.float32]
        if odd:
            msg = (
                f"{self!r}: DeepSpeed keeps and steps parameters in float32;"
                f" {', '.join(odd[:5])} are {metas[odd[0]].dtype}. Make the model in float32;"
                ' af.autocast("bf16") computes in 16 bits.'
            )
            raise ModelError(msg)
        empty = [n for n, meta in metas.items() if not meta.numel()]
        if empty:
            msg = f"{self!r}: {', '.join(empty[:5])} have no elements, which DeepSpeed cannot cut."
            raise ModelError(msg)

    def _check_optimizer(self, state: TrainState) -> None:
        """Reject optimizers that DeepSpeed would replace or run differently."""
        optimizer, skeleton = state.definition.optimizer, state.definition.skeleton
        is_of_parts = hasattr(optimizer, "parts")  # as of af.combine_optimizers
        if is_of_parts or isinstance(optimizer, torch.optim.Adagrad):
            msg = (
                f"{self!r}: DeepSpeed makes another of {type(optimizer).__name__}. Take one"
                " optimizer, such as AdamW, or af.wrap_fsdp()."
            )
            raise OptimizerError(msg)
        if self.stage == 3 and counts_by_group(state):
            msg = (
                f"{self!r}: {type(optimizer).__name__} counts updates in its parameter groups,"
                " and at stage 3 DeepSpeed steps a group in several parts, each of which would"
                " count. Take stage 1 or 2, or af.wrap_fsdp()."
            )
            raise OptimizerError(msg)
        metas = dict(skeleton.module.named_parameters())
        ids = {id(metas[name]) for name in skeleton.trainable}
        for i, group in enumerate(optimizer.param_groups):
            if not any(id(param) in ids for param in group["params"]):
                msg = (
                    f"{self!r}: the optimizer's parameter group {i} trains nothing, and"
                    " DeepSpeed has no flat tensor of nothing. Leave the group out, or train"
                    " one of its parameters."
                )
                raise OptimizerError(msg)

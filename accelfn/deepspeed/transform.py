# SPDX-License-Identifier: Apache-2.0
"""Split the optimizer, the gradients and the model over the ranks with DeepSpeed's ZeRO."""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Literal, cast

import attrs
import torch
import torch.distributed as dist
from torch import nn

from accelfn.deepspeed.settings import (
    check_installed,
    check_settings,
    check_values,
    settings_of,
)
from accelfn.definition.layout import by_rows
from accelfn.definition.transform import facts_of, transform
from accelfn.engine.engine import Engine, build
from accelfn.engine.fsdp import units_of
from accelfn.engine.optimizer import check_elements, counts_by_group
from accelfn.errors import (
    ArgumentError,
    CompositionError,
    ModelError,
    OptimizerError,
    WorldError,
)
from accelfn.model.optimizer import Partitioned
from accelfn.state.state import TrainState
from accelfn.world import World

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
    """Split the optimizer's state, gradients and parameters over the ranks with DeepSpeed's ZeRO.

    The real package runs the loss, its hooks reduce the gradients, and its optimizer steps the
    part of the parameters that a rank has. What accelfn keeps of it is the state: parameters,
    optimizer state and slots are the rows that `wrap_fsdp` has, so a state is saved, loaded,
    averaged, evaluated and laid out anew as any other, and nothing of DeepSpeed's is in a
    checkpoint. While states are stepped their elements lie in DeepSpeed's own order, and are
    brought into rows when they are read: **reading `state.params` or `state.opt_state` after a
    step is a collective**, for all ranks or none, as is every operation on a DTensor. In a world
    of 1 it changes nothing.

    The weights of the ranks' losses are summed beside the gradients, and DeepSpeed divides by
    them before it clips, so the result is the mean over all samples (or tokens) of the update,
    however uneven the shares. An update whose gradients are not finite is left out by all ranks,
    and counted; `metrics["skipped"]` tells. `skip_nonfinite` beside it lets a loss be so, too, and
    raises after too many.

    DeepSpeed sends gradients as they come. At stages 1 and 2 each waits for its turn here, in
    the order in which rank 0's came at first, so ranks may use the model in different orders. At
    stage 3 modules are gathered as they run, which cannot wait: where all ranks have gone one
    way before nothing is compared, elsewhere each place is. A rank that leaves such a way asks
    the others, and gives up after half of the world's timeout.

    Acts on: layout, engine; init, which refuses.

    Args:
        stage: 1 splits the optimizer's state, 2 gradients too, 3 parameters too.
        config: DeepSpeed's own settings, those of `zero_optimization` and of how it talks. What
            accelfn says, as batch size, rates, clipping or checkpoints, is refused by name.
        accumulate: under several micro-batches, "whole" keeps whole gradients on each rank until
            the last one, which alone reduces; "sharded" reduces with each, and at stages 2 and 3
            keeps parts.

    Law:
        Parameters and optimizer state are those of one process on the whole batch, up to
        rounding, for any number of ranks. A state goes on bitwise as if no other had been
        stepped between. What was saved is loaded into any other layout bitwise.

    Cost:
        DeepSpeed's own: stages 1 and 2 hold whole parameters on each rank, and a float32 part;
        all hold 1/n of the optimizer's state. Another state is bound by pointers, and at stages
        1 and 2 gathered once; one that was loaded, or stepped by another engine, is first
        brought into DeepSpeed's order: an all-to-all of its bytes. So is what is read into rows,
        once an update. The first step builds DeepSpeed's engine, for which each rank holds the
        whole model.

    Raises:
        ArgumentError: a setting is none, or one that accelfn says; DeepSpeed is not installed.
        CompositionError: when composed or built, beside what sees gradients, but
            `clip_grad_norm` and `skip_nonfinite`, or reduces them, or runs the model otherwise.
        WorldError: when the state is made, in a simulated world, in one that is not all of the
            process's, or one with axes beside "dp_shard".
        ModelError: when the state is made, a parameter is not of float32, or has no elements.
        OptimizerError: when the state is made, the optimizer does not go element by element, or
            a parameter group trains nothing, or at stage 3 counts updates; at a step,
            parameters of a group have other counts.
        UnusedParametersError: at a step, a parameter took no part in the loss, on some ranks
            or on all; those are named on all ranks.
        LossError: at stage 3, in a loss function's first pass, it computed with a parameter that
            was not gathered; or at a step, ranks used the model in different ways; all raise it, or
            `PeerFailedError` where only one leaves a way that all have gone before.
        GradsError: at `apply_grads`, of gradients that DeepSpeed does not hold any more.

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
        " Take af.wrap_fsdp() beside it.",
        "splits_sequences": "has DeepSpeed average over all ranks, and under {other!r} some have"
        " parts of the same sample. Take af.wrap_fsdp() beside it.",
    }
    stage: Literal[1, 2, 3] = attrs.field(validator=_is_stage)
    config: Mapping[str, Any] = attrs.field(
        default=_NOTHING, validator=_is_config, hash=False
    )
    accumulate: Literal["whole", "sharded"] = attrs.field(
        default="whole", validator=_is_way
    )

    def __attrs_post_init__(self) -> None:
        """Raise where DeepSpeed is not installed, or takes a setting's value for none."""
        check_installed("af.wrap_deepspeed")
        check_values("af.wrap_deepspeed", self.config)

    @property
    def tells(self) -> Mapping[str, Any]:
        """What gradients are before the last micro-batch."""
        return {"draws_nothing": True, "whole_gradients": self.accumulate == "whole"}

    def layout(
        self, name: str, meta: torch.Tensor, axes: Mapping[str, int]
    ) -> Mapping[str, int] | None:
        """Cut rows along dp_shard, as af.wrap_fsdp does."""
        del name, axes
        return by_rows(meta)

    def init(self, state: TrainState) -> None:
        """Refuse what DeepSpeed cannot train, or would train otherwise."""
        self._check_world(state.world)
        self._check_grads(state)
        self._check_model(state)
        self._check_optimizer(state)
        check_elements(state, f"{self!r}", dims=(0,))

    def engine(self, state: TrainState) -> Engine:
        """Build DeepSpeed's engine around a module that takes the state's elements."""
        from accelfn.deepspeed.home import ZeroBinding, ZeroOptimizer, ZeroRunner  # noqa: PLC0415
        from accelfn.engine.fsdp import Splitter  # noqa: PLC0415

        if state.definition.layout is None:
            msg = f"{self!r}: the model has lone numbers alone, and nothing to split."
            raise ModelError(msg)
        self._check_grads(state)  # with_setup and with_trainable do not ask init again
        self._check_optimizer(state)
        clips = state.definition.setup.facts.get("clips", ())
        config = settings_of(
            self.config, stage=self.stage, max_norm=min(clips, default=None)
        )
        ranks = state.definition.copy
        splitter = Splitter(
            mesh=state.definition.splits.mesh,
            units=partial(units_of, regions=None, whose=f"{self!r}"),
            reshard_after_forward=True,
            gather_dtype=None,
            reduce_dtype=None,
            device=state.world.device,
            cpu_offload=False,
        )
        home = ZeroBinding(state, splitter, config, ranks)

        def runner(module: nn.Module, live: object) -> ZeroRunner:
            del live
            in_parts = self.accumulate == "sharded"
            return ZeroRunner(module, home, ranks, in_parts=in_parts)

        return build(state, home, runner, optimizer=ZeroOptimizer(home))

    def _check_world(self, world: World) -> None:
        """Refuse ranks that are not all of the process's group."""
        if world.connection.simulated is not None:
            msg = (
                f"{self!r}: DeepSpeed talks through the one group of a process, and simulated"
                " ranks share a process: run on processes, as accelfn launch, torchrun or"
                " accelfn.testing.run_processes start them. af.wrap_fsdp() splits in simulated"
                " worlds, too."
            )
            raise WorldError(msg)
        others = {n: s for n, s in world.axes.items() if s > 1 and n != "dp_shard"}
        if others:
            msg = (
                f"{self!r}: splits over all ranks, and the world has axes beside dp_shard:"
                f" {others}. Take af.wrap_fsdp() there."
            )
            raise WorldError(msg)
        whole = world.whole
        is_own = whole.group is dist.group.WORLD or whole.connection.is_branch
        if whole.size > 1 and not is_own:
            msg = (
                f"{self!r}: DeepSpeed talks through the process's own group, and this world is"
                " not all of it. Take the world of World.from_env()."
            )
            raise WorldError(msg)

    def _check_grads(self, state: TrainState) -> None:
        """Refuse what would look at gradients, which DeepSpeed holds."""
        for each in state.setup.owners["grads"]:
            if not {"clips", "skips_alone"} & facts_of(each).keys():
                hint = (
                    " It clips by the global 2-norm alone: af.clip_grad_norm(max_norm)."
                    if type(each).__name__ == "clip_grad_norm"
                    else " Take af.wrap_fsdp() beside it, which shows them."
                )
                msg = (
                    f"{self!r}: has DeepSpeed hold the gradients until the update, and {each!r}"
                    f" looks at them.{hint}"
                )
                raise CompositionError(msg)

    def _check_model(self, state: TrainState) -> None:
        """Refuse parameters of which DeepSpeed would keep something else."""
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
        """Refuse optimizers of which DeepSpeed would make something else."""
        optimizer, skeleton = state.definition.optimizer, state.definition.skeleton
        if isinstance(optimizer, (Partitioned, torch.optim.Adagrad)):
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
        trained = {id(metas[name]) for name in skeleton.trainable}
        for i, group in enumerate(optimizer.param_groups):
            if not any(id(param) in trained for param in group["params"]):
                msg = (
                    f"{self!r}: the optimizer's parameter group {i} trains nothing, and"
                    " DeepSpeed has no flat tensor of nothing. Leave the group out, or train"
                    " one of its parameters."
                )
                raise OptimizerError(msg)

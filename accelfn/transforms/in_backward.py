# SPDX-License-Identifier: Apache-2.0
"""Update parameters while gradients are computed, so that these are never all there."""

from collections.abc import Mapping
from typing import Any, ClassVar

from accelfn.definition.transform import transform
from accelfn.engine.optimizer.trial import tried
from accelfn.errors import OptimizerError
from accelfn.state.state import TrainState

_NEEDS_ALL = {
    "grads": "looks at all gradients",
    "loss_scale": "may skip the update after it has seen all gradients",
    "value_and_grad": "runs several backward passes, or other ones",
    "reduce": "moves gradients over the ranks when all are there",
    "stays": "weighs all of an update's samples when its gradients are there",
}


@transform
class optimizer_in_backward:
    """Step the optimizer on each parameter as soon as its gradient is complete, and free that.

    Gradients are never all alive: the peak is that of a layer. The state is given to the step
    when the first gradient is there, so a backward pass that raises after it leaves a state
    that can be used no more. The LOMO of the paper is this with `torch.optim.SGD`; any
    optimizer will do that updates each parameter by its own gradient.

    Under `wrap_ddp` a parameter is stepped when its bucket has crossed the ranks. DDP's
    buckets hold all gradients as long as it lives, so what is saved there is nothing but
    gradients beside them.

    Acts on: init, which tries the optimizer; when the optimizer steps.

    Law:
        The result is bitwise that of the plain step; over more than 2 ranks, whose numbers a
        backend adds up in an order of its own, up to rounding.

    Cost:
        A call of the optimizer for each parameter, in place of one for all. Over ranks one
        number crosses them before the backward pass.

    Raises:
        CompositionError: beside what needs all gradients: `clip_grad_norm`, fp16,
            `skip_nonfinite`, `accumulate`, `local_sgd`, `compile`; or where DDP looks for
            unused parameters.
        OptimizerError: when the state is created, of an optimizer whose parameters are not
            updated each for itself; it is tried on small ones.
        GradsError: at `value_and_grad`, which has no gradients to return.

    References:
        Lv et al. 2023, "Full Parameter Fine-tuning for Large Language Models with Limited
        Resources".

    Example:
        >>> optimizer_in_backward()
        af.optimizer_in_backward()
    """

    tells: ClassVar[Mapping[str, Any]] = {
        "draws_nothing": True,
        "steps_in_backward": True,
    }
    refuses: ClassVar[Mapping[str, str]] = {
        "steps_in_backward": "and {other!r} are one too many. Leave out one of the two.",
        **{
            field: "frees each gradient as soon as it is complete, but {other!r} "
            f"{why}. Leave out one of the two."
            for field, why in _NEEDS_ALL.items()
        },
        "finds_unused": "would step parameters that {other!r} finds unused only when the"
        " backward pass is over. Leave out {told}.",
        "compiles": "steps in the midst of the backward pass, which {other!r} makes one"
        " piece. Leave out one of the two.",
    }

    def init(self, state: TrainState) -> None:
        """Refuse an optimizer that couples parameters."""
        kind = type(state.definition.optimizer).__name__
        try:
            whole, alone = (tried(state, alone=alone) for alone in (False, True))
        except Exception as error:
            msg = (
                f"{self!r}: {kind} cannot be tried on small parameters, to see whether it"
                f" updates each for itself: {error!r}."
            )
            raise OptimizerError(msg) from error
        differ = [n for n in whole if not bool((whole[n] == alone[n]).all())]
        if differ:
            msg = (
                f"{self!r}: {kind} updates parameters by more than their own gradients:"
                f" stepped one by one, {', '.join(differ[:5])} came out otherwise. Leave"
                " this transform out, or take another optimizer."
            )
            raise OptimizerError(msg)

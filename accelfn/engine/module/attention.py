# SPDX-License-Identifier: Apache-2.0
"""Calls of attention, which something else answers while ranks share a sequence."""

import inspect
from collections.abc import Callable
from typing import Any, Self, cast

import attrs
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import (
    CheckpointFunction,
    checkpoint,
    noop_context_fn,
)

from accelfn.errors import LossError

HEADS, POSITIONS = 1, 2
"""Which dims of query, key and value they are."""


@attrs.frozen
class Attention:
    """What `F.scaled_dot_product_attention` is called with."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def three(self) -> dict[str, torch.Tensor]:
        """Return query, key and value, by name."""
        return {"query": self.query, "key": self.key, "value": self.value}

    def check_dims(self) -> None:
        """Refuse what has no dim of heads.

        Raises:
            LossError: a tensor has other dims than samples, heads, positions and features.
        """
        for name, tensor in self.three.items():
            if tensor.ndim != 4:
                msg = (
                    f"af.context_parallel: attention was called with a {name} of shape"
                    f" {tuple(tensor.shape)}; expected (samples, heads, positions, features)."
                )
                raise LossError(msg)

    def check_mask(self, num_queries: int, num_keys: int) -> None:
        """Refuse a mask that is not for all positions, of which there are so many.

        Raises:
            LossError: it is not.
        """
        mask, whole = self.attn_mask, (num_queries, num_keys)
        if mask is None:
            return
        ends = zip(mask.shape[-2:], whole, strict=False)
        if mask.ndim < 2 or any(a not in (1, b) for a, b in ends):
            msg = (
                f"af.context_parallel: attn_mask has the shape {tuple(mask.shape)}, and"
                f" attention goes over {whole[0]} x {whole[1]} positions, of which this rank"
                " has a part. Give is_causal=True, or a mask for all positions, such as a"
                " buffer of the model or one of fewer dims than seq_dim names."
            )
            raise LossError(msg)


class Attending(TorchFunctionMode):
    """Inside it, a function of ours answers `F.scaled_dot_product_attention`."""

    def __init__(self, attend: Callable[[Attention], torch.Tensor]) -> None:
        """Take the function."""
        super().__init__()
        self._attend, self._with_gradients = attend, False

    def __enter__(self) -> Self:
        """Begin to answer; note whether gradients are taken of what is computed."""
        self._with_gradients = torch.is_grad_enabled()
        return super().__enter__()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch, or attention as it is here."""
        del types
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            if self._with_gradients and _may_run_again():
                _refuse_rerun()
            return self._attend(Attention(*args, **kwargs))
        if func is F.multi_head_attention_forward:
            msg = (
                "af.context_parallel: nn.MultiheadAttention would attend to the positions of"
                " this rank alone. Compute query, key and value by layers of your own, and"
                " call F.scaled_dot_product_attention."
            )
            raise LossError(msg)
        return func(*args, **kwargs)


def _may_run_again() -> bool:
    """Whether layers that are run now may be what torch runs again in the backward pass."""
    hooks = cast("Any", torch)._C._autograd
    ignore_is_tracing = True
    is_hooked = hooks._top_saved_tensors_default_hooks(ignore_is_tracing) is not None
    return is_hooked or not torch.is_grad_enabled()


_CHECKPOINT = inspect.unwrap(checkpoint).__code__


def _refuse_rerun() -> None:
    """Refuse layers that torch runs again in the backward pass, where nobody answers for us.

    Others are let through: those without gradients, as a teacher's, are run once, and
    `af.checkpoint_activations` brings what is around a first run to the second.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__ or (
            frame.f_code is _CHECKPOINT
            and frame.f_locals["context_fn"] is noop_context_fn
        ):
            msg = (
                "af.context_parallel: a layer that attends is run by torch.utils.checkpoint,"
                " which runs it again outside the loss, where attention would see the"
                " positions of this rank alone. Leave it out (a model of Transformers has"
                " gradient_checkpointing_disable()), and add af.checkpoint_activations to the"
                " setup."
            )
            raise LossError(msg)
        frame = frame.f_back

# SPDX-License-Identifier: Apache-2.0
"""A training state of tensors that have a shape, a device and no values: torch's fake tensors."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from accelfn.base import tree
from accelfn.data.cursor import Cursor
from accelfn.definition.definition import Definition
from accelfn.definition.transform import chain
from accelfn.engine.optimizer.live_optimizer import LiveOptimizer
from accelfn.state.state import TrainState
from accelfn.structure.prototype import NamedParameters, prototype_of, rebuilt
from accelfn.structure.skeleton import Skeleton, skeleton_of
from accelfn.world import World

OptimizerFactory: TypeAlias = Callable[[NamedParameters], Optimizer]
_ATEN = torch.ops.aten
_READING = (
    _ATEN.item.default,
    _ATEN._local_scalar_dense.default,
    _ATEN.is_nonzero.default,
)


def stepped_on_fakes(
    bare: Skeleton, setup: chain, optimizer: OptimizerFactory, dtype: torch.dtype
) -> tuple[TrainState, Mapping[str, Any]]:
    """Return a state of fake tensors after an update, and the slots that a setup adds to it.

    Args:
        bare: the model's structure.
        setup: transforms.
        optimizer: a factory of named parameters.
        dtype: of the parameters, and of buffers of floating point.

    Raises:
        ModelError: a transform refuses the model in this dtype.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), _Valueless(), _Copied():
        state = _stepped(_faked(bare, dtype), optimizer)
        return state, state.with_setup(setup).slots


def _faked(bare: Skeleton, dtype: torch.dtype) -> nn.Module:
    """Return a copy whose tensors are fake, and those of floating point of a dtype."""

    def fake(meta: torch.Tensor) -> torch.Tensor:
        return _like(meta, dtype if meta.is_floating_point() else meta.dtype)

    return bare.build(
        {name: fake(param) for name, param in bare.module.named_parameters()},
        {name: fake(buffer) for name, buffer in bare.module.named_buffers()},
    )


def _stepped(module: nn.Module, optimizer: OptimizerFactory) -> TrainState:
    """Return the state of a model of fake tensors after a step of its optimizer."""
    skeleton = skeleton_of(module)
    prototype, _ = prototype_of(optimizer, module, skeleton)
    params = dict(module.named_parameters())
    metas = dict(skeleton.module.named_parameters())
    memo: dict[int, Any] = {id(metas[name]): param for name, param in params.items()}
    names = {param: name for name, param in params.items()}
    live = LiveOptimizer(rebuilt(prototype, memo), names)
    live.load({})
    for name in skeleton.trainable:
        params[name].grad = torch.empty_like(params[name])
    return TrainState(
        params={name: param.detach() for name, param in params.items()},
        buffers={name: buffer.detach() for name, buffer in module.named_buffers()},
        opt_state=live.update({}),
        step=1,
        cursor=Cursor(),
        seed=0,
        slots={},
        definition=Definition(
            skeleton=skeleton,
            optimizer=prototype,
            schedule=None,
            rates=None,
            data=None,
            setup=chain(),
            world=World(),
            name="state",
        ),
    )


class _Valueless(TorchDispatchMode):
    """Reads 0.5 or 1 from tensors without values, for optimizers that look at norms.

    Those among an optimizer's options have values, which it checks.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Carry out an operation."""
        del types
        if func in _READING and getattr(args[0], "constant", None) is not None:
            args = (args[0].constant,)
        found = list(tree.tensor_leaves(args))
        if found and not any(isinstance(t, FakeTensor) for t in found):
            if func is not _ATEN.lift_fresh.default:  # which makes one fake
                with unset_fake_temporarily():
                    return func(*args, **(kwargs or {}))
        elif func in _READING:
            given = args[0].dtype
            return 0.5 if given.is_floating_point else given is torch.bool or 1
        return func(*args, **(kwargs or {}))


class _Copied(TorchFunctionMode):
    """Copies a tensor among an optimizer's options without its values, which torch cannot."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Carry out a call."""
        del types
        if func is torch.Tensor.__deepcopy__:
            given, memo = args
            memo[id(given)] = _like(given, given.dtype)
            return memo[id(given)]
        return func(*args, **(kwargs or {}))


def _like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a fake tensor of another's shape; that one may be of any kind."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)

# SPDX-License-Identifier: Apache-2.0
"""The model's structure without its tensors, and copies of it around given tensors.

A `Skeleton` is the module with every parameter and buffer on the meta device. `build`
copies that structure around tensors of a state, without copying the tensors.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import attrs
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from accelfn import streams
from accelfn.errors import ModelError

ModelSource: TypeAlias = nn.Module | Callable[[], nn.Module]


@attrs.frozen(eq=False)
class Skeleton:
    """A module's structure: classes, options, hooks, ties, and which parts are trained.

    Attributes:
        module: the module with meta tensors in place of its parameters and buffers.
        trainable: names of the parameters that require a gradient, in the module's order.
        aliases: further names of tied parameters, by name: `{"head.weight": "embed.weight"}`.
        persistent: names of the buffers that belong in an exported state dict.
    """

    module: nn.Module
    trainable: tuple[str, ...]
    aliases: Mapping[str, str]
    persistent: frozenset[str]

    def build(
        self, params: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> nn.Module:
        """Return a copy of the structure around these tensors, which are shared."""
        memo: dict[int, Any] = {}
        for name, meta in self.module.named_parameters():
            memo[id(meta)] = _parameter_like(meta, params[name])
        for name, meta in self.module.named_buffers():
            memo[id(meta)] = buffers[name].detach()
        return copy.deepcopy(self.module, memo)


def materialize(
    source: ModelSource, *, seed: int, name: str, device: torch.device
) -> nn.Module:
    """Return the module of a factory, drawn from the seed, or the instance itself.

    A factory runs on the CPU, so the same seed gives the same model on every device.

    Raises:
        ModelError: it is no module, has meta tensors, or nothing in it can be trained.
    """
    module = source
    if not isinstance(source, nn.Module):
        if not callable(source):
            msg = f"model={source!r}: expected a torch.nn.Module, or a factory of one."
            raise ModelError(msg)
        with streams.stream(streams.key(seed, name, "init"), torch.device("cpu")):
            module = source()
    if not isinstance(module, nn.Module):
        msg = (
            f"model={source!r} gave {type(module).__name__}; expected a"
            " torch.nn.Module, or a factory that takes no argument and returns one."
        )
        raise ModelError(msg)
    _check(module)
    module = module.to(device)
    if not module.training:
        # from_pretrained hands out models in evaluation mode; a loop would call train().
        module.train()
    return module


def skeleton_of(module: nn.Module) -> Skeleton:
    """Return the structure of a module; the module is left as it is."""
    memo: dict[int, Any] = {}
    for param in module.parameters():
        memo[id(param)] = _parameter_like(param, torch.empty_like(param, device="meta"))
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    try:
        bare = copy.deepcopy(module, memo)
    except RuntimeError as error:
        msg = (
            f"{type(module).__name__} cannot be copied: {error}. A module keeps its"
            " tensors as parameters or buffers, not as computed tensors in plain"
            " attributes."
        )
        raise ModelError(msg) from error
    names = {id(param): name for name, param in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    persistent = set(module.state_dict(keep_vars=True))
    return Skeleton(
        module=bare,
        trainable=tuple(n for n, p in module.named_parameters() if p.requires_grad),
        aliases={name: names[id(p)] for name, p in every if name != names[id(p)]},
        persistent=frozenset(n for n, _ in module.named_buffers() if n in persistent),
    )


def _parameter_like(param: torch.Tensor, data: torch.Tensor) -> nn.Parameter:
    made = nn.Parameter(data.detach(), requires_grad=param.requires_grad)
    vars(made).update(vars(param))
    return made


def _check(module: nn.Module) -> None:
    """Refuse what can't be trained, with names."""
    named = [*module.named_parameters(), *module.named_buffers()]
    lazy = [name for name, tensor in named if is_lazy(tensor)]
    if lazy:
        msg = (
            f"{type(module).__name__} has lazy parameters without a shape yet:"
            f" {', '.join(lazy[:5])}. Call it once on an example before."
        )
        raise ModelError(msg)
    meta = [name for name, tensor in named if tensor.is_meta]
    if meta:
        msg = (
            f"{len(meta)} tensors of {type(module).__name__} are on the meta device and"
            f" hold no values: {', '.join(meta[:5])}{', ...' if len(meta) > 5 else ''}."
            " Load them first (module.to_empty, then load_state_dict)."
        )
        raise ModelError(msg)
    if not any(param.requires_grad for param in module.parameters()):
        count = sum(1 for _ in module.parameters())
        msg = (
            f"{type(module).__name__} has no trainable parameter ({count} parameters in"
            " all). Set requires_grad_(True) on what is to be trained."
        )
        raise ModelError(msg)

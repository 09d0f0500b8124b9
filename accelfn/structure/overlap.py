# SPDX-License-Identifier: Apache-2.0
"""Tensors of a model that lie in the same memory and are not one parameter.

A plain loop updates both through either. A state keeps each by its name: a copy of it, or what
was loaded, has them apart, and would train otherwise than the state it came of.
"""

from collections import defaultdict
from itertools import chain as joined

import torch
from torch import nn

from accelfn.errors import ModelError


def refuse_overlap(module: nn.Module) -> None:
    """Raise if a parameter has elements that another tensor of the model has, too.

    A tied parameter, one object under two names, is one tensor and fine; so are parameters
    that have different elements of one memory, as those of an LSTM on a GPU.

    Cost: a look at where each tensor lies; of those whose ranges overlap, a byte an element.

    Raises:
        ModelError: it has; both are named.
    """
    params = {id(param) for param in module.parameters()}
    lying: dict[tuple[torch.device, int], list[tuple[str, torch.Tensor]]]
    lying = defaultdict(list)
    for name, each in joined(module.named_parameters(), module.named_buffers()):
        if _has_memory(each):
            where = each.untyped_storage().data_ptr()
            lying[each.device, where].append((name, each))
    for several in lying.values():
        for i, (first, one) in enumerate(several):
            for second, other in several[i + 1 :]:
                is_trained = id(one) in params or id(other) in params
                if is_trained and _overlap(one, other):
                    msg = (
                        f"{type(module).__name__}: {first!r} and {second!r} lie in the same"
                        " memory and are not one parameter, so a copy or a checkpoint would"
                        " have them apart and train otherwise. Tie them by one object, as in"
                        " head.weight = embed.weight, and transpose where it is used; or"
                        " give one of them a clone()."
                    )
                    raise ModelError(msg)


def _has_memory(tensor: torch.Tensor) -> bool:
    plain = type(tensor.data) is torch.Tensor and tensor.layout is torch.strided
    return plain and not tensor.is_meta and tensor.numel() > 0


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one storage have an element in common."""
    (begin, end), (begins, ends) = _range(one), _range(other)
    if end <= begins or ends <= begin:
        return False
    if one.element_size() != other.element_size():
        return True
    size = one.element_size()
    seen = torch.zeros(max(end, ends) // size, dtype=torch.bool)
    for each in (one, other):
        marks = seen.as_strided(each.shape, each.stride(), each.storage_offset())
        if each is one:
            marks.fill_(1)
        elif marks.any():
            return True
    return False


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the first behind it."""
    size, offset = tensor.element_size(), int(tensor.storage_offset())
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = offset + sum(int((length - 1) * stride) for length, stride in pairs)
    return offset * size, (last + 1) * size

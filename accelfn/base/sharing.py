# SPDX-License-Identifier: Apache-2.0
"""Values that are apart, and share their memory until one of them is written, if ever."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import torch

from accelfn.base.shards import local


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same numbers; what is written into one, the other never sees.

    On the CPU it is torch's copy-on-write: whoever writes first, through any view and by any
    operation, takes a copy, unless the other is gone by then. A registry of who looks at a
    state's tensors could not do that, for `state_dict()`, `detach()` and slices make tensors
    that it would not know of.

    Copied at once is memory that others look at, as numpy's, a file's or another process's,
    which torch cannot share in this way; a part of a larger memory, for the whole would be
    copied for each part; and what is on a device, where kernels of another stream may still
    write when the copy is made, which nobody has tried.
    """
    plain = tensor.detach()
    if plain.device.type != "cpu" or not _fills_its_memory(plain):
        return plain.clone()
    try:
        # a private name; operators of torch are tested for what they do to such tensors
        return torch._lazy_clone(plain)  # pyright: ignore[reportPrivateUsage]
    except RuntimeError:  # it is somebody else's memory, which nothing says beforehand
        return plain.clone()


def apart_from_others(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors in the memory that they have, or copies where others hold it, too.

    As a table of vectors that a factory builds an embedding around. What is looked for are
    other tensors: memory that torch has from elsewhere, as numpy's or a mapped file's, does
    not say who else holds it, and is shared.

    Cost: nothing but a look, where nobody else holds it.
    """
    by_memory: defaultdict[int, set[int]] = defaultdict(set)
    plain = {n: t for n, t in tensors.items() if _is_plain(t) and not t.is_meta}
    for tensor in plain.values():
        by_memory[_memory(tensor)].add(id(tensor))
    held = {n for n, t in plain.items() if _holders(t) > len(by_memory[_memory(t)])}
    return {
        n: t.detach().clone() if n in held else t.detach() for n, t in tensors.items()
    }


def have_memory_in_common(
    some: Iterable[torch.Tensor], others: Iterable[torch.Tensor]
) -> bool:
    """Whether one of some tensors lies in the memory of one of others."""
    return any(map(is_within(others), some))


def is_within(others: Iterable[torch.Tensor]) -> Callable[[torch.Tensor], bool]:
    """Return what says whether a tensor lies in the memory of one of others."""
    places = {_memory(local(each)) for each in others if _has_memory(each)}
    return lambda each: _has_memory(each) and _memory(local(each)) in places


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether it has any that can be told from others': a sparse tensor has several."""
    return tensor.layout is torch.strided and tensor.numel() > 0


def _memory(tensor: torch.Tensor) -> int:
    """Return what tells a plain tensor's memory from others', without values too."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def _holders(tensor: torch.Tensor) -> int:
    """Return how many tensors there are in a tensor's memory."""
    memory = tensor.untyped_storage()  # which holds itself, too
    return torch._C._storage_Use_Count(memory._cdata) - 1  # pyright: ignore[reportPrivateUsage]


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor.data) is torch.Tensor and tensor.layout is torch.strided


def _fills_its_memory(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor has all of its memory for itself."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return False
    size = tensor.numel() * tensor.element_size()
    return 0 < size == tensor.untyped_storage().nbytes()

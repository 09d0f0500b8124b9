# SPDX-License-Identifier: Apache-2.0
"""Trees of tensors: batches, slots and predictions.

A tree is a tensor, or a dict, list, tuple, namedtuple, dataclass, attrs record or `Pending`
of trees. Any other object is a leaf and passes through unchanged.
"""

import copy
import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    ValuesView,
)
from functools import cache
from typing import Any, NoReturn, Self, TypeVar, cast

import attrs
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import register_pytree_node

from accelfn.base.arguments import Number, find_hint
from accelfn.errors import ArgumentError, BatchError, CallError

# `Pending`: the result of a collective that may still be running.


class Pending:
    """The result of a collective that may still be running, from `af.start_all_reduce`.

    You can keep a `Pending` in a slot. Trees treat it as a container of its values. Copying,
    saving, comparing or sharding a state waits for the values; the copy is a `Pending` that
    has arrived. The values do not depend on when you wait.

    Example:
        >>> Pending.of(3).wait()
        3
    """

    __slots__ = ("_finish", "_values")

    def __init__(self, finish: Callable[[], Any]) -> None:
        """Create a `Pending` from a function that waits for the values and returns them.

        The function is called once.
        """
        self._finish: Callable[[], Any] | None = finish
        self._values: Any = None

    @classmethod
    def of(cls, values: Any) -> Self:
        """Return a `Pending` of values that have arrived."""
        pending = cls(lambda: values)
        pending.wait()
        return pending

    @property
    def has_arrived(self) -> bool:
        """Return whether the values have arrived."""
        return self._finish is None

    def wait(self) -> Any:
        """Wait for the values, and return them.

        Raises:
            PeerFailedError: another rank failed, left or did not arrive in time.
        """
        if self._finish is not None:
            self._values = self._finish()
            self._finish = None
        return self._values

    def then(self, change: Callable[[Any], Any]) -> "Pending":
        """Return a `Pending` that applies a function to the values when you wait for it."""
        return Pending(lambda: change(self.wait()))

    def __repr__(self) -> str:
        """Show whether the values have arrived."""
        return f"<Pending, {'arrived' if self.has_arrived else 'in flight'}>"


# Read-only views of dicts.


V = TypeVar("V")


class ReadOnly(Mapping[str, V]):
    """A read-only view of a dict, which shows later changes of the dict.

    Law: reading returns the dict's entries, or raises the error of `check`. Writing raises.
    """

    __slots__ = ("_check", "_name", "_values")

    def __init__(
        self, values: dict[str, V], name: str, check: Callable[[], None] = lambda: None
    ) -> None:
        """Create a view of a dict.

        Args:
            values: the dict.
            name: the mapping's name in the user's code, such as "state.params", for errors.
            check: a function that raises if the dict's tensors are no longer valid.
        """
        self._values, self._name, self._check = values, name, check

    @property
    def _checked_values(self) -> dict[str, V]:
        self._check()
        return self._values

    def __getitem__(self, key: str) -> V:
        """Return an entry."""
        return self._checked_values[key]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._checked_values)

    def __reversed__(self) -> Iterator[str]:
        """Iterate over the names in reverse order."""
        return reversed(self._checked_values)

    def __len__(self) -> int:
        """Return how many entries there are."""
        return len(self._checked_values)

    def __contains__(self, key: object) -> bool:
        """Return whether a name is there."""
        return key in self._checked_values

    def keys(self) -> KeysView[str]:
        """Return the names, as a dict does."""
        return self._checked_values.keys()

    def values(self) -> ValuesView[V]:
        """Return the entries, as a dict does."""
        return self._checked_values.values()

    def items(self) -> ItemsView[str, V]:
        """Return pairs of name and entry, as a dict does."""
        return self._checked_values.items()

    def copy(self) -> dict[str, V]:
        """Return a new dict with the same entries."""
        return dict(self._checked_values)

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        """Return a new dict of both mappings; the other's entries win."""
        return {**self._checked_values, **other}

    def __ror__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        """Return a new dict of both mappings; this mapping's entries win."""
        return {**other, **self._checked_values}

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy, pickle and save the view as an OrderedDict, like torch's state dicts."""
        return OrderedDict, (), None, None, iter(self._checked_values.items())

    def __repr__(self) -> str:
        """Show the dict."""
        return repr(self._checked_values)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        msg = f"{self._name} is read-only: {find_hint('writes', self._name)}."
        raise CallError(msg)

    __setitem__ = __delitem__ = __ior__ = _refuse
    update = setdefault = pop = popitem = clear = _refuse


# torch.func and torch's tree_map treat a view like a dict, and return dicts
register_pytree_node(
    ReadOnly,
    lambda view: ([*view.values()], [*view]),
    lambda leaves, names: dict(zip(names, leaves, strict=True)),
)


# Sharded tensors are torch's DTensors. Elementwise operations run on the local shards.
#
# An operator on a DTensor would take 0.1 ms, and milliseconds for the first tensor of a shape.


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor; a plain tensor is returned as is."""
    if type(tensor) is torch.Tensor:
        return tensor
    return getattr(tensor, "_local_tensor", tensor)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in float32, or unchanged if its dtype is wider, for long sums."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether a tensor or its local shard is a subclass that wraps other tensors."""
    return is_traceable_wrapper_subclass(local(tensor))


def is_shard(tensor: Any) -> bool:
    """Return whether a value is a DTensor."""
    return hasattr(tensor, "_local_tensor")


def split_as(tensor: Any, other: Any) -> Any:
    """Redistribute a DTensor to the placements of another DTensor.

    torch's operators may return other placements, such as partial sums. Redistributing costs
    nothing if the placements are equal; otherwise the ranks communicate.
    """
    if type(tensor) is torch.Tensor or not (is_shard(tensor) and is_shard(other)):
        return tensor
    if tensor.placements == other.placements:
        return tensor
    return tensor.redistribute(placements=other.placements)


def cut_axes(tensor: Any) -> tuple[str, ...]:
    """Return the mesh axes that shard a tensor; () for a plain tensor."""
    if not is_shard(tensor):
        return ()
    names = tensor.device_mesh.mesh_dim_names or ()  # a user's mesh may be unnamed
    by_axis = zip(names, tensor.placements, strict=False)
    return tuple(name for name, placement in by_axis if not placement.is_replicate())


def computes_on(tensor: Any) -> str:
    """Return the type of the device that computes with a parameter.

    An offloaded shard is stored on the CPU, but computed on another device.
    """
    return tensor.device_mesh.device_type if is_shard(tensor) else tensor.device.type


def with_local(tensor: Any, part: torch.Tensor) -> torch.Tensor:
    """Return a DTensor with the placements of `tensor` and the local shard `part`."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - rarely needed

    spec = tensor._spec
    if part.dtype is not spec.tensor_meta.dtype:
        spec = copy.copy(spec)
        spec.tensor_meta = spec.tensor_meta._replace(dtype=part.dtype)
    return DTensor(part, spec, requires_grad=False)  # pyright: ignore[reportCallIssue]


def room(part: torch.Tensor) -> int:
    """Return how many elements fit in a shard's memory, counted from its first element."""
    end = part.untyped_storage().nbytes() // part.element_size()
    return int(end - part.storage_offset())


def pad_part(part: torch.Tensor, count: int) -> torch.Tensor:
    """Copy a shard into memory with room for `count` elements."""
    memory = part.new_zeros(max(count, part.numel()))
    return memory[: part.numel()].view(part.shape).copy_(part)


def clone_shards(tensor: Any) -> torch.Tensor:
    """Copy a DTensor. The copy of the local shard has equally much unused memory at its end."""
    part = local(tensor)
    return with_local(tensor, pad_part(part.detach(), room(part)))


def tree_map(
    fn: Callable[[Any], Any],
    tree: Any,
    *,
    by_key: bool = False,
    is_leaf: Callable[[Any], bool] = lambda _: False,
) -> Any:
    """Return a tree with the same containers and `fn(leaf)` instead of every leaf.

    A dataclass or attrs record is copied, and its fields are set. Its `__init__` does not
    run, and attributes that are not fields are kept.

    Args:
        fn: the function of a leaf.
        tree: the tree.
        by_key: whether to visit the entries of dicts in the order of `leaves_by_key`.
        is_leaf: returns whether a container counts as a leaf.

    Raises:
        ArgumentError: a mapping's class does not accept a dict, or a record cannot be copied.
    """
    if isinstance(tree, torch.Tensor) or is_leaf(tree):
        return fn(tree)

    def inner(value: Any) -> Any:
        return tree_map(fn, value, by_key=by_key, is_leaf=is_leaf)

    if isinstance(tree, Mapping):
        items = cast("Mapping[Any, Any]", tree)
        order = _by_key(items) if by_key else items
        values = {key: inner(items[key]) for key in order}
        return _like(items, {key: values[key] for key in items} if by_key else values)
    if isinstance(tree, (tuple, list)):
        parts = [inner(value) for value in cast("list[Any]", tree)]
        if hasattr(tree, "_fields"):  # only this attribute identifies a namedtuple
            return cast("Any", type(tree))(*parts)
        return parts if isinstance(tree, list) else tuple(parts)
    if isinstance(tree, Pending):
        return Pending.of(inner(tree.wait()))
    return _map_record(inner, tree) if _fields(type(tree)) else fn(tree)


def _like(items: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Return `values` as a mapping of the same class as `items`."""
    if type(items) is dict or isinstance(items, ReadOnly):  # a view becomes a dict
        return values
    kind = cast("Any", type(items))
    try:
        if isinstance(items, defaultdict):
            return kind(cast("Any", items).default_factory, values)
        return kind(values)
    except TypeError as error:
        _refuse_copy(kind, f"{kind.__name__}(a_dict)", error)


def _map_record(inner: Callable[[Any], Any], record: Any) -> Any:
    try:
        result = copy.copy(record)
    except (AttributeError, TypeError) as error:
        _refuse_copy(type(record), "copy.copy", error)
    for name, value in _set_fields(record):
        object.__setattr__(result, name, inner(value))  # also works for frozen records
    return result


def _refuse_copy(kind: type, call: str, error: Exception) -> NoReturn:
    msg = (
        f"A batch, a slot or a message between ranks contains a {kind.__name__}. accelfn cannot"
        f" copy it, because {call} raises {type(error).__name__}: {error}. Use a dict instead."
    )
    raise ArgumentError(msg) from error


def _set_fields(record: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each field of a record, except fields without a value."""
    for name in _fields(type(record)):
        if hasattr(record, name):
            yield name, getattr(record, name)


@cache
def _fields(kind: type) -> tuple[str, ...]:
    """Return the fields of a dataclass or attrs record, including fields with `init=False`.

    accelfn's own records, such as a state, are leaves.
    """
    if kind.__module__.partition(".")[0] == __name__.partition(".")[0]:
        return ()
    if attrs.has(kind):
        return tuple(field.name for field in attrs.fields(kind))
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    return ()


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves in order: dicts by insertion, sequences by position."""
    leaves: list[Any] = []
    _gather(tree, leaves, by_key=False)
    return leaves


def _gather(tree: Any, leaves: list[Any], *, by_key: bool) -> None:
    # checks for tensors first, and uses no generators: every step calls it for its batch
    if isinstance(tree, torch.Tensor):
        leaves.append(tree)
    elif isinstance(tree, (list, tuple)):
        for value in cast("list[Any]", tree):
            _gather(value, leaves, by_key=by_key)
    elif isinstance(tree, Mapping):
        items = cast("Mapping[Any, Any]", tree)
        for key in _by_key(items) if by_key else items:
            _gather(items[key], leaves, by_key=by_key)
    elif isinstance(tree, Pending):
        _gather(tree.wait(), leaves, by_key=by_key)
    elif _fields(type(tree)):
        for _, value in _set_fields(tree):
            _gather(value, leaves, by_key=by_key)
    else:
        leaves.append(tree)


def leaves_by_key(tree: Any) -> list[Any]:
    """Return the leaves in an order that is equal on all ranks: dicts are sorted by key.

    Ranks may insert the same entries into a dict in different order. A dict whose keys are
    not all strings keeps its order.
    """
    leaves: list[Any] = []
    _gather(tree, leaves, by_key=True)
    return leaves


def with_leaves(tree: Any, leaves: Iterable[Any]) -> Any:
    """Return a tree with the same containers and new leaves, in the order of `leaves_by_key`."""
    rest = iter(leaves)
    return tree_map(lambda _: next(rest), tree, by_key=True)


def _by_key(items: Mapping[Any, Any]) -> Iterable[Any]:
    return sorted(items) if all(isinstance(key, str) for key in items) else items


def outline(tree: Any, show: Callable[[Any], str]) -> str:
    """Return a tree as text, with `show(leaf)` for every leaf, and dicts sorted by key."""
    if isinstance(tree, torch.Tensor):
        return show(tree)
    if isinstance(tree, Mapping):
        items = cast("Mapping[Any, Any]", tree)
        pairs = [f"{key!r}: {outline(items[key], show)}" for key in _by_key(items)]
        return f"{{{', '.join(pairs)}}}"
    if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
        parts = ", ".join(outline(v, show) for v in cast("list[Any]", tree))
        return f"[{parts}]" if isinstance(tree, list) else f"({parts})"
    if isinstance(tree, Pending):
        return f"Pending({outline(tree.wait(), show)})"
    if isinstance(tree, tuple):
        inner = cast("Any", tree)._asdict().items()
    elif _fields(type(tree)):
        inner = _set_fields(tree)
    else:
        return show(tree)
    fields = ", ".join(f"{name}={outline(value, show)}" for name, value in inner)
    return f"{type(tree).__name__}({fields})"


def tensor_leaves(tree: Any) -> list[torch.Tensor]:
    """Return the tensors among the leaves, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def clone(tree: Any) -> Any:
    """Copy a tree and its tensors; a tensor that occurs twice is copied once."""
    copies: dict[int, torch.Tensor] = {}

    def copy_once(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in copies:
            shared = is_shard(leaf)
            copies[id(leaf)] = clone_shards(leaf) if shared else leaf.detach().clone()
        return copies[id(leaf)]

    return tree_map(copy_once, tree)


def to_device(tree: Any, device: torch.device, *, opaque: bool = True) -> Any:
    """Move a tree's tensors to `device`; return the tree itself if all are there already.

    For objects with a method `to(device)`, such as packed sequences or the result of a
    tokenizer, this method is called. With `opaque=False` it is called only for containers.
    """
    leaves = tree_leaves(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    moves = opaque and any(
        _moves_itself(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor)
    )
    if not moves and all(tensor.device == device for tensor in tensors):
        return tree

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=leaf.is_pinned())
        if _moves_itself(leaf) and (opaque or _is_container(leaf)):
            return leaf.to(device)
        return leaf

    return tree_map(move, tree, is_leaf=_moves_itself)


def _moves_itself(tree: Any) -> bool:
    """Return whether an object or a container has a method `to`."""
    return callable(getattr(type(tree), "to", None))


def _is_container(tree: Any) -> bool:
    """Return whether an object is a container, whose leaves `tree_leaves` returns."""
    return isinstance(tree, (Mapping, tuple, list)) or bool(_fields(type(tree)))


def rows(tree: Any, start: int, stop: int) -> Any:
    """Slice all tensors of a tree in dim 0; scalars and other leaves stay as they are."""

    def take_rows(leaf: Any) -> Any:
        has_rows = isinstance(leaf, torch.Tensor) and leaf.ndim
        return leaf[start:stop] if has_rows else leaf

    return tree_map(take_rows, tree)


def num_rows(tree: Any) -> int:
    """Return the number of samples in a batch: the size of dim 0, equal in all tensors.

    Raises:
        BatchError: no tensor has a dim 0, or its size differs between tensors.
    """
    sizes = {leaf.size(0) for leaf in tensor_leaves(tree) if leaf.ndim > 0}
    if len(sizes) == 1:
        return sizes.pop()
    problem = "it has no tensor with a dim 0"
    if sizes:
        listing = " and ".join(map(str, sorted(sizes)))
        problem = f"dim 0 of its tensors has different sizes, {listing}"
    msg = (
        f"Cannot find the number of samples in this batch: {problem}. Return af.Loss(total, weight)"
        " from the loss function, with the number of samples as weight, or use af.batches(state)."
    )
    raise BatchError(msg)


# torch's fused (foreach) operators on lists of tensors, which have only private names.
#
# Functions whose name ends with _ change the tensors in place, and accept an empty list. For a
# sharded tensor, they change the local shard.


def _parts(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    # inlined code of `local`, for speed, because a step has many tensors
    parts: list[torch.Tensor] = []
    for tensor in tensors:
        is_plain = type(tensor) is torch.Tensor
        parts.append(tensor if is_plain else getattr(tensor, "_local_tensor", tensor))
    return parts


def mul_(tensors: Iterable[torch.Tensor], factor: Number) -> None:
    """Multiply all tensors by the same number."""
    _scale_(torch._foreach_mul_, tensors, factor)  # pyright: ignore[reportPrivateUsage]


def div_(tensors: Iterable[torch.Tensor], divisor: Number) -> None:
    """Divide all tensors by the same number."""
    _scale_(torch._foreach_div_, tensors, divisor)  # pyright: ignore[reportPrivateUsage]


def _scale_(
    operator: Callable[..., object], tensors: Iterable[torch.Tensor], number: Number
) -> None:
    """Call a fused operator with a number, which may be on another device than the tensors.

    If some tensors are on the CPU, a number on an accelerator is copied to the CPU. The copy
    waits for the device.
    """
    parts = _parts(tensors)
    if isinstance(number, torch.Tensor) and not number.is_cpu:
        number = number.cpu() if any(part.is_cpu for part in parts) else number
    if parts:
        operator(parts, number)


fused_adam_ = torch._fused_adam_  # pyright: ignore[reportPrivateUsage]
fused_adamw_ = torch._fused_adamw_  # pyright: ignore[reportPrivateUsage]


def add_(
    tensors: Iterable[torch.Tensor], others: Iterable[torch.Tensor], *, alpha: float = 1
) -> None:
    """Add to each tensor `alpha` times the matching tensor of `others`."""
    parts = _parts(tensors)
    if parts:
        torch._foreach_add_(parts, _parts(others), alpha=alpha)  # pyright: ignore[reportPrivateUsage]


def lerp_(
    tensors: Iterable[torch.Tensor], ends: Iterable[torch.Tensor], share: float
) -> None:
    """Move each tensor towards the matching tensor of `ends`, by a fraction of the distance.

    If both are equal, the tensor does not change.
    """
    parts = _parts(tensors)
    if parts:
        torch._foreach_lerp_(parts, _parts(ends), share)  # pyright: ignore[reportPrivateUsage]


def copy_(tensors: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]) -> None:
    """Copy into each tensor the matching tensor of `sources`."""
    parts = _parts(tensors)
    if parts:
        torch._foreach_copy_(parts, _parts(sources))  # pyright: ignore[reportPrivateUsage]


def norms(
    tensors: Iterable[torch.Tensor],
    norm_type: float,
    *,
    dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Return the norm of each tensor, computed in `dtype` or the tensor's dtype."""
    parts = _parts(tensors)
    return list(torch._foreach_norm(parts, norm_type, dtype=dtype)) if parts else []  # pyright: ignore[reportPrivateUsage]


def non_finite(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return 1 if any element is infinite or NaN, else 0, on the first tensor's device.

    It runs torch's unscaling kernel with the factor 1, which leaves the tensors unchanged.
    """
    parts = [_dense(local(tensor)) for tensor in tensors]
    device = parts[0].device if parts else None
    # the kernel needs a float32 flag, whatever the default dtype is
    flag = torch.zeros((), dtype=torch.float32, device=device)
    same_device = [part for part in parts if part.device == device]
    if same_device:
        torch._amp_foreach_non_finite_check_and_unscale_(  # pyright: ignore[reportPrivateUsage]
            same_device, flag, torch.ones_like(flag)
        )
    elsewhere = [part for part in parts if part.device != device]
    return flag.maximum(non_finite(elsewhere).to(device)) if elsewhere else flag


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values as a dense, real tensor."""
    if tensor.is_sparse:
        tensor = tensor._values()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def clamp_(tensors: Iterable[torch.Tensor], low: float, high: float) -> None:
    """Clamp every element of each tensor."""
    parts = _parts(tensors)
    if parts:
        torch._foreach_clamp_min_(parts, low)  # pyright: ignore[reportPrivateUsage]
        torch._foreach_clamp_max_(parts, high)  # pyright: ignore[reportPrivateUsage]


# Copies that share memory with the original until either is written (copy-on-write).


def copy_on_write(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor, on the CPU only when needed; writes to one never change the other.

    On the CPU this is torch's copy-on-write: the first write to either tensor, through any view
    and operation, makes the copy, unless the other tensor was freed.

    The copy is made immediately in three cases. torch cannot share memory that belongs to
    numpy, a file or another process. For a slice of a larger tensor, torch would copy all of
    its memory. On accelerators, a kernel of another stream may still write while the copy is
    made, which is not tested.
    """
    plain = tensor.detach()
    if plain.device.type != "cpu" or not _fills_its_memory(plain):
        return plain.clone()
    try:
        # a private function of torch, but torch tests its operators on such tensors
        return torch._lazy_clone(plain)  # pyright: ignore[reportPrivateUsage]
    except RuntimeError:  # memory that is not torch's, which cannot be detected earlier
        return plain.clone()


def copy_shared_memory(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy the tensors that share memory with tensors outside the mapping; detach the rest.

    For example, a model's embedding may wrap a table of vectors that the user keeps. Users of
    memory that are not tensors, such as numpy arrays or mapped files, are not detected: the
    memory is then shared.

    Cost: without shared memory only the check.
    """
    by_memory: defaultdict[int, set[int]] = defaultdict(set)
    plain = {n: t for n, t in tensors.items() if _is_plain(t) and not t.is_meta}
    for tensor in plain.values():
        by_memory[_memory(tensor)].add(id(tensor))
    shared = {n for n, t in plain.items() if _holders(t) > len(by_memory[_memory(t)])}
    return {
        n: t.detach().clone() if n in shared else t.detach() for n, t in tensors.items()
    }


def is_within(others: Iterable[torch.Tensor]) -> Callable[[torch.Tensor], bool]:
    """Return a function that checks whether a tensor shares memory with `others`."""
    places = {_memory(local(tensor)) for tensor in others if _has_memory(tensor)}
    return lambda tensor: _has_memory(tensor) and _memory(local(tensor)) in places


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is stored in one block of memory; sparse tensors are not."""
    return tensor.layout is torch.strided and tensor.numel() > 0


def _memory(tensor: torch.Tensor) -> int:
    """Return a number that identifies a tensor's memory, also for meta tensors."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def _holders(tensor: torch.Tensor) -> int:
    """Return the number of tensors that use a tensor's memory."""
    memory = tensor.untyped_storage()  # this object counts as a user, so subtract 1
    return torch._C._storage_Use_Count(memory._cdata) - 1  # pyright: ignore[reportPrivateUsage]


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor.data) is torch.Tensor and tensor.layout is torch.strided


def _fills_its_memory(tensor: torch.Tensor) -> bool:
    """Return whether a plain tensor covers all of its memory."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return False
    size = tensor.numel() * tensor.element_size()
    return 0 < size == tensor.untyped_storage().nbytes()

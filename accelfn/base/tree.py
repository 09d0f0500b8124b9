# SPDX-License-Identifier: Apache-2.0
"""Containers of tensors: what a batch, a slot or a prediction may be.

A tree is a tensor, or a dict, list, tuple, namedtuple, dataclass or attrs record of trees, or
one that is pending; any other object is a leaf that is passed through untouched.
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

from accelfn.base.arguments import explain_call_errors
from accelfn.errors import ArgumentError, BatchError, CallError

# `Pending`: values that ranks are still sending each other.


@explain_call_errors
class Pending:
    """Values on their way: what `af.start_reduce` returns, and a slot may keep.

    In trees, slots among them, it is a container of its values: whoever copies, saves, compares
    or lays out a state waits for them, and what they get is one that has arrived. Waiting
    early changes no bit.

    Example:
        >>> Pending.of(3).wait()
        3
    """

    __slots__ = ("_finish", "_values")

    def __init__(self, finish: Callable[[], Any]) -> None:
        """Take what waits for the values, and returns them; it is called once."""
        self._finish: Callable[[], Any] | None = finish
        self._values: Any = None

    @classmethod
    def of(cls, values: Any) -> Self:
        """Return one that has arrived."""
        made = cls(lambda: values)
        made.wait()
        return made

    @property
    def has_arrived(self) -> bool:
        """Whether somebody has waited for it already."""
        return self._finish is None

    def wait(self) -> Any:
        """Return the values; the first to ask waits for them.

        Raises:
            PeerFailedError: a rank left, failed or did not come in time.
        """
        if self._finish is not None:
            self._values = self._finish()
            self._finish = None
        return self._values

    def then(self, change: Callable[[Any], Any]) -> "Pending":
        """Return what a function makes of the values, once somebody waits for it."""
        return Pending(lambda: change(self.wait()))

    def __repr__(self) -> str:
        """Say whether it has arrived."""
        return f"<Pending, {'arrived' if self.has_arrived else 'in flight'}>"


# Mappings that are shown, and say what to write where somebody would write into them.


V = TypeVar("V")


class ReadOnly(Mapping[str, V]):
    """A dict as it is, at each moment, which is not written into.

    Law: read, it is the dict, or raises as `check` does; what would change the dict raises.
    """

    __slots__ = ("_changes", "_check", "_name", "_values")

    def __init__(
        self,
        values: dict[str, V],
        name: str,
        changes: str,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Show a dict.

        Args:
            values: the dict.
            name: what the user's code calls this mapping.
            changes: what to write instead of writing into it.
            check: raises where the dict's tensors are no longer what it was shown for.
        """
        self._values, self._name, self._changes = values, name, changes
        self._check = check

    @property
    def _shown(self) -> dict[str, V]:
        self._check()
        return self._values

    def __getitem__(self, key: str) -> V:
        """Return an entry."""
        return self._shown[key]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._shown)

    def __reversed__(self) -> Iterator[str]:
        """Iterate over the names from the last."""
        return reversed(self._shown)

    def __len__(self) -> int:
        """Return how many entries there are."""
        return len(self._shown)

    def __contains__(self, key: object) -> bool:
        """Return whether a name is there."""
        return key in self._shown

    def keys(self) -> KeysView[str]:
        """Return the names, as a dict does."""
        return self._shown.keys()

    def values(self) -> ValuesView[V]:
        """Return the entries, as a dict does."""
        return self._shown.values()

    def items(self) -> ItemsView[str, V]:
        """Return both, as a dict does."""
        return self._shown.items()

    def copy(self) -> dict[str, V]:
        """Return a dict of its own with the same entries."""
        return dict(self._shown)

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        """Return a dict with the other's entries beside these, or in their place."""
        return {**self._shown, **other}

    def __ror__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        """Return a dict with these beside the other's entries, or in their place."""
        return {**other, **self._shown}

    def __reduce__(self) -> tuple[Any, ...]:
        """Be copied, pickled and saved as torch's state dicts are, which any reader knows."""
        return OrderedDict, (), None, None, iter(self._shown.items())

    def __repr__(self) -> str:
        """Show the dict."""
        return repr(self._shown)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        msg = f"{self._name} is to be read, not written into: {self._changes}."
        raise CallError(msg)

    __setitem__ = __delitem__ = __ior__ = _refuse
    update = setdefault = pop = popitem = clear = _refuse


# Tensors of which each rank holds a part: torch's DTensors, without its operators.
#
# An operator on a DTensor costs 0.1 ms, and milliseconds at first sight of each shape. What
# is done element by element is done on the part that a rank holds.


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds: of a plain one, itself."""
    if type(tensor) is torch.Tensor:
        return tensor
    return getattr(tensor, "_local_tensor", tensor)


def have_shards(tensors: Iterable[Any]) -> bool:
    """Whether one of them is a DTensor."""
    return any(map(is_shard, tensors))


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether a tensor, or a rank's part of it, is of a class made of other tensors."""
    return is_traceable_wrapper_subclass(local(tensor))


def is_shard(tensor: Any) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "_local_tensor")


def split_as(tensor: Any, other: Any) -> Any:
    """Return a DTensor that lies on the ranks as another does.

    What operators of torch make of a DTensor may lie otherwise, as a sum that each rank has a
    part of. Cost: none where it lies so; else what torch communicates.
    """
    if type(tensor) is torch.Tensor or not (is_shard(tensor) and is_shard(other)):
        return tensor
    if tensor.placements == other.placements:
        return tensor
    return tensor.redistribute(placements=other.placements)


def cut_axes(tensor: Any) -> tuple[str, ...]:
    """Return the axes along which a tensor is cut: of a plain one, none."""
    if not is_shard(tensor):
        return ()
    names = tensor.device_mesh.mesh_dim_names or ()  # a user's mesh may have none
    placed = zip(names, tensor.placements, strict=False)
    return tuple(name for name, placement in placed if not placement.is_replicate())


def computes_on(tensor: Any) -> str:
    """Return on what kind of device a parameter is computed with; its part may lie elsewhere."""
    return tensor.device_mesh.device_type if is_shard(tensor) else tensor.device.type


def with_local(tensor: Any, part: torch.Tensor) -> torch.Tensor:
    """Return a tensor that lies over the ranks as another does, of which this is the part."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - rarely needed

    spec = tensor._spec
    if part.dtype is not spec.tensor_meta.dtype:
        spec = copy.copy(spec)
        spec.tensor_meta = spec.tensor_meta._replace(dtype=part.dtype)
    return DTensor(part, spec, requires_grad=False)  # pyright: ignore[reportCallIssue]


def room(part: torch.Tensor) -> int:
    """Return how many elements there is memory for behind a part."""
    end = part.untyped_storage().nbytes() // part.element_size()
    return int(end - part.storage_offset())


def pad_part(part: torch.Tensor, count: int) -> torch.Tensor:
    """Return a copy of a part with room for so many elements behind its corner."""
    memory = part.new_zeros(max(count, part.numel()))
    return memory[: part.numel()].view(part.shape).copy_(part)


def clone_shards(tensor: Any) -> torch.Tensor:
    """Return a DTensor of the same numbers, with as much room."""
    part = local(tensor)
    return with_local(tensor, pad_part(part.detach(), room(part)))


def tree_map(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Return the same containers with `fn(leaf)` in place of every leaf.

    A record is copied and all its fields are set: nothing of its own runs, and what is no
    field of it stays.

    Raises:
        ArgumentError: a mapping is of a kind that is not made from a dict, or a record cannot
            be copied.
    """
    return _map(fn, tree, by_key=False)


def _map(
    fn: Callable[[Any], Any],
    tree: Any,
    *,
    by_key: bool,
    whole: Callable[[Any], bool] | None = None,
) -> Any:
    """Map a tree; what is `whole` is a leaf, whatever is in it."""
    if isinstance(tree, torch.Tensor) or (whole is not None and whole(tree)):
        return fn(tree)

    def inner(value: Any) -> Any:
        return _map(fn, value, by_key=by_key, whole=whole)

    if isinstance(tree, Mapping):
        items = cast("Mapping[Any, Any]", tree)
        order = _by_key(items) if by_key else items
        mapped = {key: inner(items[key]) for key in order}
        return _like(items, {key: mapped[key] for key in items} if by_key else mapped)
    if isinstance(tree, (tuple, list)):
        parts = [inner(value) for value in cast("list[Any]", tree)]
        if hasattr(tree, "_fields"):  # the one mark by which namedtuples are known
            return cast("Any", type(tree))(*parts)
        return parts if isinstance(tree, list) else tuple(parts)
    if isinstance(tree, Pending):
        return Pending.of(inner(tree.wait()))
    return _map_record(inner, tree) if _fields(type(tree)) else fn(tree)


def _like(items: Mapping[Any, Any], mapped: dict[Any, Any]) -> Any:
    """Return a mapping of the kind of another."""
    if type(items) is dict or isinstance(items, ReadOnly):  # which shows a dict
        return mapped
    kind = cast("Any", type(items))
    try:
        if isinstance(items, defaultdict):
            return kind(cast("Any", items).default_factory, mapped)
        return kind(mapped)
    except TypeError as error:
        msg = (
            f"A {kind.__name__} stands in a batch, a slot or what ranks exchange, and"
            f" {kind.__name__}(a dict) raises TypeError: {error}. Give a dict."
        )
        raise ArgumentError(msg) from error


def _map_record(inner: Callable[[Any], Any], record: Any) -> Any:
    try:
        mapped = copy.copy(record)
    except (AttributeError, TypeError) as error:
        msg = (
            f"A {type(record).__name__} stands in a batch, a slot or what ranks exchange, and"
            f" copy.copy of it raises {type(error).__name__}: {error}. Give its parts in a"
            " dict."
        )
        raise ArgumentError(msg) from error
    for name, value in _set_fields(record):
        object.__setattr__(mapped, name, inner(value))  # frozen ones too
    return mapped


def _set_fields(record: Any) -> Iterator[tuple[str, Any]]:
    """Yield a record's fields; one that its class declares and never sets is left out."""
    for name in _fields(type(record)):
        if hasattr(record, name):
            yield name, getattr(record, name)


@cache
def _fields(kind: type) -> tuple[str, ...]:
    """Return the fields of a dataclass or attrs record, those too that are no arguments.

    accelfn's own records, a state among them, are leaves.
    """
    if kind.__module__.partition(".")[0] == __name__.partition(".")[0]:
        return ()
    if attrs.has(kind):
        return tuple(each.name for each in attrs.fields(kind))
    if dataclasses.is_dataclass(kind):
        return tuple(each.name for each in dataclasses.fields(kind))
    return ()


def tree_map_all(fn: Callable[..., Any], first: Any, *others: Any) -> Any:
    """Return the first tree with `fn(its leaf, theirs...)` in place of every leaf."""
    leaves = zip(*(tree_leaves(each) for each in (first, *others)), strict=True)
    return tree_map(lambda _: fn(*next(leaves)), first)


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves in order: dicts by insertion, sequences by position."""
    leaves: list[Any] = []
    _gather(tree, leaves, by_key=False)
    return leaves


def _gather(tree: Any, leaves: list[Any], *, by_key: bool) -> None:
    # tensors first, and no generators: a step walks its batch
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
    """Return the leaves in an order that does not depend on how dicts were filled.

    Dicts whose keys are all strings go by key, others by insertion: ranks may have put the
    same entries in in any order.
    """
    leaves: list[Any] = []
    _gather(tree, leaves, by_key=True)
    return leaves


def with_leaves(tree: Any, leaves: Iterable[Any]) -> Any:
    """Return the same containers with other leaves, given in the order of `leaves_by_key`."""
    rest = iter(leaves)
    return _map(lambda _: next(rest), tree, by_key=True)


def _by_key(items: Mapping[Any, Any]) -> Iterable[Any]:
    return sorted(items) if all(isinstance(key, str) for key in items) else items


def outline(tree: Any, show: Callable[[Any], str]) -> str:
    """Return the containers as text, with `show(leaf)` in place of every leaf; dicts by key."""
    if not isinstance(tree, torch.Tensor):
        if isinstance(tree, Mapping):
            items = cast("Mapping[Any, Any]", tree)
            inside = ", ".join(
                f"{key!r}: {outline(items[key], show)}" for key in _by_key(items)
            )
            return f"{{{inside}}}"
        if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
            parts = ", ".join(outline(v, show) for v in cast("list[Any]", tree))
            return f"[{parts}]" if isinstance(tree, list) else f"({parts})"
        if isinstance(tree, Pending):
            return f"Pending({outline(tree.wait(), show)})"
        inner: Iterable[tuple[str, Any]] = _set_fields(tree)
        if isinstance(tree, tuple):
            named = cast("Any", tree)
            inner = zip(named._fields, named, strict=True)
        elif not _fields(type(tree)):
            return show(tree)
        each = ", ".join(f"{name}={outline(value, show)}" for name, value in inner)
        return f"{type(tree).__name__}({each})"
    return show(tree)


def tensor_leaves(tree: Any) -> list[torch.Tensor]:
    """Return the tensors among the leaves, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def clone(tree: Any) -> Any:
    """Return the same tree with every tensor copied; shared tensors stay shared."""
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
    """Return the tree with its tensors on `device`; on it already, it is returned as is.

    What knows how to move itself does so, by its own `to(device)`: packed sequences, batches
    of tokenizers, records and objects of the user's. `opaque=False` leaves out those of
    which nobody can tell what tensors are in them.
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

    return _map(move, tree, by_key=False, whole=_moves_itself)


def _moves_itself(tree: Any) -> bool:
    """Whether it is an object, or a container, with a way to a device of its own."""
    return callable(getattr(type(tree), "to", None))


def _is_container(tree: Any) -> bool:
    """Whether its tensors are among the leaves of a tree that it stands in."""
    return isinstance(tree, (Mapping, tuple, list)) or bool(_fields(type(tree)))


def rows(tree: Any, start: int, stop: int) -> Any:
    """Return the tree with these rows of its tensors; what has no rows stays."""

    def cut(leaf: Any) -> Any:
        has_rows = isinstance(leaf, torch.Tensor) and leaf.ndim
        return leaf[start:stop] if has_rows else leaf

    return tree_map(cut, tree)


def num_rows(tree: Any) -> int:
    """Return how many samples a plain batch holds: the common size of dim 0.

    Raises:
        BatchError: there is no tensor with a dim 0, or they differ in it.
    """
    sizes = {leaf.size(0) for leaf in tensor_leaves(tree) if leaf.ndim > 0}
    if len(sizes) == 1:
        return sizes.pop()
    found = f"dim 0 of its tensors is {sorted(sizes)}" if sizes else "it has no tensor"
    msg = (
        f"Cannot tell how many samples this batch holds: {found}. "
        "Return af.Loss(total, weight) from the loss function, or step over af.batches."
    )
    raise BatchError(msg)


# One call for many tensors: torch's fused operators on lists, which have no public name.
#
# Functions with a _ at the end work in place; none does anything to an empty list. Of
# tensors that lie over the ranks it is the part of this rank that they work on.


def _parts(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    # as `local`, which is not called for each, for steps have many
    return [
        each if type(each) is torch.Tensor else getattr(each, "_local_tensor", each)
        for each in tensors
    ]


def _factor_for(
    number: float | torch.Tensor, tensors: Iterable[torch.Tensor]
) -> float | torch.Tensor:
    """Return a number that every tensor can be multiplied by, or divided.

    A tensor on the host takes no number of a device. The number is copied to the host then,
    for which the device is waited for, as it was for the tensors that it gave to the host.
    """
    if isinstance(number, torch.Tensor) and not number.is_cpu:
        return number.cpu() if any(each.is_cpu for each in tensors) else number
    return number


def mul_(tensors: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply each tensor by one number."""
    found = _parts(tensors)
    if found:
        factor = _factor_for(factor, found)
        torch._foreach_mul_(found, factor)  # pyright: ignore[reportPrivateUsage]


def div_(tensors: Iterable[torch.Tensor], divisor: float | torch.Tensor) -> None:
    """Divide each tensor by one number."""
    found = _parts(tensors)
    if found:
        divisor = _factor_for(divisor, found)
        torch._foreach_div_(found, divisor)  # pyright: ignore[reportPrivateUsage]


fused_adam_ = torch._fused_adam_  # pyright: ignore[reportPrivateUsage]
fused_adamw_ = torch._fused_adamw_  # pyright: ignore[reportPrivateUsage]


def add_(
    tensors: Iterable[torch.Tensor],
    others: Iterable[torch.Tensor],
    *,
    alpha: float = 1,
) -> None:
    """Add `alpha` times another tensor to each."""
    found = _parts(tensors)
    if found:
        torch._foreach_add_(found, _parts(others), alpha=alpha)  # pyright: ignore[reportPrivateUsage]


def lerp_(
    tensors: Iterable[torch.Tensor], ends: Iterable[torch.Tensor], share: float
) -> None:
    """Move each tensor towards another by a share of the way; one that is there stays."""
    found = _parts(tensors)
    if found:
        torch._foreach_lerp_(found, _parts(ends), share)  # pyright: ignore[reportPrivateUsage]


def copy_(tensors: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]) -> None:
    """Copy another tensor into each."""
    found = _parts(tensors)
    if found:
        torch._foreach_copy_(found, _parts(sources))  # pyright: ignore[reportPrivateUsage]


def norms(
    tensors: Iterable[torch.Tensor],
    norm_type: float,
    *,
    dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Return the norm of each, computed in its own dtype or the one given."""
    found = _parts(tensors)
    return list(torch._foreach_norm(found, norm_type, dtype=dtype)) if found else []  # pyright: ignore[reportPrivateUsage]


def non_finite(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return 1 if any element is infinite or not a number, else 0, on the device of the first.

    One pass, in which torch's kernel multiplies by 1: numbers stay bitwise what they are.
    """
    found = [_dense(local(tensor)) for tensor in tensors]
    device = found[0].device if found else None
    # the kernel takes float32 alone, whatever the default dtype is
    flag = torch.zeros((), dtype=torch.float32, device=device)
    here = [each for each in found if each.device == device]
    if here:
        torch._amp_foreach_non_finite_check_and_unscale_(  # pyright: ignore[reportPrivateUsage]
            here, flag, torch.ones_like(flag)
        )
    elsewhere = [each for each in found if each.device != device]
    return flag.maximum(non_finite(elsewhere).to(device)) if elsewhere else flag


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the real numbers that a tensor holds; a view."""
    if tensor.is_sparse:
        tensor = tensor._values()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def clamp_(tensors: Iterable[torch.Tensor], low: float, high: float) -> None:
    """Bound every element of each."""
    found = _parts(tensors)
    if found:
        torch._foreach_clamp_min_(found, low)  # pyright: ignore[reportPrivateUsage]
        torch._foreach_clamp_max_(found, high)  # pyright: ignore[reportPrivateUsage]


# Values that are apart, and share their memory until one of them is written, if ever.


def copy_on_write(tensor: torch.Tensor) -> torch.Tensor:
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


def copy_shared_memory(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
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

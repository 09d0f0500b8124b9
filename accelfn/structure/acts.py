# SPDX-License-Identifier: Apache-2.0
"""What a function did to tensors without values: by which operations, with which numbers.

A factory that is run with its parameters on meta leaves no values to look at. But what it did
to each tells how it would have set them: whether as the module's own `reset_parameters` does,
or otherwise, as one that loads a file, or writes zeros into a layer's weight.
"""

import math
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Act: TypeAlias = tuple[Any, ...]
"""An operation, and the numbers that it was given."""

# torch has no public word for where a tensor's memory is, if it has none
# pyright: reportPrivateUsage=false

_aten: Any = torch.ops.aten
_EMPTY = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_PAD = _aten.constant_pad_nd.default  # Transformers pads tied biases, by nothing mostly
_COPIES = {_aten.clone.default, _aten._to_copy.default}
_IS_META = cast("Any", torch.Tensor.is_meta).__get__
_VALUES = "<values>"
_FULL = "<full of>"
_CAST = 1e-2  # a number may have gone from one dtype to another


@contextmanager
def noted() -> Generator["Acts"]:
    """Give what notes all that is done to tensors on meta inside a `with` block."""
    acts = Acts()
    with _Looks(acts), acts:
        yield acts


class Acts(TorchDispatchMode):
    """Notes which operations write into tensors on meta.

    A tensor is known by its memory, which views of it share. What is known stays alive, so
    that no other gets its place: on meta that costs nothing, and elsewhere it is memory that
    nobody has written to.
    """

    def __init__(self) -> None:
        """Begin with nothing noted."""
        super().__init__()
        self._acts: dict[int, list[Act]] = {}
        self._unwritten: set[int] = set()
        self._alive: dict[int, torch.UntypedStorage] = {}

    def on(self, tensor: torch.Tensor) -> tuple[Act, ...]:
        """Return what was done to a tensor, in order."""
        return tuple(self._acts.get(_memory(tensor), ()))

    def begins(self, given: nn.Parameter, param: nn.Parameter) -> None:
        """Note with which values a parameter came, before it went to meta."""
        place = _memory(given)
        begun: list[Act] = []
        if place not in self._unwritten and given.numel():
            plain = given.detach()
            first = plain.reshape(-1)[0]
            same = bool((plain == first).all())
            begun = [(_FULL, first.item()) if same else (_VALUES,)]
        self._forget(place)
        self._note(param, begun)

    def leaves(self, tensor: torch.Tensor, act: Act) -> None:
        """Note what would have been done to a tensor, were it not on meta."""
        self._note(tensor, [*self.on(tensor), act])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Do it, and note it."""
        kwargs = kwargs or {}
        returned = func(*args, **kwargs)
        act = (str(func), *_numbers(args), *_numbers(kwargs.values()))
        given = list(_tensors([args, kwargs]))
        for tensor in _written(func, args, kwargs):
            if tensor.is_meta:
                self.leaves(tensor, act)
            else:
                self._forget(_memory(tensor))
        known = {_memory(tensor) for tensor in given}
        for tensor in _tensors([returned]):
            if _memory(tensor) not in known:
                self._note_new(func, act, given, tensor)
        return returned

    def _note_new(
        self, func: Any, act: Act, given: Sequence[torch.Tensor], made: torch.Tensor
    ) -> None:
        copied = func in _COPIES or (func == _PAD and made.shape == given[0].shape)
        if func in _EMPTY or (copied and _memory(given[0]) in self._unwritten):
            self._note(made, [])
            if not made.is_meta:
                self._unwritten.add(_memory(made))
        elif made.is_meta:
            self._note(made, list(self.on(given[0])) if copied else [act])

    def _note(self, tensor: torch.Tensor, acts: list[Act]) -> None:
        storage = tensor.untyped_storage()
        self._alive[storage._cdata], self._acts[storage._cdata] = storage, acts

    def _forget(self, place: int) -> None:
        self._unwritten.discard(place)
        self._acts.pop(place, None)
        self._alive.pop(place, None)


class _Looks(TorchFunctionMode):
    """Notes which functions of torch.nn.init leave a tensor as it is, since it is on meta.

    `trunc_normal_`, `orthogonal_`, `dirac_` and `sparse_` do: that they look is all there is.
    """

    def __init__(self, acts: Acts) -> None:
        super().__init__()
        self._acts = acts

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Do it, and look who asks."""
        if func == _IS_META and args[0].is_meta:
            asking = sys._getframe(1)
            code = asking.f_code
            if asking.f_globals is vars(nn.init):
                taken = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
                numbers = _numbers(asking.f_locals[name] for name in taken)
                self._acts.leaves(args[0], (code.co_name, *numbers))
        return func(*args, **(kwargs or {}))


def sets_alike(setting: Sequence[Act], made: Sequence[Act]) -> bool:
    """Whether one who did this to a parameter leaves it as its factory did.

    It does if the factory did nothing, or the same in the end. What is copied from values
    that are there, as from a file, is not known by an operation and its numbers: where the
    factory copied more often, it was from elsewhere.
    """
    if not setting or not made or is_full(made):
        return bool(setting)
    copies = [act for act in setting if _VALUES in act]
    return list(made[-len(setting) :]) == list(setting) and all(
        made.count(act) == setting.count(act) for act in copies
    )


def is_full(made: Sequence[Act]) -> bool:
    """Whether a parameter came with one number everywhere, and nothing was done to it."""
    return len(made) == 1 and made[0][0] == _FULL


def is_as_made(tensor: torch.Tensor, made: Sequence[Act]) -> bool:
    """Whether values are those with which a parameter came, as far as these are known."""
    if not is_full(made) or tensor.is_complex():
        return True
    ends = (float(end) for end in tensor.aminmax())
    return all(math.isclose(end, made[0][1], rel_tol=_CAST) for end in ends)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided:
                yield value
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _written(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[torch.Tensor]:
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            at_place = args[place] if place < len(args) else None
            yield from _tensors([kwargs.get(argument.name, at_place)])


def _numbers(values: Iterable[Any]) -> Iterator[Any]:
    """Give what tells one call of an operation from another; values in tensors do not."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if not value.is_meta:
                yield value.item() if value.ndim == 0 else _VALUES
        elif isinstance(value, (list, tuple)):
            yield from _numbers(value)
        elif not isinstance(value, (torch.device, torch.Generator)):
            yield value

# SPDX-License-Identifier: Apache-2.0
"""A model drawn module by module, so that nobody ever holds it whole.

The factory is run with its parameters on meta. Then a module's own parameters are made, drawn
by its `reset_parameters`, handed to who keeps a part of them, and let go, before the next
one's are. Each module draws from a generator of its own name: what it draws depends on nothing
that was drawn before.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, TypeAlias, cast

import attrs
import torch
from torch import nn

from accelfn.base import draws
from accelfn.base.arguments import why_not
from accelfn.errors import ModelError
from accelfn.structure.acts import Act, is_as_made, noted, sets_alike
from accelfn.structure.on_meta import parameters_on_meta
from accelfn.structure.skeleton import (
    ModelSource,
    check_factory,
    check_module,
    check_values,
)

# torch has no public word for a module's own parameters, without those inside it
# pyright: reportPrivateUsage=false

Keep: TypeAlias = Callable[[str, torch.Tensor], torch.Tensor]
_Ways: TypeAlias = list[tuple[str, Callable[[], object]]]
_CPU = torch.device("cpu")
_WHOLE = 'or init="whole", which draws the model as its factory does, on each rank'


@attrs.frozen(eq=False)
class Bare:
    """A model whose parameters have no values.

    Attributes:
        module: its parameters are on meta, its buffers are not.
        acts: by a parameter's name, what the factory did to it.
        places: by a parameter's name, the modules that have it, and under which name each.
    """

    module: nn.Module
    acts: Mapping[str, tuple[Act, ...]]
    places: Mapping[str, list[tuple[nn.Module, str]]]

    def put(self, params: Mapping[str, torch.Tensor]) -> None:
        """Let the module have other parameters under some names."""
        for name, param in params.items():
            for module, own in self.places[name]:
                module._parameters[own] = cast("nn.Parameter", param)


def bare(source: ModelSource, *, seed: int, name: str) -> Bare:
    """Return the model of a factory, its parameters on meta.

    Raises:
        ModelError: it is no factory, or one that needs values of parameters, or gives some
            that were there before; or no state could be made of the model.
    """
    if isinstance(source, nn.Module):
        msg = (
            f'TrainState.create(model={type(source).__name__}(...), init="shard"): the model'
            " is there already, and whole. Give a factory, which is called here, such as"
            f' functools.partial({type(source).__name__}, ...), or write init="whole".'
        )
        raise ModelError(msg)
    check_factory(source)
    with draws.seeded(draws.key(seed, name, "init"), _CPU):
        try:
            with noted() as acts, parameters_on_meta(acts.begins):
                module = source()
        except (RuntimeError, TypeError, NotImplementedError) as error:
            if not _is_of_meta(error):
                raise
            msg = (
                f'TrainState.create(init="shard"): the factory {source!r} asks for values of'
                f" parameters, which have none while it runs: {error}. Write"
                f" reset_parameters() for what sets them, {_WHOLE}."
            )
            raise ModelError(msg) from error
    check_module(module, source)
    check_values(module, drawn=False)
    for own, param in module.named_parameters():
        if not param.is_meta:
            msg = (
                f'TrainState.create(init="shard"): {own!r} of {type(module).__name__} has'
                " values from before the factory ran, or is a copy of such. Let the factory"
                ' make all modules anew, or write init="whole".'
            )
            raise ModelError(msg)
    params = dict(module.named_parameters())
    return Bare(module, {n: acts.on(p) for n, p in params.items()}, _places(module))


def drawn(bare: Bare, keep: Keep, *, seed: int, name: str) -> dict[str, torch.Tensor]:
    """Return what is kept of each parameter, in the module's order.

    Modules inside come before those around them. A parameter is drawn by the module that it
    is in, or, if that one would not set it as the factory did, by the nearest one around it
    that does: as attention sets the bias of a layer in it.

    Args:
        bare: the model; it is left without values.
        keep: a function of a parameter's name and values; it gives what is kept of them.
        seed: of the draws.
        name: of the state.

    Raises:
        ModelError: nothing sets a parameter, or not as the factory did.
    """
    kept: dict[str, torch.Tensor] = {}
    own: dict[int, list[str]] = defaultdict(list)
    for each, places in bare.places.items():
        own[id(places[0][0])].append(each)
    drawing = _Drawing(bare, keep, kept, {}, own)
    for where, module in reversed(list(bare.module.named_modules())):
        drawing.come_to(module)
        for said, way in _ways(bare.module, where, module):
            due = drawing.due(where)
            if not due:
                break
            key = draws.key(seed, name, "init", where)
            try:
                drawing.by(way, said, due, key)
            except (RuntimeError, TypeError, NotImplementedError) as error:
                if not _is_of_meta(error):
                    raise
                msg = (
                    f'TrainState.create(init="shard"): {said} asks for values that are not'
                    f" there while it draws: {error}. Let it set parameters of its own"
                    f" module alone, {_WHOLE}."
                )
                raise ModelError(msg) from error
    for lacking, why in drawing.pending.items():
        _refuse(bare, lacking, why, len(drawing.pending))
    return {n: kept[n] for n, _ in bare.module.named_parameters()}


@attrs.frozen(eq=False)
class _Drawing:
    """How far it is: what is kept already, and why other parameters are not drawn yet.

    Attributes:
        own: by a module's id, the names of the parameters that are its own.
    """

    bare: Bare
    keep: Keep
    kept: dict[str, torch.Tensor]
    pending: dict[str, str]
    own: Mapping[int, list[str]]

    def come_to(self, module: nn.Module) -> None:
        """Let a module's own parameters be drawn from now on."""
        self.pending.update(dict.fromkeys(self.own.get(id(module), ()), ""))

    def due(self, where: str) -> list[str]:
        """Return the names of what is still to be drawn in a module."""
        begin = f"{where}." if where else ""
        return [name for name in self.pending if name.startswith(begin)]

    def by(
        self, way: Callable[[], object], said: str, due: Collection[str], key: int
    ) -> None:
        """Draw what a function sets as the factory did."""
        metas = {name: _at(self.bare.places[name][0]) for name in due}
        with draws.seeded(key, _CPU), torch.no_grad(), noted() as acts:
            way()
        setting = {name: acts.on(meta) for name, meta in metas.items()}
        for name in due:
            if setting[name] or not self.pending[name]:
                self.pending[name] = _why(said, setting[name])
        alike = {
            name: metas[name]
            for name in due
            if sets_alike(setting[name], self.bare.acts[name])
            or not metas[name].numel()
        }
        if not alike:
            return
        whole = {name: _unset(meta) for name, meta in alike.items()}
        with self._placed(whole, alike), draws.seeded(key, _CPU), torch.no_grad():
            way()
        for name in alike:
            values = whole.pop(name).detach()
            if _is_unset(values):
                self.pending[name] = f"{said} leaves unset, or without a number"
            elif is_as_made(values, self.bare.acts[name]):
                del self.pending[name]
                self.kept[name] = self.keep(name, values)

    @contextmanager
    def _placed(
        self, params: Mapping[str, torch.Tensor], metas: Mapping[str, torch.Tensor]
    ) -> Generator[None]:
        self.bare.put(params)
        try:
            yield
        finally:
            self.bare.put(metas)


def _ways(root: nn.Module, where: str, module: nn.Module) -> _Ways:
    """Return what may set a module's parameters, Transformers' way before torch's."""
    kind, ways = type(module).__name__, cast("_Ways", [])
    for around in _around(root, where):
        convention: Any = getattr(around, "_init_weights", None)
        if callable(convention) and why_not(convention, module) is None:
            said = f"{type(around).__name__}._init_weights({kind})"
            ways.append((said, partial(convention, module)))
            break
    for name in (
        "reset_parameters",
        "_reset_parameters",
    ):  # attention's has the other name
        own: Any = getattr(module, name, None)
        if callable(own) and why_not(own) is None:
            ways.append((f"{kind}.{name}()", own))
    return ways


def _around(root: nn.Module, where: str) -> Iterator[nn.Module]:
    """Give a module and those around it, from the inside."""
    names = where.split(".") if where else []
    for count in range(len(names), -1, -1):
        yield root.get_submodule(".".join(names[:count]))


def _places(module: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    names = {id(param): name for name, param in module.named_parameters()}
    places: dict[str, list[tuple[nn.Module, str]]] = defaultdict(list)
    for each in module.modules():
        for own, param in each._parameters.items():
            if param is not None:
                places[names[id(param)]].append((each, own))
    return dict(places)


def _at(place: tuple[nn.Module, str]) -> nn.Parameter:
    module, own = place
    return cast("nn.Parameter", module._parameters[own])


def _unset(meta: torch.Tensor) -> nn.Parameter:
    """Return a parameter none of whose elements has a number, if its dtype knows such."""
    values = torch.empty_like(meta, device="cpu").detach()
    has_nan = values.is_floating_point() or values.is_complex()
    values.fill_(torch.nan if has_nan else 0)
    return nn.Parameter(values, requires_grad=meta.requires_grad)


def _is_unset(values: torch.Tensor) -> bool:
    """Whether an element has no number; no tensor of as many elements is made for it."""
    plain = torch.view_as_real(values) if values.is_complex() else values
    if not plain.is_floating_point() or not plain.numel():
        return False
    plain = plain.float() if plain.dtype.itemsize == 1 else plain
    return bool(plain.min().isnan())


def _is_of_meta(error: BaseException) -> bool:
    said = str(error).lower()
    return "meta" in said or "incompatible tensor type" in said


def _why(said: str, setting: Collection[Act]) -> str:
    if not setting:
        return f"{said} leaves unset, or without a number"
    return f"the factory set otherwise than {said}, as by loading it"


def _refuse(bare: Bare, name: str, why: str, count: int) -> NoReturn:
    module, own = bare.places[name][0]
    kind, where = type(module).__name__, name.rpartition(".")[0]
    here = f"the module {where!r}, a {kind}," if where else f"the model, a {kind},"
    more = f" ({count - 1} more parameters are like it.)" if count > 1 else ""
    reason = why or f"nothing sets, for {kind} has no reset_parameters()"
    theirs = type(module).__module__.startswith("torch.")
    setter = "the module around it" if theirs else kind
    msg = (
        f'TrainState.create(init="shard"): {here} has a parameter {own!r} which {reason}.'
        f"{more} Give {setter} a method reset_parameters() that sets it, and which __init__"
        f" calls, {_WHOLE}."
    )
    raise ModelError(msg)

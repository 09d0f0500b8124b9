# SPDX-License-Identifier: Apache-2.0
"""Modules lent from a state: to look at, evaluate or teach with, never the engine's own."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Literal, NoReturn, TypeAlias

import torch
from torch import nn

from accelfn.base import draws
from accelfn.base.arguments import check_word, explain_call_errors
from accelfn.base.draws import own_modes
from accelfn.base.tree import copy_on_write, local
from accelfn.collectives import gather_full
from accelfn.errors import ArgumentError, StateError
from accelfn.state.beginning import begin_slot, untouched_slots
from accelfn.state.state import TrainState, check_state
from accelfn.state.update import Update, apply_readonly

_ENDED = "_accelfn_was_lent"
_Place: TypeAlias = tuple[int, torch.Size, torch.dtype]
"""Where a tensor's memory is, and what kind it is of."""


@explain_call_errors
def eval_params(state: TrainState) -> Mapping[str, torch.Tensor]:
    """Return the parameters to evaluate and export, as the setup's transforms say.

    The state's own, unless a transform such as `ema` or `local_sgd` has others; the
    latter communicates, so call it on all ranks.
    """
    check_state("af.eval_params(state)", state)
    params = state.params
    if not state.setup.owners["eval_params"]:
        return params
    update = Update(state=state, slots=state.slots)
    before = _versions(params)
    with own_modes(state.world.device):
        found = apply_readonly("eval_params", params, update, Mapping)
    after = _versions(params)
    if before != after:
        at = [old == new for old, new in zip(before, after, strict=True)].index(False)
        owners = ", ".join(map(repr, state.setup.owners["eval_params"]))
        msg = (
            f"eval_params of {owners} wrote into the state's {[*params][at]!r}, of which nothing"
            " is left: load a checkpoint. Return tensors of your own, p * 0.5 and not"
            " p.mul_(0.5)."
        )
        raise StateError(msg)
    return found


def params_at(
    state: TrainState, call: str, at: str | None
) -> Mapping[str, torch.Tensor]:
    """Return a state's parameters where it trains, or where it is evaluated.

    Raises:
        ArgumentError: `at` is neither; or None, where transforms tell the two apart.
    """
    state.lease.check()
    owners = state.setup.owners["eval_params"]
    if at == "train" or (at is None and not owners):
        return state.params
    if at == "eval":
        return eval_params(state)
    if at is None:
        msg = (
            f"{call}: {owners[0]!r} evaluates other parameters than those that are trained."
            f' Say which: at="train", or at="eval".'
        )
        raise ArgumentError(msg)
    msg = f'{call}, at={at!r}: expected "train" or "eval".'
    raise ArgumentError(msg)


@explain_call_errors
@contextmanager
def bind(
    state: TrainState,
    *,
    at: Literal["train", "eval"] | None = None,
    gather: bool = False,
) -> Generator[nn.Module]:
    """Lend a module that holds the state's parameters and buffers, for a `with` block.

    It is a structural copy around the state's own tensors, in training mode: call
    `.eval()` on it as you need. What is written into its parameters is written into the
    state; before the first update slots begin with it, as an average does. After the block it
    is empty, and what else was set on it is gone with it.

    Args:
        state: not donated.
        at: "train" lends the parameters that are trained, "eval" those that are evaluated
            (see `ema`). It may be left out where these are the same.
        gather: whether to lend copies of whole parameters where each rank has a part; call it
            on all ranks then. What is written into these is lost.

    Raises:
        ArgumentError: they are not the same, and nothing says which.
        StateError: each rank has a part of them, and `gather` is not asked for. Or the block
            froze parameters, or thawed some, of a module that is not the one that is trained;
            or put other tensors in their place, which the state would not have.

    Cost:
        2 ms for 100 layers; no tensor is copied.
    """
    check_state("af.bind(state)", state)
    params = params_at(state, "af.bind(state)", at)
    if state.definition.layout is not None:
        if not gather:
            raise StateError(_PARTS)
        with torch.no_grad():
            params = gather_full(params, state.world, label="af.bind")
    module = state.definition.skeleton.build(params, state.buffers)
    lent = {name: (id(each), _place(each)) for name, each in _tensors(module)}
    begins = [] if at == "eval" or gather or state.num_tried else untouched_slots(state)
    before = _versions(params) if begins else []
    try:
        yield module
        _check_trained(module, state)
        if not gather:
            _check_replaced(module, lent)
        if before != _versions(params if begins else {}):
            with own_modes(state.world.device):
                slots = {owner.name: begin_slot(owner, state) for owner in begins}
            state._slots.update(slots)  # pyright: ignore[reportPrivateUsage] - as what was written
    finally:
        _end(module)


def _end(module: nn.Module) -> None:
    """Empty a module that was lent, and let nobody call it."""
    for tensor in [*module.parameters(), *module.buffers()]:
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        setattr(tensor, _ENDED, True)
    for each in module.modules():
        each.register_forward_pre_hook(_refuse_call)


def was_lent(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a module that `bind` has lent, and whose block has ended."""
    return hasattr(tensor, _ENDED)


def _refuse_call(module: nn.Module, _given: object) -> NoReturn:
    msg = (
        f"This {type(module).__name__} was lent by af.bind(state) for its with block, which has"
        " ended: it is empty. Call it in the block; af.frozen(state) is a model to keep, and"
        " af.export_model(state, path) a file."
    )
    raise StateError(msg)


def _versions(tensors: Mapping[str, torch.Tensor]) -> list[int]:
    return [local(each)._version for each in tensors.values()]


def _check_trained(module: nn.Module, state: TrainState) -> None:
    """Refuse a block that set what is trained, which would be without effect.

    To freeze the whole module is to use it, as a teacher say, and not to train less.
    """
    there = dict(module.named_parameters())
    trained = {n for n, p in there.items() if p.requires_grad and n in state.params}
    before = set(state.trainable) & there.keys()
    if trained and trained != before:
        changed = sorted(trained ^ before)
        msg = (
            f"The block of af.bind(state) changed requires_grad of {', '.join(changed[:5])},"
            " of a module that is lent and not trained. Which parameters are trained belongs"
            " to the state: state = state.with_trainable(lambda name, param: ...)."
        )
        raise StateError(msg)


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    params = module.named_parameters(remove_duplicate=False)
    return [*params, *module.named_buffers(remove_duplicate=False)]


def _place(tensor: torch.Tensor) -> _Place:
    return tensor.data_ptr(), tensor.shape, tensor.dtype


def _check_replaced(module: nn.Module, lent: Mapping[str, tuple[int, _Place]]) -> None:
    """Refuse a block that put others of their kind in the place of the state's tensors.

    Others of another kind, and parts taken out, are for a look at another model.
    """
    now = {name: (id(each), _place(each)) for name, each in _tensors(module)}
    replaced = [
        name
        for name, was in lent.items()
        if name in now and now[name] != was and now[name][1][1:] == was[1][1:]
    ]
    if replaced:
        msg = (
            f"The block of af.bind(state) put other tensors in the place of"
            f" {', '.join(replaced[:5])}, of a module that is lent: the state keeps its own."
            " Write into them, as module.load_state_dict(values) does without assign=True, or"
            " weight.copy_(values) under torch.no_grad(); or state ="
            " state.with_params(values)."
        )
        raise StateError(msg)


_PARTS = (
    "af.bind(state): each rank has a part of the parameters, which no plain module can hold."
    " Call af.bind(state, gather=True) on all ranks, for copies of the whole; af.evaluate and"
    " af.predict gather one unit at a time."
)


@explain_call_errors
def frozen(state: TrainState, *, at: Literal["train", "eval"] = "eval") -> nn.Module:
    """Return a detached module in evaluation mode, for teachers, critics and rollouts.

    It has values of its own, which nothing updates, and requires no gradient. Where each
    rank has a part of the parameters, they are gathered: call it on all ranks then.

    Args:
        state: not donated; it stays as it is.
        at: "train" takes the parameters that are trained, in place of those to evaluate.

    Law: whatever becomes of the state, the module stays bitwise as it was lent; and whatever
        is written into the module, the state stays.

    Cost:
        3 ms for 100 layers. On the CPU memory is shared until one of the two is written: the
        next update copies what somebody still holds of the module, and nothing where nobody
        does. On a device a copy of the parameters and buffers, at once.
    """
    check_state("af.frozen(state)", state)
    with own_modes(
        state.world.device
    ):  # what is made in inference mode can teach nobody
        params = params_at(state, "af.frozen(state)", at)
        with torch.no_grad():
            all_of_it = gather_full(params, state.world, label="af.frozen")
            values = {name: copy_on_write(each) for name, each in all_of_it.items()}
            buffers = {
                name: copy_on_write(each) for name, each in state.buffers.items()
            }
        module = state.definition.skeleton.build(values, buffers)
    return module.eval().requires_grad_(requires_grad=False)


@explain_call_errors
def rng(state: TrainState, purpose: str, *, shared: bool = False) -> draws.seeded:
    """Return a context in which draws are a function of the state and a purpose.

    Inside, the default generators of torch, numpy and Python are seeded from (seed, the
    state's name, purpose, step) and, unless `shared`, the rank; after it they are as before.

    Args:
        state: the moment that the draws belong to.
        purpose: a word that tells these draws from others.
        shared: the same draws on all ranks.

    Law: the same state and purpose draw the same numbers, in any process.

    Example:
        >>> with af.rng(state, "latents"):  # doctest: +SKIP
        ...     noise = torch.randn(16, 100)
    """
    check_state("af.rng(state, purpose)", state)
    check_word("af.rng", "purpose", purpose, "a word for what the draws are for")
    world = state.world
    rank = -1 if shared else world.batch.rank
    key = draws.key(state.seed, state.name, "user", purpose, rank)
    return draws.seeded(draws.fold(key, state.step), world.device)

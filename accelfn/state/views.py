# SPDX-License-Identifier: Apache-2.0
"""Modules, parameters and random numbers from a state."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Literal, NoReturn, TypeAlias

import torch
from torch import nn

from accelfn.base import draws
from accelfn.base.arguments import check_word, explain_call_errors
from accelfn.base.draws import own_modes
from accelfn.base.tree import copy_on_write, local
from accelfn.collectives.replicas import gather_full
from accelfn.errors import ArgumentError, StateError
from accelfn.state.beginning import begin_slot, untouched_slots
from accelfn.state.state import TrainState, check_state
from accelfn.state.update import Update, apply_readonly

_ENDED = "_accelfn_was_lent"
_Place: TypeAlias = tuple[int, torch.Size, torch.dtype]
"""A tensor's address, shape and dtype."""


def eval_params(state: TrainState) -> Mapping[str, torch.Tensor]:
    """Return the parameters to evaluate and export, as the setup's transforms define.

    They are the state's parameters, unless a transform such as `ema` or `local_sgd` returns
    others. `local_sgd` communicates, so call this on all ranks.
    """
    check_state("af.eval_params(state)", state)
    params = state.params
    if not state.setup.owners["eval_params"]:
        return params
    update = Update(state=state, slots=state.slots)
    before = _versions(params)
    with own_modes(state.world.device):
        eval_tensors = apply_readonly("eval_params", params, update, Mapping)
    after = _versions(params)
    if before != after:
        at = [old == new for old, new in zip(before, after, strict=True)].index(False)
        owners = ", ".join(map(repr, state.setup.owners["eval_params"]))
        msg = (
            f"eval_params of {owners} wrote into the state's {[*params][at]!r}, so its values"
            " are lost: load a checkpoint. Return new tensors, such as p * 0.5 instead of"
            " p.mul_(0.5)."
        )
        raise StateError(msg)
    return eval_tensors


def params_at(
    state: TrainState, call: str, at: str | None
) -> Mapping[str, torch.Tensor]:
    """Return a state's parameters for training, or for evaluation.

    Raises:
        ArgumentError: `at` is neither, or is None although the two differ.
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
            f' Pass at="train" or at="eval".'
        )
        raise ArgumentError(msg)
    msg = f'{call}, at={at!r}: expected "train" or "eval".'
    raise ArgumentError(msg)


@explain_call_errors
@contextmanager
def borrow_model(
    state: TrainState,
    *,
    at: Literal["train", "eval"] | None = None,
    gather: bool = False,
) -> Generator[nn.Module]:
    """Lend a module that holds the state's parameters and buffers, for a `with` block.

    The module is a structural copy around the state's tensors, in training mode: call
    `.eval()` on it if you need. Writing into its parameters changes the state; before the
    first update, slots such as an average then begin with the new values. After the block
    the module is empty, and other changes of it are lost.

    Args:
        state: not donated.
        at: "train" lends the trained parameters, "eval" the parameters for evaluation
            (see `ema`). You may omit it if these are the same.
        gather: whether to lend copies of whole parameters if each rank has a part; then call
            it on all ranks. Changes of the copies are lost.

    Raises:
        ArgumentError: the parameters differ, and `at` is missing.
        StateError: each rank has a part of the parameters, and `gather` is False. Or the block
            changed `requires_grad` of some parameters, which has no effect on the state; or
            replaced tensors, which the state would not see.

    Cost:
        2 ms for 100 layers; no tensor is copied.
    """
    check_state("af.borrow_model(state)", state)
    params = params_at(state, "af.borrow_model(state)", at)
    if state.definition.layout is not None:
        if not gather:
            raise StateError(_PARTS)
        with torch.no_grad():
            params = gather_full(params, state.world, label="af.borrow_model")
    module = state.definition.skeleton.build(params, state.buffers)
    places = {name: (id(tensor), _place(tensor)) for name, tensor in _tensors(module)}
    begins = [] if at == "eval" or gather or state.num_tried else untouched_slots(state)
    before = _versions(params) if begins else []
    try:
        yield module
        _check_trained(module, state)
        if not gather:
            _check_replaced(module, places)
        if before != _versions(params if begins else {}):
            with own_modes(state.world.device):
                slots = {owner.name: begin_slot(owner, state) for owner in begins}
            state._slots.update(slots)  # pyright: ignore[reportPrivateUsage] - as what was written
    finally:
        _end(module)


def _end(module: nn.Module) -> None:
    """Empty a lent module, and make its calls raise."""
    for tensor in [*module.parameters(), *module.buffers()]:
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        setattr(tensor, _ENDED, True)
    for submodule in module.modules():
        submodule.register_forward_pre_hook(_refuse_call)


def was_lent(tensor: torch.Tensor) -> bool:
    """Return whether a tensor belongs to a module of a `borrow_model` block that has ended."""
    return hasattr(tensor, _ENDED)


def _refuse_call(module: nn.Module, _given: object) -> NoReturn:
    msg = (
        f"This {type(module).__name__} was lent by af.borrow_model(state) for its with block, which"
        " has ended: it is empty. Call it in the block; af.snapshot_model(state) is a model to"
        " keep, and af.export_model(state, path) a file."
    )
    raise StateError(msg)


def _versions(tensors: Mapping[str, torch.Tensor]) -> list[int]:
    return [local(tensor)._version for tensor in tensors.values()]


def _check_trained(module: nn.Module, state: TrainState) -> None:
    """Raise if the block changed the set of trained parameters, which would have no effect.

    Freezing the whole module is allowed, for example to use it as a teacher.
    """
    params = dict(module.named_parameters())
    now = {n for n, p in params.items() if p.requires_grad and n in state.params}
    before = set(state.trainable) & params.keys()
    if now and now != before:
        differing = sorted(now ^ before)
        msg = (
            "The block of af.borrow_model(state) changed requires_grad of"
            f" {', '.join(differing[:5])}, of a module that is lent and not trained. Choose"
            " the trained parameters in the state:"
            " state = state.with_trainable(lambda name, param: ...)."
        )
        raise StateError(msg)


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    params = module.named_parameters(remove_duplicate=False)
    return [*params, *module.named_buffers(remove_duplicate=False)]


def _place(tensor: torch.Tensor) -> _Place:
    return tensor.data_ptr(), tensor.shape, tensor.dtype


def _check_replaced(
    module: nn.Module, places: Mapping[str, tuple[int, _Place]]
) -> None:
    """Raise if the block replaced tensors of the state by others of the same shape and dtype.

    Tensors of another shape or dtype, and removed parts, are a deliberate change of the model.
    """
    now = {name: (id(tensor), _place(tensor)) for name, tensor in _tensors(module)}
    replaced_names = [
        name
        for name, was in places.items()
        if name in now and now[name] != was and now[name][1][1:] == was[1][1:]
    ]
    if replaced_names:
        msg = (
            "The block of af.borrow_model(state) replaced the tensors"
            f" {', '.join(replaced_names[:5])} of a module that is lent: the state keeps the old"
            " ones. Write into them, as module.load_state_dict(values) does without assign=True, or"
            " weight.copy_(values) under torch.no_grad(); or state ="
            " state.with_params(values)."
        )
        raise StateError(msg)


_PARTS = (
    "af.borrow_model(state): each rank has a part of the parameters, which no plain module can"
    " hold. Call af.borrow_model(state, gather=True) on all ranks, for copies of whole parameters;"
    " af.evaluate and af.predict gather one unit at a time."
)


@explain_call_errors
def snapshot_model(
    state: TrainState, *, at: Literal["train", "eval"] | None = None
) -> nn.Module:
    """Return a detached module in evaluation mode, for teachers, critics and rollouts.

    The module has independent values, which no step updates, and requires no gradient. If
    each rank has a part of the parameters, they are gathered: then call it on all ranks.

    Args:
        state: not donated; it stays as it is.
        at: "train" takes the trained parameters, "eval" the parameters for evaluation (see
            `ema`). You may omit it if these are the same.

    Law: later updates of the state leave the module bitwise unchanged, and changes of the
        module leave the state unchanged.

    Cost:
        3 ms for 100 layers. On the CPU memory is shared until one of the two is written: the
        next update copies tensors of the module that are still referenced. On a device the
        parameters and buffers are copied at once.

    Raises:
        ArgumentError: the parameters differ, and `at` is missing.
    """
    check_state("af.snapshot_model(state)", state)
    # what is made in inference mode can teach nobody
    with own_modes(state.world.device):
        params = params_at(state, "af.snapshot_model(state)", at)
        with torch.no_grad():
            all_of_it = gather_full(params, state.world, label="af.snapshot_model")
            values = {name: copy_on_write(tensor) for name, tensor in all_of_it.items()}
            buffers = {
                name: copy_on_write(buffer) for name, buffer in state.buffers.items()
            }
        module = state.definition.skeleton.build(values, buffers)
    return module.eval().requires_grad_(requires_grad=False)


def fork_rng(state: TrainState, purpose: str, *, shared: bool = False) -> draws.seeded:
    """Return a context that makes random numbers a function of the state and a purpose.

    Inside, the default generators of torch, numpy and Python are seeded from (seed, the
    state's name, purpose, step) and, unless `shared`, the rank; afterwards they are restored.

    Args:
        state: the state that the random numbers depend on.
        purpose: a word; other purposes give other random numbers.
        shared: whether the random numbers are the same on all ranks.

    Law: the same state and purpose give the same random numbers, in any process.


    Example:
        >>> with af.fork_rng(state, "latents"):  # doctest: +SKIP
        ...     noise = torch.randn(16, 100)
    """
    check_state("af.fork_rng(state, purpose)", state)
    check_word("af.fork_rng", "purpose", purpose, "a word for what the draws are for")
    world = state.world
    rank = -1 if shared else world.batch.rank
    key = draws.key(state.seed, state.name, "user", purpose, rank)
    return draws.seeded(draws.fold(key, state.step), world.device)

# SPDX-License-Identifier: Apache-2.0
"""Get modules, parameters and random numbers from a state."""

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, NoReturn

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


def eval_params(state: TrainState) -> Mapping[str, torch.Tensor]:
    """Return the parameters for evaluation and export.

    The result is the state's parameters, unless a transform such as `ema` or `local_sgd`
    replaces them, for example by an average. Call this function on all ranks, because
    `local_sgd` communicates.
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
            f"eval_params of {owners} changed the state's parameter {[*params][at]!r} in place."
            " Its old values are lost: load a checkpoint. Let eval_params return new tensors,"
            " such as p * 0.5 instead of p.mul_(0.5)."
        )
        raise StateError(msg)
    return eval_tensors


def params_at(
    state: TrainState, call: str, at: str | None
) -> Mapping[str, torch.Tensor]:
    """Return a state's parameters for training (at="train") or for evaluation (at="eval").

    Raises:
        ArgumentError: `at` is neither "train" nor "eval"; or it is None, and the parameters for
            training and evaluation differ.
    """
    state.lease.check()
    owners = state.setup.owners["eval_params"]
    if at == "train" or (at is None and not owners):
        return state.params
    if at == "eval":
        return eval_params(state)
    if at is None:
        msg = (
            f"{call}: under {owners[0]!r} the parameters for evaluation differ from the trained"
            ' parameters. Pass at="train" or at="eval".'
        )
        raise ArgumentError(msg)
    msg = f'{call}, at={at!r}: expected "train" or "eval".'
    raise ArgumentError(msg)


class _Borrowing:
    """The context manager that `borrow_model` returns. It is not the model itself."""

    def __init__(self, block: AbstractContextManager[nn.Module]) -> None:
        self._block = block

    def __enter__(self) -> nn.Module:
        return self._block.__enter__()

    def __exit__(self, *error: Any) -> bool | None:  # noqa: PYI036 - only passes on
        return self._block.__exit__(*error)

    def __call__(self, *_args: object) -> NoReturn:
        msg = (
            "af.borrow_model(state) returns a context manager, not a model. Write `with"
            " af.borrow_model(state) as model:`, or af.snapshot_model(state) for a model that you"
            " can keep."
        )
        raise StateError(msg)


@explain_call_errors
def borrow_model(
    state: TrainState,
    *,
    at: Literal["train", "eval"] | None = None,
    gather: bool = False,
) -> AbstractContextManager[nn.Module]:
    """Use the state's parameters and buffers in a module, inside a `with` block.

    The module is a new instance with the state's own tensors, in training mode; call `.eval()`
    if you need evaluation mode. If you write into its parameters, the state changes. Before
    the first update, slots such as an average then start with the new values. After the block
    the module is empty, and other changes of the module are lost.

    Args:
        state: a state that has not been donated to a step.
        at: "train" for the trained parameters, "eval" for the parameters for evaluation (see
            `ema`). You may omit `at` if both are the same.
        gather: whether the module gets copies of the full parameters, if the parameters are
            sharded. Then call this on all ranks. Changes of the copies are lost.

    Raises:
        ArgumentError: `at` is missing, and parameters for training and evaluation differ.
        StateError: the parameters are sharded, and `gather` is False. Or the block replaced
            tensors of the module, or changed `requires_grad`, which does not change the state.

    Cost:
        2 ms for 100 layers; no tensor is copied.
    """
    return _Borrowing(_borrow(state, at=at, gather=gather))


@contextmanager
def _borrow(state: TrainState, *, at: str | None, gather: bool) -> Generator[nn.Module]:
    check_state("af.borrow_model(state)", state)
    params = params_at(state, "af.borrow_model(state)", at)
    if state.definition.layout is not None:
        if not gather:
            raise StateError(_PARTS)
        with torch.no_grad():
            params = gather_full(params, state.world, label="af.borrow_model")
    module = state.definition.skeleton.build(params, state.buffers)
    places = _places(module)
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
            state._slots.update(slots)  # pyright: ignore[reportPrivateUsage] - like the user's writes
    finally:
        _end(module)


def _end(module: nn.Module) -> None:
    """Remove the tensors from a borrowed module, and make calls of the module raise."""
    for tensor in [*module.parameters(), *module.buffers()]:
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        setattr(tensor, _ENDED, True)
    for submodule in module.modules():
        submodule.register_forward_pre_hook(_refuse_call)


def was_lent(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is from `borrow_model`, and the `with` block has ended."""
    return hasattr(tensor, _ENDED)


def _refuse_call(module: nn.Module, _given: object) -> NoReturn:
    msg = (
        f"This {type(module).__name__} comes from af.borrow_model(state), and is empty because the"
        " `with` block has ended. Call it inside the block, or use af.snapshot_model(state), which"
        " returns a model that you can keep."
    )
    raise StateError(msg)


def _versions(tensors: Mapping[str, torch.Tensor]) -> list[int]:
    return [local(tensor)._version for tensor in tensors.values()]


def _check_trained(module: nn.Module, state: TrainState) -> None:
    """Raise if the block changed `requires_grad`, because this does not change the state.

    Freezing all parameters is allowed, for example to use the module as a teacher.
    """
    params = dict(module.named_parameters())
    now = {n for n, p in params.items() if p.requires_grad and n in state.params}
    before = set(state.trainable) & params.keys()
    if now and now != before:
        differing = sorted(now ^ before)
        msg = (
            "Inside `with af.borrow_model(state)` your code changed requires_grad of"
            f" {', '.join(differing[:5])}, which has no effect on the state. Choose the trained"
            " parameters with state = state.with_trainable(lambda name, param: ...), where the"
            " function returns whether to train a parameter."
        )
        raise StateError(msg)


def _places(module: nn.Module) -> dict[str, tuple[object, ...]]:
    """Return the identity, address, shape and dtype of each tensor of a module."""
    tensors = dict(module.named_parameters(remove_duplicate=False))
    tensors |= dict(module.named_buffers(remove_duplicate=False))
    return {n: (id(t), t.data_ptr(), t.shape, t.dtype) for n, t in tensors.items()}


def _check_replaced(module: nn.Module, old: Mapping[str, tuple[object, ...]]) -> None:
    """Raise if the block replaced tensors of the state by tensors of equal shape and dtype.

    If tensors have another shape or dtype, or were removed, the model was changed on purpose.
    """
    now = _places(module)
    replaced_names = [
        name
        for name, was in old.items()
        if name in now and now[name] != was and now[name][2:] == was[2:]
    ]
    if replaced_names:
        msg = (
            "Inside `with af.borrow_model(state)` your code replaced the tensors"
            f" {', '.join(replaced_names[:5])}, but the state keeps the old tensors. Copy values"
            " into the old tensors instead, as weight.copy_(values) does under torch.no_grad(), or"
            " module.load_state_dict(values) without assign=True. Or write"
            " state = state.with_params(values)."
        )
        raise StateError(msg)


_PARTS = (
    "af.borrow_model(state): each rank has only shards of the parameters, but a module needs full"
    " parameters. Call af.borrow_model(state, gather=True) on all ranks, for copies of the full"
    " parameters. With less memory, af.evaluate and af.predict gather one unit at a time."
)


@explain_call_errors
def snapshot_model(
    state: TrainState, *, at: Literal["train", "eval"] | None = None
) -> nn.Module:
    """Return a copy of the model in evaluation mode, for teachers, critics and rollouts.

    The module has its own values, which no step changes, and its parameters require no
    gradient. If parameters are sharded, the full parameters are gathered: then call this on
    all ranks.

    Args:
        state: a state that has not been donated to a step. It is not changed.
        at: "train" for the trained parameters, "eval" for the parameters for evaluation (see
            `ema`). You may omit `at` if both are the same.

    Law: later updates of the state do not change the module, and changes of the module do not
        change the state.

    Cost:
        3 ms for 100 layers. On the CPU, state and module share memory until one of them is
        changed: the next update copies the tensors of the module, unless the module was freed.
        On other devices, parameters and buffers are copied immediately.

    Raises:
        ArgumentError: `at` is missing, and parameters for training and evaluation differ.
    """
    check_state("af.snapshot_model(state)", state)
    # not in inference mode, because a loss could not use tensors created there
    with own_modes(state.world.device):
        params = params_at(state, "af.snapshot_model(state)", at)
        with torch.no_grad():
            all_of_it = gather_full(params, state.world, label="af.snapshot_model")
            values = {name: copy_on_write(tensor) for name, tensor in all_of_it.items()}
            buffers = {n: copy_on_write(b) for n, b in state.buffers.items()}
        module = state.definition.skeleton.build(values, buffers)
    return module.eval().requires_grad_(requires_grad=False)


def fork_rng(state: TrainState, purpose: str, *, shared: bool = False) -> draws.seeded:
    """Return a context that makes random numbers depend only on the state and a purpose.

    In the `with` block, the default generators of torch, numpy and Python are seeded from the
    state's seed, name and step, from `purpose` and, unless `shared`, from the rank. After the
    block they are restored.

    Args:
        state: the state that the random numbers depend on.
        purpose: any text. Each purpose has different random numbers.
        shared: whether the random numbers are the same on all ranks.

    Law: with the same state and purpose, the random numbers are the same in any process.


    Example:
        >>> with af.fork_rng(state, "latents"):  # doctest: +SKIP
        ...     noise = torch.randn(16, 100)
    """
    check_state("af.fork_rng(state, purpose)", state)
    meaning = 'the purpose of the random numbers, such as "noise"'
    check_word("af.fork_rng", "purpose", purpose, meaning)
    world = state.world
    rank = -1 if shared else world.batch.rank
    key = draws.key(state.seed, state.name, "user", purpose, rank)
    return draws.seeded(draws.fold(key, state.step), world.device)

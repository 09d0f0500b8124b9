# SPDX-License-Identifier: Apache-2.0
"""What a user has given away: a model, or an optimizer, that a state was made of.

A state trains copies around the tensors of what it was given. The given object would follow
until a load puts other tensors into the state, and never again; what is set on it, hooks,
modes, rates, would be without effect. So it raises, whatever is asked of it. Its class is
exchanged and its content let go, so that it keeps no tensor alive either.
"""

from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer

from accelfn.errors import ModelError, OptimizerError

_NOTE = "__accelfn_given__"


def seal_model(module: nn.Module, state: str) -> None:
    """Let nobody use a module, or a part of it, that a state's tensors were in.

    A part without tensors, as an activation, is nobody's, and others may use it.
    """
    parts = [each for each in module.modules() if _has_tensors(each)]
    for each in parts:
        _seal(each, GivenModel, state)


def seal_optimizer(source: object, state: str) -> None:
    """Let nobody use an optimizer that a state has copied; a factory of one stays as it is."""
    if isinstance(source, Optimizer):
        _seal(source, GivenOptimizer, state)


def refuse_given(module: nn.Module) -> None:
    """Raise if a model, or a part of it, is another state's already.

    Raises:
        ModelError: it is.
    """
    waiting = [module]
    while waiting:
        each = waiting.pop()
        if type(each) is GivenModel:
            kind, state = _note(each)
            what = "It" if each is module else f"Its {kind}"
            shown = kind if each is module else type(module).__name__
            msg = (
                f"model={shown}: {what} is another state's already, {state!r}. Give a"
                " factory that makes new ones each time it is called (not a partial over"
                " modules), or copy.deepcopy(model) before the first."
            )
            raise ModelError(msg)
        waiting += each.children()


def _has_tensors(module: nn.Module) -> bool:
    params, buffers = module.parameters(), module.buffers()
    return any(True for each in (params, buffers) for _ in each)


def _seal(given: object, kind: type, state: str) -> None:
    note = type(given).__name__, state
    try:
        given.__class__ = kind
    except TypeError:  # its class is written in C, and stays
        return
    held = object.__getattribute__(given, "__dict__")
    held.clear()
    held[_NOTE] = note


def _note(given: object) -> tuple[str, str]:
    return object.__getattribute__(given, "__dict__")[_NOTE]


def _model_error(given: object, name: str) -> ModelError:
    kind, state = _note(given)
    return ModelError(
        f"{kind}.{name}: this {kind} was given to TrainState.create, and its tensors are the"
        f" state's, {state!r}. For a module with them write `with af.bind(state) as model:`,"
        " for the weights af.full_params(state), for files af.export_model(state, path)."
        " Modes, hooks and requires_grad_ are set before create, where they take effect, or"
        " by state.with_trainable. To keep a model of your own, give copy.deepcopy(model)."
    )


def _optimizer_error(given: object, name: str) -> OptimizerError:
    kind, state = _note(given)
    return OptimizerError(
        f"{kind}.{name}: this {kind} was given to TrainState.create, and the state"
        f" {state!r} has its options and its own state. af.make_step steps it, state.lrs and"
        " state.opt_state show it; rates are set by schedule=, or by a transform's hyper."
    )


class GivenModel(nn.Module):
    """In the place of the class of a model that a state was made of."""

    def __getattribute__(self, name: str) -> Any:
        """Refuse."""
        if _is_pythons(name):
            return object.__getattribute__(self, name)
        raise _model_error(self, name)

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse."""
        if name == "__class__":
            object.__setattr__(self, name, value)
        else:
            raise _model_error(self, name)

    def __delattr__(self, name: str) -> None:
        """Refuse."""
        raise _model_error(self, name)

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse."""
        raise _model_error(self, "forward")

    def __getitem__(self, _: Any) -> NoReturn:
        """Refuse."""
        raise _model_error(self, "__getitem__")

    def __iter__(self) -> NoReturn:
        """Refuse."""
        raise _model_error(self, "__iter__")

    def __len__(self) -> NoReturn:
        """Refuse."""
        raise _model_error(self, "__len__")

    def __bool__(self) -> bool:
        """Return that it is there, as a model is."""
        return True

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be copied or pickled."""
        raise _model_error(self, "__reduce_ex__")

    def __repr__(self) -> str:
        """Say what it was."""
        return "<{} given to the state {!r}>".format(*_note(self))


class GivenOptimizer(Optimizer):
    """In the place of the class of an optimizer that a state was made of."""

    def __getattribute__(self, name: str) -> Any:
        """Refuse."""
        if _is_pythons(name):
            return object.__getattribute__(self, name)
        raise _optimizer_error(self, name)

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse."""
        if name == "__class__":
            object.__setattr__(self, name, value)
        else:
            raise _optimizer_error(self, name)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be copied or pickled."""
        raise _optimizer_error(self, "__reduce_ex__")

    def __repr__(self) -> str:
        """Say what it was."""
        return "<{} given to the state {!r}>".format(*_note(self))


def _is_pythons(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")

# SPDX-License-Identifier: Apache-2.0
"""Where parameters have no values: none are drawn, and who asks for some is told so."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.nn import init
from torch.overrides import TorchFunctionMode

from accelfn.base.tree import tensor_leaves
from accelfn.errors import ModelError

_DRAWS = {name for name in dir(init) if name.strip("_") == name[:-1]}
"""By name, for libraries put functions of their own in the place of torch's."""


class Valueless(TorchFunctionMode):
    """Leaves tensors on meta alone where they were to be drawn, for which torch takes 0.1 ms each.

    What torch cannot do there is an error of accelfn's: torch's own `parametrize` passes over
    some of its own, and makes another model.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function, if it is no initialiser of a tensor without values.

        Raises:
            ModelError: it needs the values of one.
        """
        del types
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "a function")
        if name in _DRAWS:
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        try:
            return func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if any(each.is_meta for each in tensor_leaves([args, kwargs])):
                raise ModelError(_needs_values(name, error)) from error
            raise


def _needs_values(function: str, error: Exception) -> str:
    return (
        f"{_building()} takes values of its parameters as it is built, by {function}, and in a"
        f" block of af.empty_weights(), or in a factory that is imported into, they have none:"
        f" {str(error).splitlines()[0].rstrip('.')}. Build this model with values, as"
        " af.import_model(Net(), files); they are replaced."
    )


def _building() -> str:
    """Return the kind of the innermost module that is being built."""
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return type(owner).__name__
        frame = frame.f_back
    return "The model"

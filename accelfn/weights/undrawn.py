# SPDX-License-Identifier: Apache-2.0
"""Initial values that are not drawn, where there is no memory for them."""

from collections.abc import Callable, Mapping
from typing import Any

from torch.nn import init
from torch.overrides import TorchFunctionMode

_DRAWS = {name for name in dir(init) if name.strip("_") == name[:-1]}
"""By name, for libraries put functions of their own in the place of torch's."""


class Undrawn(TorchFunctionMode):
    """Lets initialisers leave tensors on meta alone, for which torch's own take 0.1 ms each."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function, if it is no initialiser of a tensor without values."""
        del types
        kwargs = kwargs or {}
        if getattr(func, "__name__", None) in _DRAWS:
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)

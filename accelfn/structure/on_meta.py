# SPDX-License-Identifier: Apache-2.0
"""Factories run without memory for parameters: as soon as a module has one, it is on meta."""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeAlias, cast

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from accelfn.errors import ModelError

Moved: TypeAlias = Callable[[nn.Parameter, nn.Parameter], object]
"""A function of a parameter as it was registered, and of what stands for it on meta."""


@contextmanager
def parameters_on_meta(seen: Moved | None = None) -> Generator[None]:
    """Let this thread's modules give up a parameter's memory as soon as they have it.

    Most modules register a parameter before they write into it, so that it costs nothing.

    Args:
        seen: told of each parameter, before its values are gone.

    Raises:
        ModelError: a parameter is lazy.
    """
    ours, known = threading.get_ident(), WeakIdKeyDictionary()

    def moved(
        module: nn.Module, name: str, param: nn.Parameter | None
    ) -> nn.Parameter | None:
        if param is None or param.is_meta or threading.get_ident() != ours:
            return None
        if is_lazy(param):
            msg = (
                f"{type(module).__name__} has lazy parameters without a shape before a first"
                f" call: {name}. Write the layer with its sizes, as nn.Linear(in_features,"
                " out_features)."
            )
            raise ModelError(msg)
        if param not in known:  # one tensor in two places stays one
            empty = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
            vars(empty).update(vars(param))
            known[param] = empty
            if seen is not None:
                seen(param, empty)
        return known[param]

    hook = cast("Callable[..., None]", moved)  # torch says None, and takes a parameter
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()

# SPDX-License-Identifier: Apache-2.0
"""Models without memory for their parameters, whose buffers have values all the same.

A file has no buffer that is not persistent, a table of rotary angles say: only who builds the
module can tell what is in it. So a factory is run with its parameters, and nothing else, on
the meta device; and a model of Transformers that is there already, whole on meta, is built a
second time like that, from its configuration.
"""

import sys
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import nn

from accelfn.base.arguments import why_not
from accelfn.base.calling import called
from accelfn.errors import ModelError
from accelfn.structure.on_meta import parameters_on_meta
from accelfn.weights.valueless import Valueless

M = TypeVar("M", bound=nn.Module)
Source: TypeAlias = M | Callable[[], M]


@called
@contextmanager
def empty_weights() -> Generator[None]:
    """Let modules that are built in a `with` block have parameters without values.

    Each parameter goes to the meta device as soon as a module registers it, so at most one
    has memory at a time, which no initialiser writes into. Buffers are what the module's code
    makes them: no file has those that are not persistent, as tables of rotary angles.
    `af.import_model` gives the parameters their values.

    It acts in its own thread, on what is registered there and then; a parameter that is in two
    places stays one, and is as trainable as it was. Nothing of torch is patched, and nothing
    is left behind, whatever the block raises. Blocks may stand in one another. torch's
    initialisers leave parameters alone that have no values.

    Law: `af.import_model(model, files)` into a model of such a block has the parameters and
    buffers, ties included, of the model that wrote the files, bitwise.

    Cost: the memory of one parameter, which nothing is written to.

    Raises:
        ModelError: a module is lazy, so its parameters have no shape either; or it takes values
            of its parameters as it is built, as `parametrizations.orthogonal` does.
    """
    with parameters_on_meta(), Valueless():
        yield


def built(caller: str, source: Source[M]) -> M:
    """Return a module that is given, or that of a factory, its parameters on meta.

    Raises:
        ModelError: it is neither, or the factory takes arguments.
    """
    if isinstance(source, nn.Module):
        return cast("M", source)
    said = (
        f"{caller}(model={source!r}): expected a torch.nn.Module, or a factory of one"
    )
    if not callable(source):
        msg = f"{said}."
        raise ModelError(msg)
    error = why_not(source)
    if error is not None:
        name = getattr(source, "__name__", "factory")
        msg = f"{said} that takes no argument: {error}. Write functools.partial({name}, ...)."
        raise ModelError(msg) from error
    with empty_weights():
        made = source()
    if not isinstance(made, nn.Module):
        msg = f"{said}; it returned {type(made).__name__}."
        raise ModelError(msg)
    return made


def remade(model: nn.Module, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Return values for buffers of a model on meta, by name, where they can be made again.

    That is in models of Transformers, each of which is made of its `config` alone.
    """
    library = sys.modules.get("transformers.modeling_utils")
    found: dict[str, torch.Tensor] = {}
    if not names or library is None:
        return found
    for prefix, part in model.named_modules():
        begin = f"{prefix}." if prefix else ""
        wanted = [n for n in names if n.startswith(begin) and n not in found]
        if wanted and isinstance(part, library.PreTrainedModel):
            kind: Any = type(part)
            with empty_weights():
                twin = kind(part.config)
            buffers = dict(cast("nn.Module", twin).named_buffers())
            found |= {
                n: buffers[k] for n in wanted if (k := n[len(begin) :]) in buffers
            }
    return {name: value for name, value in found.items() if not value.is_meta}

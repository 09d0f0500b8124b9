# SPDX-License-Identifier: Apache-2.0
"""Modules that torch wraps around a model, which a setup does around a loss."""

import sys
from collections.abc import Iterator

import torch
from torch import nn

from accelfn.errors import ModelError

_COMPILER = "torch._dynamo.eval_frame"
_INSIDE = "that it wraps, its ."


def refuse_wrapped(module: nn.Module) -> None:
    """Raise if a model, or a part of it, is one of torch's wrappers.

    It would do its work inside of each replica, part or graph, and the wrapped module's
    parameters would have its name before theirs, which nobody else's checkpoints have.

    Raises:
        ModelError: it is.
    """
    wrappers = [*_wrappers()]
    for name, each in module.named_modules():
        for kind, which, way in wrappers:
            if isinstance(each, kind):
                where = f"model={kind.__name__}" if each is module else f"model.{name}"
                is_one = "" if each is module else f" is a {kind.__name__}"
                msg = f"{where}{is_one}: give the plain module {which}, and put {way}."
                raise ModelError(msg)


def _wrappers() -> Iterator[tuple[type[nn.Module], str, str]]:
    """Yield kinds of wrappers, which module is to be given instead, and our way."""
    inner = f"{_INSIDE}module"
    way = "af.wrap_ddp() into the setup, which wraps the loss in one"
    yield nn.parallel.DistributedDataParallel, inner, way
    way = "af.shard_data() and af.wrap_ddp() into the setup, with a process for each device"
    yield nn.DataParallel, inner, f"{way}, as `accelfn launch` starts them"
    way = "af.compile() into the setup: what torch.jit compiled takes no other tensors"
    yield torch.jit.ScriptModule, "that torch.jit compiled", way
    if _COMPILER in sys.modules:  # else nobody has compiled any, and it takes a second
        way = "af.compile() into the setup, or af.compile(regions=...) for parts of a model"
        yield sys.modules[_COMPILER].OptimizedModule, f"{_INSIDE}_orig_mod", way

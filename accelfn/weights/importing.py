# SPDX-License-Identifier: Apache-2.0
"""`import_model`: the weights of a file that anyone wrote, in a model."""

import os
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import nn

from accelfn.base.arguments import as_path
from accelfn.base.calling import called
from accelfn.weights.empty import Source, built
from accelfn.weights.mapped import Maps
from accelfn.weights.placing import Incoming, fill, placement
from accelfn.weights.shards import shards_at

M = TypeVar("M", bound=nn.Module)


@called
def import_model(
    model: Source[M],
    source: str | os.PathLike[str],
    *,
    device_map: Mapping[str, torch.device | str | int] | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    mapped: bool = False,
) -> M:
    """Give a model the weights that safetensors files hold, and return it.

    Reads what `export_model`, `save_pretrained` of Hugging Face libraries and Accelerate's
    `save_model` write. Nothing is communicated: each rank imports for itself.

    Args:
        model: is changed. It may be on the meta device: then its tensors are made as they are
            read; `with af.empty_weights():` builds one. Or a factory, such as
            `lambda: Net(...)`, which is run in such a block. Tied parameters stay tied,
            whichever of their names a file has.
        source: a `.safetensors` file, a folder with `model.safetensors` or with
            `model.safetensors.index.json`, or such an index.
        device_map: the device of each module, by the beginning of its name, `""` for all; the
            longest counts. What none names stays where it is; from meta it goes to the CPU.
        dtype: of the floating-point tensors; default the model's own. All others are never
            converted.
        strict: False only warns about names that are missing or unexpected.
        mapped: True leaves tensors in the files, where the model has them on meta and they
            stay on the CPU in the files' dtype: nothing is read before it is used, and what
            is written goes to memory of the process, never to a file. The mapping holds the
            file, which may be replaced or removed, until the last of its tensors is gone; who
            writes into it changes the model, and who cuts it off ends the process. What
            begins at no multiple of 64 bytes in its file, where kernels round otherwise, is
            copied; `export_model` writes tensors at such multiples, others mostly do not.

    Law: a state's `export_model`, imported into its model, gives its evaluated parameters and
    its buffers, bitwise; so does one imported into its factory. With `mapped` it computes and
    trains bitwise so, too.

    Cost: one reading, a tensor at a time, a large one by as many threads as torch computes
    with: beside the model there is never more than one tensor; none where the model has
    memory that fits. What is converted on the host is read in pieces of 2**18 elements, and
    is never there whole. A factory takes memory for one parameter at a time. With `mapped` no
    reading, and a page of memory for each that was written to.

    Raises:
        CheckpointError: names differ, and the nearest are given; shapes differ, or dtypes that
            are not floating-point; no file is there; a tensor on meta would be left there. The
            model is as it was.
        CheckpointCorruptError: a file or index is cut off, or something else.
        ModelError: a buffer on the meta device is in no file, for it is not persistent, and
            the model is none of Transformers, whose buffers are made again.
        ArgumentError: a device, module or dtype is none.
    """
    path = as_path("af.import_model(model, source)", source, "a file or folder")
    module = built("af.import_model", model)
    place = placement("af.import_model", module, device_map, dtype)
    shards = shards_at(path)
    read = Maps(shards).read if mapped else shards.read
    incoming = Incoming(str(source), shards.tensors(), read, shards.read_to)
    fill(module, incoming, place, strict=strict)
    return module

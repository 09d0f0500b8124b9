# SPDX-License-Identifier: Apache-2.0
"""The kernel's names for authors of an engine, of a reader of checkpoints, or of a tracker.

The satellites (`accelfn.deepspeed`, `accelfn.interop`, `accelfn.track` and others) are written
from the public names and these. Each name has one sentence in `NAMES`, and is imported when it
is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accelfn import collectives as collectives
    from accelfn.base import arguments as arguments
    from accelfn.base import codec as codec
    from accelfn.base import devices as devices
    from accelfn.base import tree as tree
    from accelfn.base.arguments import hint_attributes as hint_attributes
    from accelfn.checkpoint import files as files
    from accelfn.checkpoint import slices as slices
    from accelfn.checkpoint.commit import new_directory as new_directory
    from accelfn.checkpoint.elastic import Source as Source
    from accelfn.checkpoint.foreign import Found as Found
    from accelfn.checkpoint.foreign import Piece as Piece
    from accelfn.checkpoint.foreign import load_found as load_found
    from accelfn.checkpoint.manifest import checkpoints_in as checkpoints_in
    from accelfn.definition.layout import Layout as Layout
    from accelfn.engine.engine import build_engine as build_engine
    from accelfn.engine.fsdp import sharded_lender as sharded_lender
    from accelfn.engine.optimizer import LiveOptimizer as LiveOptimizer
    from accelfn.engine.optimizer import check_elements as check_elements
    from accelfn.engine.optimizer import counts_by_group as counts_by_group
    from accelfn.engine.runner import LocalRunner as LocalRunner
    from accelfn.engine.runner import ReadLoss as ReadLoss
    from accelfn.engine.runner import ReplicaBinding as ReplicaBinding
    from accelfn.engine.runner import RootModule as RootModule
    from accelfn.engine.runner import Samples as Samples
    from accelfn.engine.tensor_parallel import Layers as Layers
    from accelfn.engine.tensor_parallel import SelfSplittingLayer as SelfSplittingLayer
    from accelfn.model.model import mark_placed as mark_placed
    from accelfn.model.optimizer import is_count as is_count
    from accelfn.weights.export import open_weights as open_weights
    from accelfn.weights.export import read_parts as read_parts
    from accelfn.weights.importing import Incoming as Incoming
    from accelfn.weights.importing import Mapped as Mapped
    from accelfn.weights.importing import fill_model as fill_model
    from accelfn.weights.importing import map_weights as map_weights
    from accelfn.world import axes as axes
    from accelfn.world.connection import name_error as name_error
    from accelfn.world.connection import open_store as open_store
    from accelfn.world.meeting import Words as Words
    from accelfn.world.place import asked_size as asked_size

NAMES = {
    "accelfn": {
        "collectives": "The collectives of a world, which name the ranks that disagree.",
    },
    "accelfn.base": {
        "arguments": "Checks of arguments, with errors that show the code to write.",
        "codec": "Trees of tensors and plain data as bytes, without pickle.",
        "devices": "The kinds and the number of devices, and where memory is pinned.",
        "tree": "Trees of tensors: map, copy and move them, and take a rank's part.",
    },
    "accelfn.base.arguments": {
        "hint_attributes": "Lets a record answer another library's names with the code to write.",
    },
    "accelfn.checkpoint": {
        "files": "Safetensors files, written with digests and read a tensor at a time.",
        "slices": "Boxes of a tensor, as ranks have and files hold them.",
    },
    "accelfn.checkpoint.commit": {
        "new_directory": "Writes a directory that appears when all of it is on the disk.",
    },
    "accelfn.checkpoint.elastic": {
        "Source": "A checkpoint to read: its manifest, its fields and its tensors.",
    },
    "accelfn.checkpoint.foreign": {
        "Found": "The tensors of a training that another library saved.",
        "Piece": "A tensor in files, which is read in boxes.",
        "load_found": "Makes a state of the tensors that a function finds in a folder.",
    },
    "accelfn.checkpoint.manifest": {
        "checkpoints_in": "The checkpoints in the directory of a store, by step.",
    },
    "accelfn.definition.layout": {
        "Layout": "How each parameter is cut over the ranks.",
    },
    "accelfn.engine.engine": {
        "build_engine": "Makes the engine of a transform from a binding and a maker of runners.",
    },
    "accelfn.engine.fsdp": {
        "sharded_lender": "Gives a binding the `lend` of a model that is split by rows.",
    },
    "accelfn.engine.runner": {
        "ReplicaBinding": "Binds a state to a model that each rank has whole, and takes gradients.",
        "LocalRunner": "Runs a loss forward and backward on one rank; derive your runner from it.",
        "ReadLoss": "What a runner's forward returns: a checked loss, its weight and metrics.",
        "RootModule": "A module whose forward is the loss, for a library that wraps a module.",
        "Samples": "What a runner's forward gets: a batch, its weight and the extra arguments.",
    },
    "accelfn.engine.optimizer": {
        "LiveOptimizer": "A torch optimizer that steps the parameters of a binding.",
        "check_elements": "Refuses an optimizer that does not work element by element.",
        "counts_by_group": "Whether an optimizer counts updates in its groups.",
    },
    "accelfn.engine.tensor_parallel": {
        "Layers": "What the layers of a model that is split along tp share.",
        "SelfSplittingLayer": "The base class of a layer that splits itself along tp.",
    },
    "accelfn.model.model": {
        "mark_placed": "Lets only the forward pass of a model work in a with block.",
    },
    "accelfn.model.optimizer": {
        "is_count": "Whether an optimizer's entry is a count, and not a value of a parameter.",
    },
    "accelfn.weights.export": {
        "open_weights": "Opens safetensors files, a folder of them or an index.",
        "read_parts": "Reads a model from one file, or from several with an index.",
    },
    "accelfn.weights.importing": {
        "Incoming": "The tensors of another library's model, which are read one by one.",
        "Mapped": "A memory-mapped tensor of a file, whose pages can be released.",
        "fill_model": "Fills a model with tensors that are read one by one.",
        "map_weights": "Maps all tensors of safetensors files without reading them.",
    },
    "accelfn.world": {
        "axes": "The names and sizes of a world's axes, and the ranks along them.",
    },
    "accelfn.world.connection": {
        "name_error": "An error's kind and its first line, as other ranks read it.",
        "open_store": "The store at which processes meet, on a free port.",
    },
    "accelfn.world.meeting": {
        "Words": "What an elastic launcher and its processes tell each other at a store.",
    },
    "accelfn.world.place": {
        "asked_size": "How many processes a launcher has started, and the variable for it.",
    },
}
"""The sentence of each name, by the module that it comes from."""
_MODULE_OF = {name: module for module, names in NAMES.items() for name in names}


def __getattr__(name: str) -> object:
    """Import a name."""
    if name not in _MODULE_OF:
        msg = f"module {__name__!r} has no attribute {name!r}."
        raise AttributeError(msg)
    module = import_module(_MODULE_OF[name])
    value = getattr(module, name, None) or import_module(f"{module.__name__}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return all names, those too that are not imported yet."""
    return sorted({*globals(), *_MODULE_OF})

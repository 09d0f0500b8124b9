# SPDX-License-Identifier: Apache-2.0
"""The kernel's names for authors of an engine, of a reader of checkpoints, or of a tracker.

The satellites (`accelfn.deepspeed`, `accelfn.interop`, `accelfn.track` and others) are written
from the public names and these. Each name has a comment, and is imported when it is first used.
"""

from typing import TYPE_CHECKING

from accelfn.base.arguments import import_later, names_for_later

if TYPE_CHECKING:
    # The collectives of a world, which name the ranks that disagree.
    from accelfn import collectives as collectives

    # Checks of arguments, with errors that show the code to write.
    from accelfn.base import arguments as arguments

    # Trees of tensors and plain data as bytes, without pickle.
    from accelfn.base import codec as codec

    # The kinds and the number of devices, and where memory is pinned.
    from accelfn.base import devices as devices

    # The random number generators of a rank, and their keys.
    from accelfn.base import draws as draws

    # Calls of the operating system that macOS or Windows lack.
    from accelfn.base import system as system

    # Trees of tensors: map, copy and move them, and take a rank's part.
    from accelfn.base import tree as tree

    # Saves that a thread writes while training continues.
    from accelfn.checkpoint import background as background

    # Safetensors files, written with digests and read a tensor at a time.
    from accelfn.checkpoint import files as files

    # Makes a state of the tensors that another library saved.
    from accelfn.checkpoint import foreign as foreign

    # Boxes of a tensor, as ranks have and files hold them.
    from accelfn.checkpoint import slices as slices

    # Writes a directory that appears when all of it is on the disk.
    from accelfn.checkpoint.commit import new_directory as new_directory

    # A checkpoint to read: its manifest, its fields and its tensors.
    from accelfn.checkpoint.elastic import Source as Source

    # The checkpoints in the directory of a store, by step.
    from accelfn.checkpoint.manifest import checkpoints_in as checkpoints_in

    # The fields of a state, as a checkpoint saves them.
    from accelfn.checkpoint.save import fields_of as fields_of

    # A state with the fields of another, as they were saved.
    from accelfn.checkpoint.save import with_fields as with_fields

    # The fields and facts of a transform.
    from accelfn.definition import transform as transform

    # How each parameter is cut over the ranks.
    from accelfn.definition.layout import Layout as Layout

    # Makes the engine of a transform from a binding and a maker of runners.
    from accelfn.engine.engine import build_engine as build_engine

    # Gives a binding the `lend` of a model that is split by rows.
    from accelfn.engine.fsdp import sharded_lender as sharded_lender

    # A torch optimizer that steps the parameters of a binding.
    from accelfn.engine.optimizer import LiveOptimizer as LiveOptimizer

    # Refuses an optimizer that does not work element by element.
    from accelfn.engine.optimizer import check_elements as check_elements

    # Whether an optimizer counts updates in its groups.
    from accelfn.engine.optimizer import counts_by_group as counts_by_group

    # Runs a loss forward and backward on one rank; derive your runner from it.
    from accelfn.engine.runner import LocalRunner as LocalRunner

    # A runner's forward returns it: a checked loss, its weight and metrics.
    from accelfn.engine.runner import ReadLoss as ReadLoss

    # Binds a state to a model that each rank has whole, and takes gradients.
    from accelfn.engine.runner import ReplicaBinding as ReplicaBinding

    # A module whose forward is the loss, for a library that wraps a module.
    from accelfn.engine.runner import RootModule as RootModule

    # A runner's forward gets it: a batch, its weight and the extra arguments.
    from accelfn.engine.runner import Samples as Samples

    # The state that the layers of a model split along tp share.
    from accelfn.engine.tensor_parallel import Layers as Layers

    # The base class of a layer that splits itself along tp.
    from accelfn.engine.tensor_parallel import SelfSplittingLayer as SelfSplittingLayer

    # Hands a signal to the loop that waits for one.
    from accelfn.loop.run import deliver as deliver

    # The entries of an optimizer's state, by parameter and by group.
    from accelfn.model import optimizer as optimizer

    # Lets only the forward pass of a model work in a with block.
    from accelfn.model.model import mark_placed as mark_placed

    # Runs a method of all transforms, in the order of the chain.
    from accelfn.state import update as update

    # The origin of gradients: their weight, and whether they were divided by it.
    from accelfn.state.results import GradInfo as GradInfo

    # Reads and writes safetensors files of models, and indices of several files.
    from accelfn.weights import export as export

    # Fills models with tensors of files, read one by one or mapped.
    from accelfn.weights import importing as importing

    # The names and sizes of a world's axes, and the ranks along them.
    from accelfn.world import axes as axes

    # The groups of a world's ranks, the store where they meet, and their activities.
    from accelfn.world import connection as connection

    # The messages of an elastic launcher and its processes, through a store.
    from accelfn.world.meeting import Words as Words

    # How many processes a launcher has started, and the variable for it.
    from accelfn.world.place import asked_size as asked_size
else:  # type checkers do not see it, and find a misspelt name

    def __getattr__(name: str) -> object:
        """Import a name."""
        if name not in names_for_later(__name__):
            msg = f"module {__name__!r} has no attribute {name!r}."
            raise AttributeError(msg)
        return import_later(__name__, name)


def __dir__() -> list[str]:
    """Return all names, those too that are not imported yet."""
    return sorted({*globals(), *names_for_later(__name__)})

# SPDX-License-Identifier: Apache-2.0
"""Internal names for authors of engines, checkpoint readers and trackers.

Optional packages (`accelfn.deepspeed`, `accelfn.weights`, `accelfn.track` and others) import
only public names and the names in this module. A name is imported when it is first used.
"""

from typing import TYPE_CHECKING

from accelfn.base.arguments import import_later, names_for_later

if TYPE_CHECKING:
    # Collectives; their errors name the ranks that disagree.
    from accelfn import collectives as collectives

    # Argument checks; their errors show the code to write.
    from accelfn.base import arguments as arguments

    # Converts trees of tensors and plain data to bytes and back, without pickle.
    from accelfn.base import codec as codec

    # Device types, the number of devices, and pinned memory.
    from accelfn.base import devices as devices

    # Seeds for the random number generators of a rank.
    from accelfn.base import draws as draws

    # Calls that macOS, Windows or older versions of torch lack.
    from accelfn.base import system as system

    # Trees of tensors: map, copy, move and slice them.
    from accelfn.base import tree as tree

    # Background saves: a thread writes them while training continues.
    from accelfn.checkpoint import background as background

    # Writes a directory that becomes visible only when it is complete on disk.
    from accelfn.checkpoint import commit as commit

    # Writes safetensors files with digests, and reads them tensor by tensor.
    from accelfn.checkpoint import files as files

    # Reads tensors on all ranks, or raises the same error on all of them.
    from accelfn.checkpoint import load as load

    # The fields of a state that a checkpoint saves, and the state with such fields.
    from accelfn.checkpoint import save as save

    # Boxes: the rectangular pieces of a tensor on ranks and in files.
    from accelfn.checkpoint import slices as slices

    # Reads a checkpoint: its manifest, fields and tensors.
    from accelfn.checkpoint.elastic import Source as Source

    # Lists the checkpoints in a store's directory, by step.
    from accelfn.checkpoint.manifest import checkpoints_in as checkpoints_in

    # The methods and facts that a transform can have.
    from accelfn.definition import transform as transform

    # How each parameter is sharded over the ranks.
    from accelfn.definition.layout import Layout as Layout

    # Creates a transform's engine from a binding and a function that creates runners.
    from accelfn.engine.engine import build_engine as build_engine

    # The method `lend` of a binding whose parameters are sharded by rows.
    from accelfn.engine.fsdp import sharded_lender as sharded_lender

    # A torch optimizer that updates the parameters of a binding (state bound to a model).
    from accelfn.engine.optimizer import LiveOptimizer as LiveOptimizer

    # Raises for an optimizer that does not update each element independently.
    from accelfn.engine.optimizer import check_elements as check_elements

    # Returns whether an optimizer stores its update count in the parameter groups.
    from accelfn.engine.optimizer import counts_by_group as counts_by_group

    # Runs a loss forward and backward on one rank; the base class of your runner.
    from accelfn.engine.runner import LocalRunner as LocalRunner

    # The result of a runner's forward: a checked loss, its weight and metrics.
    from accelfn.engine.runner import ReadLoss as ReadLoss

    # Binds a state to a model that every rank has in full, and collects gradients.
    from accelfn.engine.runner import ReplicaBinding as ReplicaBinding

    # A module with the loss as its forward, for libraries that wrap a module.
    from accelfn.engine.runner import RootModule as RootModule

    # The argument of a runner's forward: a batch, its weight and the extra arguments.
    from accelfn.engine.runner import Samples as Samples

    # Passes a signal to the loop that waits for a signal.
    from accelfn.loop.run import deliver as deliver

    # Models without values, and models that only their forward pass may use.
    from accelfn.model import model as model

    # The entries of an optimizer's state, by parameter and by group.
    from accelfn.model import optimizer as optimizer

    # Calls a method of all transforms, in the order of the chain.
    from accelfn.state import update as update

    # How gradients were computed: their weight, and whether they are divided by the weight.
    from accelfn.state.results import GradInfo as GradInfo

    # Raises if an argument is not a state, or is a state that a step has used up.
    from accelfn.state.state import check_state as check_state

    # Returns the parameters of a state, or those in a slot.
    from accelfn.state.views import params_at as params_at

    # The names and sizes of a world's axes, and the ranks along them.
    from accelfn.world import axes as axes

    # Process groups of a world, the rendezvous store, and the current operation of a rank.
    from accelfn.world import connection as connection

    # Messages between an elastic launcher and its processes, through a store.
    from accelfn.world.meeting import Words as Words

    # The number of processes that a launcher started, and the variable with this number.
    from accelfn.world.place import asked_size as asked_size
else:  # hidden from type checkers, so that they report misspelt names

    def __getattr__(name: str) -> object:
        """Import a name when it is first used."""
        if name not in names_for_later(__name__):
            msg = f"module {__name__!r} has no attribute {name!r}."
            raise AttributeError(msg)
        return import_later(__name__, name)


def __dir__() -> list[str]:
    """Return all names, including those that are not imported yet."""
    return sorted({*globals(), *names_for_later(__name__)})

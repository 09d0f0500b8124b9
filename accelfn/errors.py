# SPDX-License-Identifier: Apache-2.0
"""Every error that accelfn raises, as one tree.

Each is also the built-in that a caller would expect, so `except ValueError` still works,
and its text says what was given, where, and what to do.
"""


class Error(Exception):
    """The root: `except af.errors.Error` catches what accelfn refuses, and nothing else."""


class ArgumentError(Error, ValueError):
    """An argument has a value that can have no meaning, such as a count of 0."""


class CallError(Error, TypeError):
    """A call without an argument, or with one too many; or a use that a record has not."""


class RecordError(Error, AttributeError):
    """A record has no such attribute, or none that can be set: it is a value."""


class UnknownMetricError(Error, KeyError):
    """Metrics have no entry of this name."""

    __str__ = Exception.__str__  # KeyError's shows a text as code


class CompositionError(Error, ValueError):
    """Transforms that cannot stand in one chain: a name twice, two engines."""


class WorldError(Error, RuntimeError):
    """The environment asks for a world that is missing, contradictory or not to be had."""


class ModelError(Error, ValueError):
    """The model cannot be trained as it is: no trainable parameter, a meta tensor."""


class OptimizerError(Error, ValueError):
    """The optimizer does not belong to the model, or needs what a step cannot give."""


class DataError(Error, ValueError):
    """A dataset, or a way to draw from it, that cannot be used: no samples, no length."""


class LengthError(DataError, TypeError):
    """A stream does not say how many samples it has; `list` then does without."""


class BatchError(Error, ValueError):
    """A batch that does not follow its state, or cannot be split or counted."""


class LossError(Error, ValueError):
    """A loss function returned something that is not a scalar with a gradient."""


class NonFiniteLossError(LossError, ArithmeticError):
    """The loss is infinite or not a number; the state is as it was before the step."""


class GradsError(Error, ValueError):
    """Gradients that do not fit their state, or are not reduced where they must be."""


class NonFiniteGradsError(GradsError, ArithmeticError):
    """Gradients stayed infinite or not a number, update after update."""


class CompileError(Error, RuntimeError):
    """A loss cannot be compiled, or there is nothing to compile it with."""


class AccelfnWarning(Error, UserWarning):  # noqa: N818 - af.errors.AccelfnWarning, and it is one
    """Something runs, but is likely not what was meant; the text has the line to write."""


class RecompilationWarning(AccelfnWarning, RuntimeWarning):
    """Something was compiled again, which takes as long as thousands of steps."""


class UnusedParametersError(GradsError):
    """Parameters took no part in a loss whose gradients DistributedDataParallel awaits."""


class StateError(Error, ValueError):
    """A state lacks what is asked of it: a slot, a parameter, data."""


class StateDonatedError(Error, RuntimeError):
    """The state was given to a step, which updated its tensors in place."""


class ReplicaMismatchError(Error, RuntimeError):
    """Ranks that should hold one model hold different ones."""


class PeerFailedError(Error, RuntimeError):
    """Another rank failed, left or did not arrive while this one waited for it."""


class OutOfMemoryError(Error, MemoryError):
    """Not even the smallest batch fits into memory."""


class CollectiveMismatchError(Error, RuntimeError):
    """Ranks met in different collectives, or with different shapes or reductions."""


class SimulationError(Error, RuntimeError):
    """A simulated world cannot go on; a table says where each rank stands."""


class DeadlockError(SimulationError):
    """Ranks wait for what no rank will do."""


class RankCrashedError(SimulationError):
    """A rank of a simulated world crashed, as was planned."""


class DefaultGroupError(SimulationError):
    """A simulated rank called torch's default process group, and not its world's."""


class LawError(Error, AssertionError):
    """A law of training does not hold; the text names the law and how it is broken."""


class CheckpointError(Error, RuntimeError):
    """A checkpoint cannot be written, or does not fit the state it is loaded into."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint could not be written; those that were are as they were."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint's files are missing, or not what was saved."""


class DirectoryInUseError(CheckpointError):
    """Another job writes its checkpoints to this directory."""


class PlainDataError(Error, TypeError):
    """Something that is to be saved or sent is neither a tensor nor plain data."""


class LaunchError(Error, RuntimeError):
    """Processes cannot be started as asked."""


class RankFailedError(Error, RuntimeError):
    """A rank of `af.launch` failed; the text begins with its traceback."""


class TrackingError(Error, RuntimeError):
    """A tracker cannot begin, or what one wrote cannot be read."""


class TrackingWarning(AccelfnWarning, RuntimeWarning):
    """A tracker's backend failed; the training goes on without what it did not take."""

# SPDX-License-Identifier: Apache-2.0
"""All error and warning classes of accelfn, with `Error` as their base class.

Each class also derives from the built-in class that a caller would expect, so
`except ValueError` works. A message shows the wrong call and value, and the code to write.
"""


class Error(Exception):
    """The base class of all accelfn errors: `except af.errors.Error` catches only these."""


class ArgumentError(Error, ValueError):
    """An argument has an invalid value, such as a count of 0."""


class CallError(Error, TypeError):
    """A call has a missing, surplus or unknown argument, or an object does not support it."""


class RecordError(Error, AttributeError):
    """An object has no such attribute, or is immutable, so the attribute cannot be set."""


class UnknownMetricError(Error, KeyError):
    """The metrics do not contain this name."""

    __str__ = Exception.__str__  # KeyError.__str__ would print the repr of the message


class CompositionError(Error, ValueError):
    """Transforms cannot be in one chain: two have the same name, or two are engines."""


class WorldError(Error, RuntimeError):
    """The world cannot be created or used: a variable, device or process group is wrong."""


class ModelError(Error, ValueError):
    """The model cannot be trained: it has no trainable parameter, or a meta tensor."""


class OptimizerError(Error, ValueError):
    """The optimizer does not fit the model, or a step cannot use it (needs a closure)."""


class DataError(Error, ValueError):
    """A dataset or its order cannot be used: it has no samples, or no length."""


class LengthError(DataError, TypeError):
    """A stream has no length; `list(stream)` ignores this error and still works."""


class BatchError(Error, ValueError):
    """A batch does not belong to its state, or cannot be split or counted."""


class LossError(Error, ValueError):
    """A loss function did not return a scalar with a gradient."""


class NonFiniteLossError(LossError, ArithmeticError):
    """The loss is infinite or NaN; the step did not change the state."""


class GradsError(Error, ValueError):
    """Gradients do not fit their state, or were not reduced although they must be."""


class NonFiniteGradsError(GradsError, ArithmeticError):
    """Gradients were infinite or NaN in many updates in a row."""


class CompileError(Error, RuntimeError):
    """A loss cannot be compiled, or this machine has no compiler."""


class AccelfnWarning(Error, UserWarning):  # noqa: N818 - the public name says it
    """Code runs, but is likely a mistake; the message has the code to write instead."""


class RecompilationWarning(AccelfnWarning, RuntimeWarning):
    """torch.compile compiled a loss again, which takes as long as thousands of steps."""


class UnusedParametersError(GradsError):
    """A loss did not use some parameters, but DistributedDataParallel needs all gradients."""


class StateError(Error, ValueError):
    """A state does not have a slot, a parameter or data that a call needs."""


class StateDonatedError(Error, RuntimeError):
    """The state was passed to a step, which updated its tensors in place."""


class ReplicaMismatchError(Error, RuntimeError):
    """Ranks have different models, states or data, although they must be equal."""


class PeerFailedError(Error, RuntimeError):
    """This rank waited for another rank that failed, left or did not arrive."""


class OutOfMemoryError(Error, MemoryError):
    """Even the smallest batch does not fit into memory."""


class CollectiveMismatchError(Error, RuntimeError):
    """Ranks called different collectives, or used different shapes or reductions."""


class SimulationError(Error, RuntimeError):
    """A simulated world cannot continue; a table shows what each rank is doing."""


class DeadlockError(SimulationError):
    """Simulated ranks wait for each other, and no rank can continue."""


class RankCrashedError(SimulationError):
    """A rank of a simulated world crashed, because the simulation asked for a crash."""


class DefaultGroupError(SimulationError):
    """A simulated rank used torch's default process group instead of its world's group."""


class LawError(Error, AssertionError):
    """A tested property (law) is violated; the message names the law and the difference."""


class CheckpointError(Error, RuntimeError):
    """A checkpoint cannot be written, or does not fit the state it is loaded into."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint could not be written; earlier checkpoints are unchanged."""


class CheckpointCorruptError(CheckpointError):
    """Files of a checkpoint are missing, or differ from what was saved."""


class DirectoryInUseError(CheckpointError):
    """Another job is writing its checkpoints to this directory."""


class PlainDataError(Error, TypeError):
    """An object cannot be saved or sent: it is neither a tensor nor plain data."""


class LaunchError(Error, RuntimeError):
    """Processes cannot be started with these settings."""


class RankFailedError(Error, RuntimeError):
    """A rank of `af.launch` failed; the message begins with the rank's traceback."""


class TrackingError(Error, RuntimeError):
    """A tracker cannot start, or its files cannot be read."""


class TrackingWarning(AccelfnWarning, RuntimeWarning):
    """A tracker's backend failed; training continues, and the backend lacks some values."""

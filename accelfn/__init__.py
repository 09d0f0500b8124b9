# SPDX-License-Identifier: Apache-2.0
"""accelfn: train PyTorch models with a function from one state to the next.

A `TrainState` is an immutable record of the whole training state. A setup is a chain of
transforms, such as `af.wrap_ddp()`, and says how a step computes. A step function takes a
state and a batch, and returns the next state. See the tutorial in the documentation, or
start here:

    setup = af.chain(af.shard_data(), af.wrap_ddp(), af.autocast("bf16"))
    step = af.make_step(loss_fn)
    for batch in af.batches(state, until_epoch=3):
        state, metrics = step(state, batch)
"""

import typing as _typing
from importlib.metadata import PackageNotFoundError as _NotFound
from importlib.metadata import version as _version

from accelfn import errors as _errors
from accelfn.base.arguments import find_hint as _find_hint
from accelfn.base.arguments import import_later as _import_later
from accelfn.base.arguments import names_for_later as _names_for_later
from accelfn.base.system import check_floor as _check_floor

_check_floor()
_BUILTINS = ("compile",)

# All names are imported at first use. So `import accelfn` is fast, and a program imports only
# what it needs. Do not add a function with the name of a module, such as `step`: importing the
# module would replace the function.
if _typing.TYPE_CHECKING:
    __version__: str
    from accelfn import errors as errors
    from accelfn import megatron as megatron
    from accelfn import orders as orders
    from accelfn import schedules as schedules
    from accelfn import track as track
    from accelfn import typing as typing
    from accelfn.base.tree import Pending as Pending
    from accelfn.checkpoint.load import load as load
    from accelfn.checkpoint.load import load_part as load_part
    from accelfn.checkpoint.moving import regroup as regroup
    from accelfn.checkpoint.moving import with_world as with_world
    from accelfn.checkpoint.save import save as save
    from accelfn.checkpoint.store import CheckpointStore as CheckpointStore
    from accelfn.collectives.packed import barrier as barrier
    from accelfn.collectives.trees import all_gather as all_gather
    from accelfn.collectives.trees import all_gather_objects as all_gather_objects
    from accelfn.collectives.trees import all_ranks as all_ranks
    from accelfn.collectives.trees import all_reduce as all_reduce
    from accelfn.collectives.trees import all_to_all as all_to_all
    from accelfn.collectives.trees import any_rank as any_rank
    from accelfn.collectives.trees import broadcast as broadcast
    from accelfn.collectives.trees import broadcast_object as broadcast_object
    from accelfn.collectives.trees import pad_across as pad_across
    from accelfn.collectives.trees import scatter as scatter
    from accelfn.collectives.trees import start_all_reduce as start_all_reduce
    from accelfn.data import Batch as Batch
    from accelfn.data import Data as Data
    from accelfn.data import token_budget as token_budget
    from accelfn.data.reading import join_uneven as join_uneven
    from accelfn.deepspeed.transform import wrap_deepspeed as wrap_deepspeed
    from accelfn.definition.transform import Transform as Transform
    from accelfn.definition.transform import chain as chain
    from accelfn.definition.transform import transform as transform
    from accelfn.launching.function import launch as launch
    from accelfn.loop.batches import batches as batches
    from accelfn.loop.batches import seek as seek
    from accelfn.loop.control import assert_replicas_agree as assert_replicas_agree
    from accelfn.loop.control import logger as logger
    from accelfn.loop.control import main_first as main_first
    from accelfn.loop.control import on_main as on_main
    from accelfn.loop.control import on_rank as on_rank
    from accelfn.loop.control import print_in_order as print_in_order
    from accelfn.loop.control import print_once as print_once
    from accelfn.loop.evaluate import all_gather_valid as all_gather_valid
    from accelfn.loop.evaluate import evaluate as evaluate
    from accelfn.loop.evaluate import predict as predict
    from accelfn.loop.evaluate import report_metric as report_metric
    from accelfn.loop.evaluate import split_over_ranks as split_over_ranks
    from accelfn.loop.memory import find_batch_size as find_batch_size
    from accelfn.loop.memory import memory as memory
    from accelfn.loop.memory import memory_estimate as memory_estimate
    from accelfn.loop.profiling import profile as profile
    from accelfn.loop.run import epochs as epochs
    from accelfn.loop.run import run as run
    from accelfn.loop.run import salvage as salvage
    from accelfn.loop.run import stopping as stopping
    from accelfn.model.optimizer import combine_optimizers as combine_optimizers
    from accelfn.model.optimizer import lomo as lomo
    from accelfn.model_parallel.context_parallel import (
        context_parallel as context_parallel,
    )
    from accelfn.model_parallel.tensor_parallel import (
        tensor_parallel as tensor_parallel,
    )
    from accelfn.state.results import Grads as Grads
    from accelfn.state.results import Loss as Loss
    from accelfn.state.results import Metrics as Metrics
    from accelfn.state.state import TrainState as TrainState
    from accelfn.state.update import Update as Update
    from accelfn.state.views import borrow_model as borrow_model
    from accelfn.state.views import eval_params as eval_params
    from accelfn.state.views import fork_rng as fork_rng
    from accelfn.state.views import snapshot_model as snapshot_model
    from accelfn.step.step import apply_grads as apply_grads
    from accelfn.step.step import finalize as finalize
    from accelfn.step.step import make_step as make_step
    from accelfn.step.step import prepare_engine as prepare_engine
    from accelfn.step.step import release_engine as release_engine
    from accelfn.step.step import sync_grads as sync_grads
    from accelfn.step.value_and_grad import value_and_grad as value_and_grad
    from accelfn.transforms.accumulate import accumulate as accumulate
    from accelfn.transforms.accumulate import micro_batches as micro_batches
    from accelfn.transforms.averaging import ema as ema
    from accelfn.transforms.averaging import schedule_free as schedule_free
    from accelfn.transforms.clip import clip_grad_norm as clip_grad_norm
    from accelfn.transforms.clip import clip_grad_value as clip_grad_value
    from accelfn.transforms.compile import compile as compile  # noqa: A004 - torch's name
    from accelfn.transforms.data_parallel import check_replicas as check_replicas
    from accelfn.transforms.data_parallel import compress_grads as compress_grads
    from accelfn.transforms.data_parallel import shard_data as shard_data
    from accelfn.transforms.data_parallel import sync_batchnorm as sync_batchnorm
    from accelfn.transforms.data_parallel import wrap_ddp as wrap_ddp
    from accelfn.transforms.data_parallel import wrap_fsdp as wrap_fsdp
    from accelfn.transforms.diloco import diloco as diloco
    from accelfn.transforms.local_sgd import local_sgd as local_sgd
    from accelfn.transforms.plateau import reduce_lr_on_plateau as reduce_lr_on_plateau
    from accelfn.transforms.precision import autocast as autocast
    from accelfn.transforms.precision import full_precision as full_precision
    from accelfn.transforms.precision import identity as identity
    from accelfn.transforms.precision import skip_nonfinite as skip_nonfinite
    from accelfn.transforms.saving_memory import (
        checkpoint_activations as checkpoint_activations,
    )
    from accelfn.transforms.saving_memory import (
        optimizer_in_backward as optimizer_in_backward,
    )
    from accelfn.weights.accelerate import import_state as import_state
    from accelfn.weights.device_map import plan_devices as plan_devices
    from accelfn.weights.export import export_model as export_model
    from accelfn.weights.export import full_params as full_params
    from accelfn.weights.export import save_pretrained as save_pretrained
    from accelfn.weights.importing import empty_weights as empty_weights
    from accelfn.weights.importing import import_model as import_model
    from accelfn.weights.on_devices import on_devices as on_devices
    from accelfn.weights.torch_files import import_torch_weights as import_torch_weights
    from accelfn.world import World as World
else:  # hidden from type checkers, so that they report misspelt names

    def __getattr__(name: str) -> object:
        """Import a name when a program first uses it."""
        if name == "__version__":
            try:
                return _version("accelfn")
            except _NotFound:  # a source folder on the path, which is not installed
                return "0+unknown"
        if (
            name == "__all__"
        ):  # for `from accelfn import *`, which must not replace Python's `compile`
            return [public for public in __dir__() if public not in _BUILTINS]
        if name in _names_for_later(__name__):
            return _import_later(__name__, name)
        error_hint = f"write af.errors.{name}" if hasattr(_errors, name) else None
        hint = error_hint or _find_hint(__name__, name)
        msg = f"module {__name__!r} has no attribute {name!r}{f': {hint}' if hint else ''}."
        raise _errors.RecordError(msg)


def __dir__() -> list[str]:
    """Return the public names, but not the subpackages."""
    return sorted(_names_for_later(__name__))

# SPDX-License-Identifier: Apache-2.0
"""Bugs that show where something else is done between two updates."""

from accelfn.engine import buffers, compression, ddp, engine
from accelfn.loop import evaluate
from accelfn.state import state
from tests.laws import test_interludes
from tests.mutants.mutant import Mutant

EACH = test_interludes.test_each_act_beside_each_setup
TRACE = test_interludes.test_what_is_done_between_updates_leaves_no_trace
APART = test_interludes.test_nor_does_it_where_models_are_split_or_compressed

MUTANTS = [
    Mutant(
        "L22: a static graph is learnt from a pass that does not reduce, and nothing reduces",
        EACH,
        ddp.DDPRunner.__init__,
        '{**options, "static_graph": False} → {**options}',
        args={"setup": "static graph"},
    ),
    Mutant(
        "L22: after a loss that raised, DistributedDataParallel goes on where it was broken off",
        EACH,
        engine.Engine._abandon,
        "if self._runner.reduces or self.live_update is not None: → if False:",
        args={"setup": "ddp"},
    ),
    Mutant(
        "L22: buffers that a look has written are the state's",
        TRACE,
        buffers.Buffers.begin,
        "if source is not self._scratch[n]] → if False]",
    ),
    Mutant(
        "L22: an evaluation writes rank 0's buffers over those of the others",
        EACH,
        evaluate._Lent.__init__,
        "buffers = tree.clone(dict(state.buffers)) → buffers = dict(state.buffers)",
        args={"setup": "own buffers"},
    ),
    Mutant(
        "L22: a copy has the slots of its original",
        EACH,
        state.TrainState.copy,
        "slots={name: entries.own_objects(slot) for name, slot in slots.items()}"
        " → slots=self._slots",
        args={"setup": "local sgd"},
    ),
    Mutant(
        "L22: what PowerSGD left out of a pass that nobody applied is forgotten or kept twice",
        EACH,
        compression.LowRank.begin,
        'dict(slot["error"]), dict(slot["q"]) → slot["error"], slot["q"]',
        args={"setup": "powersgd"},
    ),
    Mutant(
        "L22: DiLoCo's finalize sends off what its caller still has on its way",
        EACH,
        state.TrainState.copy,
        "slots={name: entries.own_objects(slot) for name, slot in slots.items()}"
        " → slots=self._slots",
        args={"setup": "diloco"},
    ),
    Mutant(
        "L22: a copy steps with what the optimizer of its original has",
        APART,
        state.TrainState.copy,
        "opt_state=opt_state, → opt_state=self._opt_state,",
    ),
]

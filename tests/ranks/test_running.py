# SPDX-License-Identifier: Apache-2.0
"""`af.run` on real ranks: a signal to one of them ends both, and the run goes on."""

import os
import signal

import pytest

import accelfn as af
from tests.processes import run_ranks
from tests.strategies import LOSSES, Run, differences, tensors

pytestmark = pytest.mark.ranks(2)

RUN = Run(n=24, batch_size=4, setup=af.chain(af.shard_data(), af.wrap_ddp()))


def ended(world: af.World, folder: str) -> tuple[object, int, list[str]]:
    """Be ended at update 5, go on, and compare with a run that was not."""

    def end(state: af.TrainState, _: af.Metrics) -> None:
        if state.step == 5 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    step, code = af.make_step(LOSSES[RUN.loss]), None
    with af.CheckpointStore(folder, every=2) as store:
        try:
            af.run(RUN.state(world), step, until=9, actions={1: end}, store=store)
        except SystemExit as left:
            code = left.code
        saved = store.steps[-1]
        resumed = af.run(RUN.state(world), step, until=9, store=store)
    whole = af.run(RUN.state(world), step, until=9)
    return code, saved, differences(tensors(whole), tensors(resumed))


def test_a_signal_to_one_rank_ends_both(tmp_path):
    """Both save the same update and leave with 143; resumed, the run has the same bits."""
    assert run_ranks(2, ended, str(tmp_path / "store")) == [(143, 5, [])] * 2

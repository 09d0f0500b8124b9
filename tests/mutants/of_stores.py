# SPDX-License-Identifier: Apache-2.0
"""Bugs in what a crash, a full disk, a second job, a signal or Ctrl-C must not break."""

from accelfn.checkpoint import (
    background,
    commit,
    disk,
    keep,
    lock,
    retention,
    store,
    under_way,
)
from accelfn.loop.stopping import Stop
from tests.laws import test_disk, test_store
from tests.mutants.mutant import Mutant
from tests.unit import test_checkpoint

OF_CRASHES = [
    Mutant(
        "L52: the directory of all checkpoints is made, and its own name not flushed",
        test_disk.test_every_crash_leaves_what_was_saved,
        disk.make,
        "flush(directory.parent) → pass",
        args={"async_": False, "joint": False},
    ),
    Mutant(
        "L52: a save is said to be there before its name lasts",
        test_disk.test_every_crash_leaves_what_was_saved,
        disk.rename,
        "flush(new.parent) → pass",
        args={"async_": True, "joint": False},
    ),
    Mutant(
        "L52: what interrupted saves have left is not removed by the next",
        test_disk.test_no_history_loses_a_checkpoint,
        store.CheckpointStore._remove_leftovers,
        "disk.remove(path) → pass",
    ),
    Mutant(
        "L53: retention counts the newest twice",
        test_disk.test_no_history_loses_a_checkpoint,
        retention.Retention._kept,
        "steps[-self.keep :] → steps[-self.keep :][1:]",
    ),
    Mutant(
        "L53: the checkpoint that is kept as the best is the worst",
        test_disk.test_no_history_loses_a_checkpoint,
        keep.best_of,
        '-value if mode == "max" else value → value if mode == "max" else -value',
    ),
    Mutant(
        "L52: the lock of a process that was killed is never taken over",
        test_disk.test_a_killed_process_loses_nothing,
        lock._refuse_living,
        '_begun(pid) != holder.get("begun") → False',
    ),
]

OF_FAILURES = [
    Mutant(
        "L54: a rank's failure is known to it alone",
        test_store.test_a_save_that_fails_fails_on_all_ranks,
        commit.Save.agreed,
        'if not text.startswith("ok "):'
        ' → if rank == self.rank and not text.startswith("ok "):',
    ),
    Mutant(
        "L54: what a failed save has written is not removed",
        test_store.test_a_save_that_fails_fails_on_all_ranks,
        commit.Save.agreed,
        "disk.remove(self.partial) → pass",
    ),
    Mutant(
        "L54: a flush that failed is repeated, and then believed",
        test_store.test_no_file_is_flushed_twice,
        disk.write,
        """\
            os.fsync(file.fileno())
→
            try:
                os.fsync(file.fileno())
            except OSError:
                os.fsync(file.fileno())
""",
    ),
    Mutant(
        "L52: a lock that says nothing is taken over",
        test_store.test_one_job_saves_to_a_directory,
        lock._refuse_living,
        "host == socket.gethostname() → host",
        args={"who": "another host's"},
    ),
    Mutant(
        "L52: two stores of one process take each other's lock for their own",
        test_store.test_one_store_saves_to_a_directory,
        lock.Lock.take,
        "(found := _text_of(self.path)) != self.text"
        " → f'\"pid\": {self.pid},' not in ((found := _text_of(self.path)) or '')",
        args={"ends": "close"},
    ),
    Mutant(
        "L43: a save behind the training's back reads the training's own tensors",
        test_store.test_what_is_saved_is_what_was_given,
        background.Buffers.copies_of,
        "held.copy_(tensor.detach(), non_blocking=True) → tensor.detach()",
    ),
    Mutant(
        "L53: older checkpoints stay, whatever is to be kept",
        test_store.test_what_was_loaded_outlives_its_checkpoint,
        retention.Retention._others,
        "if s not in kept → if False",
    ),
    Mutant(
        "L54: a lock whose taking was interrupted is nobody's",
        test_store.test_an_interrupted_save_can_be_made_again,
        lock.Lock.take,
        "!= self.text: → or True:",
    ),
    Mutant(
        "L54: a save that was waited for is forgotten before it is done",
        test_store.test_an_interrupted_wait_can_be_made_again,
        under_way.UnderWay.ended,
        """\
writing, world = self.writing, self.world
→
writing, world, self.writing = self.writing, self.world, None
""",
    ),
    Mutant(
        "L54: the rank that got SIGTERM leaves, and the others train on",
        test_store.test_all_ranks_leave_after_the_same_update,
        Stop.requested,
        'self._agreed = int(reduce(mine, self._world, "max", label="stopping"))'
        " → self._agreed = int(mine)",
    ),
]

OF_WRITING = [
    Mutant(
        "the disk begins with a file when all of it is written",
        test_checkpoint.test_a_piece_goes_to_the_disk_while_the_next_is_written,
        disk.write,
        "if written - begun >= _PIECE: → if False:",
    ),
    Mutant(
        "the disk is asked for what it has begun with again",
        test_checkpoint.test_a_piece_goes_to_the_disk_while_the_next_is_written,
        disk.write,
        "begun, written)\n                    begun = written → begun, written)",
    ),
    Mutant(
        "the disk begins with other bytes than those that were written",
        test_checkpoint.test_a_system_begins_early_if_it_can,
        disk._begin_flush,
        "begin, end - begin, → begin, end,",
        args={"has_it": True},
    ),
]

MUTANTS = [*OF_CRASHES, *OF_FAILURES, *OF_WRITING]

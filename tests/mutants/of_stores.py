# SPDX-License-Identifier: Apache-2.0
"""Bugs in what a crash, a full disk, a second job, a signal or Ctrl-C must not break."""

from accelfn.checkpoint import background, commit, disk, keep, lock, retention, store
from accelfn.loop.stopping import Stop
from tests.laws import test_disk, test_store
from tests.mutants.mutant import Mutant

OF_CRASHES = [
    Mutant(
        name="a new directory may be forgotten",
        says="the directory of all checkpoints is made, and its own name not flushed",
        law="L52",
        test=test_disk.test_every_crash_leaves_what_was_saved,
        args={"async_": False},
        place=disk.make,
        old="flush(directory.parent)",
        new="pass",
    ),
    Mutant(
        name="a name may be forgotten",
        says="a save is said to be there before its name lasts",
        law="L52",
        test=test_disk.test_every_crash_leaves_what_was_saved,
        args={"async_": True},
        place=disk.rename,
        old="flush(new.parent)",
        new="pass",
    ),
    Mutant(
        name="leftovers stay",
        says="what interrupted saves have left is not removed by the next",
        law="L52",
        test=test_disk.test_no_history_loses_a_checkpoint,
        place=store.CheckpointStore._remove_leftovers,
        old="disk.remove(path)",
        new="pass",
    ),
    Mutant(
        name="one too few is kept",
        says="retention counts the newest twice",
        law="L53",
        test=test_disk.test_no_history_loses_a_checkpoint,
        place=retention.Retention._kept,
        old="steps[-self.keep :]",
        new="steps[-self.keep :][1:]",
    ),
    Mutant(
        name="the worst is kept",
        says="the checkpoint that is kept as the best is the worst",
        law="L53",
        test=test_disk.test_no_history_loses_a_checkpoint,
        place=keep.best_of,
        old='-value if mode == "max" else value',
        new='value if mode == "max" else -value',
    ),
    Mutant(
        name="the dead are waited for",
        says="the lock of a process that was killed is never taken over",
        law="L52",
        test=test_disk.test_a_killed_process_loses_nothing,
        place=lock._refuse_living,
        old='_begun(pid) != holder.get("begun")',
        new="False",
    ),
]

OF_FAILURES = [
    Mutant(
        name="the others go on",
        says="a rank's failure is known to it alone",
        law="L54",
        test=test_store.test_a_save_that_fails_fails_on_all_ranks,
        place=commit.Save.agreed,
        old='if not text.startswith("ok "):',
        new='if rank == self.rank and not text.startswith("ok "):',
    ),
    Mutant(
        name="a failed save stays",
        says="what a failed save has written is not removed",
        law="L54",
        test=test_store.test_a_save_that_fails_fails_on_all_ranks,
        place=commit.Save.agreed,
        old="disk.remove(self.partial)",
        new="pass",
    ),
    Mutant(
        name="a flush is tried again",
        says="a flush that failed is repeated, and then believed",
        law="L54",
        test=test_store.test_no_file_is_flushed_twice,
        place=disk.write,
        old="            os.fsync(file.fileno())\n",
        new="""\
            try:
                os.fsync(file.fileno())
            except OSError:
                os.fsync(file.fileno())
""",
    ),
    Mutant(
        name="an unknown holder is dead",
        says="a lock that says nothing is taken over",
        law="L52",
        test=test_store.test_one_job_saves_to_a_directory,
        args={"who": "another host's"},
        place=lock._refuse_living,
        old="host == socket.gethostname()",
        new="host",
    ),
    Mutant(
        name="a process has one lock",
        says="two stores of one process take each other's lock for their own",
        law="L52",
        test=test_store.test_one_store_saves_to_a_directory,
        args={"ends": "close"},
        place=lock.Lock.take,
        old="(found := _text_of(self.path)) != self.text",
        new="f'\"pid\": {self.pid},' not in ((found := _text_of(self.path)) or '')",
    ),
    Mutant(
        name="no copy",
        says="a save behind the training's back reads the training's own tensors",
        law="L43",
        test=test_store.test_what_is_saved_is_what_was_given,
        place=background.Buffers.copies_of,
        old="held.copy_(tensor.detach(), non_blocking=tensor.is_cuda)",
        new="tensor.detach()",
    ),
    Mutant(
        name="nothing is removed",
        says="older checkpoints stay, whatever is to be kept",
        law="L53",
        test=test_store.test_what_was_loaded_outlives_its_checkpoint,
        place=retention.Retention._others,
        old="if s not in kept",
        new="if False",
    ),
    Mutant(
        name="Ctrl-C leaves a lock",
        says="a lock whose taking was interrupted is nobody's",
        law="L54",
        test=test_store.test_an_interrupted_save_can_be_made_again,
        place=lock.Lock.take,
        old="!= self.text:",
        new="or True:",
    ),
    Mutant(
        name="Ctrl-C forgets a save",
        says="a save that was waited for is forgotten before it is done",
        law="L54",
        test=test_store.test_an_interrupted_wait_can_be_made_again,
        place=store.CheckpointStore._ended,
        old="writing, world = self._writing, self._world\n",
        new="writing, world, self._writing = self._writing, self._world, None\n",
    ),
    Mutant(
        name="a signal is one rank's",
        says="the rank that got SIGTERM leaves, and the others train on",
        law="L54",
        test=test_store.test_all_ranks_leave_after_the_same_update,
        place=Stop.requested,
        old='self._agreed = int(reduce(mine, self._world, "max", label="stopping"))',
        new="self._agreed = int(mine)",
    ),
]

MUTANTS = [*OF_CRASHES, *OF_FAILURES]

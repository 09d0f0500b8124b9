# SPDX-License-Identifier: Apache-2.0
"""Bugs in who is told what of a save that goes wrong, and in what the next one does."""

import errno

from accelfn.base import paths
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
from tests.laws import test_ended_saves, test_failing_saves, test_store
from tests.mutants.mutant import Mutant
from tests.unit import test_paths

MUTANTS = [
    Mutant(
        "L34: a store whose last save failed keeps its directory when it is closed",
        test_failing_saves.test_a_store_whose_last_save_failed_lets_go,
        store.CheckpointStore.close,
        """\
    try:
        self.wait()
    finally:
        self._release()
→
    self.wait()
    self._release()
""",
    ),
    Mutant(
        "L54: an error that ends a writer is said to be rank 0's",
        test_failing_saves.test_a_save_names_whose_error_it_was,
        background.Writing._alone,
        "rank = self.save.rank → rank = 0",
    ),
    Mutant(
        "L54: what is told of an error is its text, which may be empty",
        test_failing_saves.test_a_save_names_whose_error_it_was,
        commit.told,
        'text = f"{type(error).__name__}: {error}".removesuffix(": ")'
        " → text = str(error)",
    ),
    Mutant(
        "L54: the rank that failed is told so without its own error",
        test_failing_saves.test_a_save_names_whose_error_it_was,
        under_way.UnderWay.ended,
        "told.__cause__ = None if error is None else error.__cause__ → pass",
    ),
    Mutant(
        "L54: what a save has written that was stopped stays until the next",
        test_failing_saves.test_a_save_names_whose_error_it_was,
        under_way.UnderWay.ended,
        "disk.remove(writing.save.partial) → pass",
    ),
    Mutant(
        "L54: a checkpoint that there was no memory to read back is said not to be there",
        test_failing_saves.test_a_save_names_whose_error_it_was,
        commit.Save.agreed,
        "what == READ_BACK → False",
    ),
    Mutant(
        "L54: a checkpoint whose reading back was stopped is said not to be there",
        test_failing_saves.test_a_save_names_whose_error_it_was,
        background.Writing._alone,
        "disk.is_there(self.save.final) → False",
    ),
    Mutant(
        "L54: a checkpoint that lost its name again is said to be there",
        test_failing_saves.test_a_save_names_whose_error_it_was,
        commit.Save.agreed,
        "not isinstance(error, CheckpointError) → True",
    ),
    Mutant(
        "L54: a disk that cannot be listed hides why a save failed",
        test_failing_saves.test_a_disk_that_breaks_fails_saves,
        store.CheckpointStore._with_newest,
        "except (OSError, CheckpointError) as → except ZeroDivisionError as",
    ),
    Mutant(
        "L54: the mode of a directory that cannot be read hides that it cannot",
        test_failing_saves.test_a_store_on_a_broken_disk_is_refused,
        disk.is_there,
        "suppress(OSError) → suppress(ZeroDivisionError)",
    ),
    Mutant(
        "L54: a save is not tried where the one before it failed",
        test_failing_saves.test_a_failed_save_does_not_cost_the_next,
        store.CheckpointStore.save,
        "earlier = self._ended(state.world) → earlier = self.wait()",
    ),
    Mutant(
        "L54: of two saves that failed one after the other, the first is never told",
        test_failing_saves.test_two_failed_saves_are_both_told,
        store.CheckpointStore.save,
        'too = "" if earlier is None else str(earlier) → too = ""',
    ),
    Mutant(
        "L53: step-34 counts as a checkpoint of the store, which is called step-00000034",
        test_failing_saves.test_what_a_store_did_not_write_is_not_its_own,
        keep.steps_in,
        "path.name == name_of(int(match[1])) → True",
    ),
    Mutant(
        "L53: where one checkpoint cannot be removed, no other is",
        test_failing_saves.test_what_cannot_be_removed_keeps_nothing_else,
        retention.Retention._remove,
        "for step in others: → for step in others[:1]:",
    ),
    Mutant(
        "L53: what runs that were killed behind their saves have left stays for ever",
        test_ended_saves.test_runs_that_are_killed_leave_no_more_than_is_kept,
        retention.Retention.before,
        "if not self._others(kept): → if True:",
    ),
    Mutant(
        "L53: older checkpoints are removed for a newest that is not whole",
        test_ended_saves.test_runs_that_are_killed_leave_no_more_than_is_kept,
        retention.Retention.before,
        "keeping.verify(newest) → pass",
    ),
    Mutant(
        "L54: an interrupt between forgets a thread that writes",
        test_ended_saves.test_no_interrupt_lets_saves_write_over_each_other,
        store.CheckpointStore.save,
        """\
under_way.writing = Writing(job, contents, retain, patience=patience)
→
(begun := Writing(job, contents, retain, patience=patience)).start()
            under_way.writing = begun
""",
    ),
    Mutant(
        "L52: a lock's file that is no UTF-8 is an error of its own",
        test_store.test_a_lock_of_any_bytes_is_somebodys,
        lock._text_of,
        "except UnicodeDecodeError: → except ZeroDivisionError:",
    ),
    Mutant(
        "a disk that has failed is one on which nothing is",
        test_paths.test_a_disk_that_does_not_say_is_no_answer,
        paths._mode,
        "if error.errno in _NOTHING: → if True:",
        args={"asked": paths.exists, "code": errno.EIO},
    ),
]

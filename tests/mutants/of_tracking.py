# SPDX-License-Identifier: Apache-2.0
"""Bugs in tracking: numbers that are others, records that are lost, runs that went back."""

import io

import numpy as np

import accelfn as af
from accelfn.track import log, tracker, values
from accelfn.track.jsonl import _Jsonl, _whole
from accelfn.track.progress import _shown, progress
from tests.mutants.mutant import Mutant
from tests.unit import test_track, test_track_values

MUTANTS = [
    Mutant(
        "a tracker that is opened at step 0 lets the earlier attempt's records count",
        test_track.test_a_resumed_run_takes_back_the_steps_after_its_checkpoint,
        _Jsonl.__init__,
        "begins if step is None else → begins if not step else",
    ),
    Mutant(
        "a run's file cannot be read after a crash in the middle of a line",
        test_track.test_half_a_line_is_cut_off,
        _Jsonl.__init__,
        "os.ftruncate(self._handle, _whole(self._handle)) → _whole(self._handle)",
        args={"length": 1},
    ),
    Mutant(
        "a run's file cannot be read whose first line was cut off",
        test_track.test_half_a_line_is_cut_off,
        _whole,
        "    return 0 →     return os.fstat(handle).st_size",
        args={"length": 1},
    ),
    Mutant(
        "a long line that a crash cut off takes the whole run with it",
        test_track.test_half_a_line_is_cut_off,
        _whole,
        "        end = start →         end = 0",
        args={"length": 70_000},
    ),
    Mutant(
        "a line of which a full disk took a part makes the file unreadable",
        test_track.test_a_full_disk_ends_no_training,
        _Jsonl._append,
        "os.ftruncate(self._handle, end) → os.fsync(self._handle)",
    ),
    Mutant(
        "two runs whose trackers have one file make one run of two",
        test_track.test_two_trackers_of_one_file_are_refused,
        _Jsonl._own,
        "fcntl.LOCK_EX | fcntl.LOCK_NB → fcntl.LOCK_SH | fcntl.LOCK_NB",
    ),
    Mutant(
        "numbers of a run that went back are mixed with the new ones of that step",
        test_track.test_what_was_written_of_a_step_is_replaced,
        log._Story.hear,
        "self._back_to(step - 1) → self._back_to(step)",
    ),
    Mutant(
        "the report draws a resume at a step that the run has not reached again",
        test_track.test_a_run_is_resumed_where_its_next_step_says,
        log._Story._back_to,
        "if each <= step] → if each]",
        args={"openings": [[1, 2], [3, 4], [2]], "resumed": (1,)},
    ),
    Mutant(
        "a tracker that was opened and never written to is a resume of its own step",
        test_track.test_a_run_is_resumed_where_its_next_step_says,
        log._Story.hear,
        "self._unheard += 1 → self._unheard = 1",
        args={"openings": [[1, 2, 3, 4], [], [3]], "resumed": (2, 2)},
    ),
    Mutant(
        "the report says that fewer records are not shown than are",
        test_track.test_a_resumed_run_takes_back_the_steps_after_its_checkpoint,
        log._Story._back_to,
        "self.superseded += 1 → self.superseded = 1",
    ),
    Mutant(
        "what a run tracked as -inf is read back as inf",
        test_track.test_a_strict_parser_reads_what_is_not_finite,
        values.spelt,
        '"-inf": "-Infinity" → "-inf": "Infinity"',
    ),
    Mutant(
        "tracked floating-point images are darker by one in half of their pixels",
        test_track.test_images_are_checked_and_converted,
        values.pixels,
        "(image * 255).round().to(torch.uint8) → (image * 255).to(torch.uint8)",
    ),
    Mutant(
        "a floating-point image from 0 to 255 is tracked as noise, and nobody is told",
        test_track.test_images_are_checked_and_converted,
        values.pixels,
        "low >= 0 and high <= 1 → low >= 0",
    ),
    Mutant(
        "a hyperparameter is lost whose name as text is another's",
        test_track.test_no_hyperparameter_is_lost,
        values._plain_mapping,
        "if str(name) in found: → if not isinstance(name, str) and name in found:",
        args={"given": {1: "a", "1": "b"}, "said": "two of them are named '1'"},
    ),
    Mutant(
        "backends without nested names get one of two hyperparameters",
        test_track.test_no_hyperparameter_is_lost,
        values.flat,
        "twice = found.keys() & added.keys() → twice = set()",
        args={
            "given": {"a": {"b": 1}, "a.b": 2},
            "said": r"two of them are named 'a\.b'",
        },
    ),
    Mutant(
        "a learning rate of numpy's is tracked as the text np.float32(0.5)",
        test_track_values.test_settings_of_one_number_are_numbers,
        values.plain,
        "value = _in_python(value)"
        " → value = value if isinstance(value, np.generic) else _in_python(value)",
        args={"given": np.float32(0.5), "kept": 0.5},
    ),
    Mutant(
        "what rank 0 alone saw is tracked as the loss of the run",
        test_track.test_other_ranks_track_nothing_and_refuse_what_rank_0_refuses,
        values.check_metrics,
        "any(world.loss.size > 1 for world in worlds) → not worlds",
    ),
    Mutant(
        "a flag in place of the step is tracked as step 1",
        test_track.test_what_is_no_metric_is_refused,
        values.check_step,
        "not is_integer(step, 0) or → not isinstance(step, int) or step < 0 or",
        args={"metrics": {"loss": 1.0}, "step": True, "said": "step=True"},
    ),
    Mutant(
        "two ranks write one file, and a run is tracked once for each rank",
        test_track.test_other_ranks_track_nothing_and_refuse_what_rank_0_refuses,
        tracker.open_tracker,
        "if world.is_main: → if world:",
    ),
    Mutant(
        "a backend that changes what it gets changes what the next one gets",
        test_track_values.test_no_backend_changes_what_another_gets,
        tracker.Tracker._tell,
        "act(sink, deepcopy(read)) → act(sink, read)",
    ),
    Mutant(
        "where warnings are errors, other backends stay open and lose what they hold",
        test_track.test_all_are_closed_where_warnings_are_errors,
        tracker.Tracker.close,
        "_warn([said for each in self.outlets for said in each.close(failed=failed)])"
        " → [_warn(list(each.close(failed=failed))) for each in self.outlets]",
    ),
    Mutant(
        "a full disk is told of at every step, and drowns all else that is said",
        test_track.test_a_full_disk_ends_no_training,
        tracker.Outlet.attempt,
        "if self._lost == 1: → if self._lost:",
    ),
    Mutant(
        "a backend shows a run that ended with an exception as finished",
        test_track.test_a_backend_that_fails_keeps_no_other_from_its_records,
        tracker.Tracker.__exit__,
        "failed=kind is not None → failed=False",
    ),
    Mutant(
        "what is tracked after the with block goes nowhere, and nobody is told",
        test_track.test_images_go_to_the_backends_that_have_them,
        tracker.Tracker._goes_on,
        "if closed: → if closed and kind:",
    ),
    Mutant(
        "a tracker that is given twice has every record twice",
        test_track.test_two_of_a_kind_are_told_apart,
        tracker.together,
        "outlets[:i] → outlets[:0]",
    ),
    Mutant(
        "a bar over batches without an end ends the training before it begins",
        test_track.test_a_bar_of_work_without_a_length,
        _shown,
        "except (ArgumentError, TypeError): → except TypeError:",
        args={"error": af.ArgumentError("no end")},
    ),
    Mutant(
        "a scheduler's log is full of the terminal's codes",
        test_track.test_a_bar_is_shown_on_a_terminal_alone,
        _shown,
        "if not (console.is_terminal or console.is_jupyter):"
        " → if console.is_dumb_terminal:",
        args={"stream": io.StringIO},
    ),
    Mutant(
        "the bars of several ranks overwrite one another",
        test_track.test_a_bar_is_shown_by_rank_0_alone,
        progress,
        "if world.is_main else → if world else",
    ),
]

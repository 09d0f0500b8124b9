# SPDX-License-Identifier: Apache-2.0
"""Bugs in launching: settings, how machines meet, what a launcher makes of how ranks end."""

from accelfn.launching import (
    agent,
    config,
    crew,
    environment,
    failures,
    file,
    lines,
    machines,
    rendezvous,
    script,
    settings,
    watch,
    worker,
)
from accelfn.launching.function import _check_device
from accelfn.world import connection, listening, meeting, roll_call
from tests.laws import test_causes, test_launch_calls, test_shown_lines
from tests.mutants.mutant import Mutant
from tests.unit import (
    test_answers,
    test_crew,
    test_failures,
    test_launch_function,
    test_rendezvous,
    test_roll_call,
    test_settings,
    test_watch,
    test_world,
)
from tests.unit.test_failures import ENDED, INTERRUPTED, KILLED, LEFT

MUTANTS = [
    Mutant(
        "L55: axes for another number of ranks than this machine starts are launched",
        test_launch_calls.test_a_launch_is_what_its_settings_say,
        settings.Settings.axes_of,
        "check_axes(text, source, size) → check_axes(text, source, None)",
    ),
    Mutant(
        "a run whose ranks left on SIGINT is reported as failed, and started again",
        test_failures.test_ranks_that_were_asked_to_end_have_left,
        failures.Failure.left_on_signal,
        "in (signal.SIGTERM, signal.SIGINT) → == signal.SIGTERM",
        args={"how": [INTERRUPTED, ENDED], "all_left": True},
    ),
    Mutant(
        "a run that was asked to end is started again, if one rank was slow to leave",
        test_failures.test_ranks_that_were_asked_to_end_have_left,
        failures.all_left_on_signal,
        "each.left_on_signal or each.was_told_to_end for → each.left_on_signal for",
        args={"how": [LEFT, ENDED], "all_left": True},
    ),
    Mutant(
        "a rank that ran out of memory while others left is passed over",
        test_failures.test_ranks_that_were_asked_to_end_have_left,
        failures.Failure.was_told_to_end,
        "self.status == -signal.SIGTERM → self.status < 0",
        args={"how": [LEFT, KILLED], "all_left": False},
    ),
    Mutant(
        "L55: the command of a run that was killed ends with 9, and not with 137",
        test_causes.test_the_cause_of_a_failure_comes_first,
        failures.Failure.exit_code,
        "128 - self.status → -self.status",
    ),
    Mutant(
        "L55: a line that a rank is writing has the words of another",
        test_shown_lines.test_what_ranks_write_is_shown_in_whole_lines,
        lines.WholeLines.write,
        'if line.endswith("\\n"): → if line:',
    ),
    Mutant(
        "L55: the launcher's own words are kept back",
        test_shown_lines.test_what_is_no_ranks_passes_as_it_is,
        lines.WholeLines.write,
        "return self._stream.write(text) → return len(text)",
    ),
    Mutant(
        "L55: what a rank wrote last, without a line's end, is lost",
        test_shown_lines.test_what_ranks_write_is_shown_in_whole_lines,
        lines.WholeLines.end,
        "while self._begun: → while False:",
    ),
    Mutant(
        "L55: a rank that was merely ended is blamed beside the one that raised",
        test_causes.test_the_cause_of_a_failure_comes_first,
        failures.by_cause,
        "if all(each.lost_peer → if any(each.lost_peer",
    ),
    Mutant(
        "L55: of two ranks that failed for reasons of their own the second is not shown",
        test_causes.test_the_cause_of_a_failure_comes_first,
        failures.report,
        "if is_cause and failure.places not in told: → if is_cause and not told:",
    ),
    Mutant(
        "a launcher never ends ranks that hang after another has failed",
        test_watch.test_ranks_may_follow_one_that_failed_for_a_while,
        watch.Watch.may_end,
        "self.failed_at.setdefault(local, time.time())"
        " → self.failed_at[local] = time.time()",
    ),
    Mutant(
        "ranks are ended because another came to its end first",
        test_watch.test_ranks_may_follow_one_that_failed_for_a_while,
        watch.Watch.may_end,
        "if _status(self.pids[local]): → if _status(self.pids[local]) is not None:",
    ),
    Mutant(
        "a rank that lost another is ended before it has written what it saw",
        test_watch.test_ranks_may_follow_one_that_failed_for_a_while,
        watch.Watch.may_end,
        "if not running: → if self.failed_at or not running:",
    ),
    Mutant(
        "torch's agent looks by itself where none had failed: one may be killed before it does",
        test_watch.test_ranks_may_follow_one_that_failed_for_a_while,
        watch.Watch.may_end,
        "default=math.inf → default=0.0",
    ),
    Mutant(
        "a rank that has just begun is killed by the question where it is",
        test_watch.test_a_question_kills_nobody,
        watch.Watch.question,
        "if paths.exists(file)} → if file}",
    ),
    Mutant(
        "a run ends for one that was killed between two looks, though others take its place",
        test_crew.test_torch_is_not_asked_of_ranks_that_others_do_without,
        agent.Agent._looked,
        "watch if may_end and self._watching() is watch else None → watch if may_end else None",
    ),
    Mutant(
        "a newcomer that is gone counts as a failure for ever",
        test_crew.test_torch_is_not_asked_of_ranks_that_others_do_without,
        agent.Agent._watching,
        "if local not in gone → if local >= 0",
    ),
    Mutant(
        "a newcomer that was killed is not taken out of those that are watched",
        test_crew.test_torch_is_not_asked_of_ranks_that_others_do_without,
        crew.Crew._forget,
        "self.gone.add(place) → pass",
    ),
    Mutant(
        "a run with a stopped rank waits for it half a minute, until it is killed",
        test_watch.test_a_rank_that_was_stopped_is_sent_on_to_its_end,
        watch.Watch.question,
        "os.kill(self.pids[local], signal.SIGCONT) → continue",
    ),
    Mutant(
        "a report shows frames of accelfn's where a reader looks for his own",
        test_watch.test_a_stack_begins_in_the_users_script,
        watch._users,
        "if not frame.startswith(leads) → if frame",
    ),
    Mutant(
        "a rank that ends by sys.exit(256) counts as a success",
        test_watch.test_a_rank_that_leaves_with_a_code_has_failed,
        worker.exit_status,
        "error.code & 0xFF or 1 → error.code & 0xFF",
        args={"code": 256, "status": 1},
    ),
    Mutant(
        "a rank that ends by sys.exit('no such file') counts as a success",
        test_watch.test_a_rank_that_leaves_with_a_code_has_failed,
        worker.exit_status,
        "    return 1 →     return 0",
        args={"code": "out of luck", "status": 1},
    ),
    Mutant(
        "ranks that start again find addresses of processes that are gone",
        test_rendezvous.test_each_attempt_has_a_store_of_its_own,
        rendezvous.NumberedRendezvous.next_rendezvous,
        "if self._attempt: → if self._attempt < 0:",
    ),
    Mutant(
        "what launchers told each other of an attempt is taken for the next one's",
        test_rendezvous.test_each_attempt_has_a_store_of_its_own,
        rendezvous.NumberedRendezvous.next_rendezvous,
        'PrefixStore(attempt, agents) → PrefixStore("attempt", agents)',
    ),
    Mutant(
        "ranks of one machine fight for its cores, and train at a part of the speed",
        test_rendezvous.test_ranks_share_the_cores,
        script._shared_threads,
        "max(1, num_cores // nproc) → num_cores",
    ),
    Mutant(
        "with more ranks than cores each is told to use 0 threads",
        test_rendezvous.test_ranks_share_the_cores,
        script._shared_threads,
        "max(1, num_cores // nproc) → num_cores // nproc",
    ),
    Mutant(
        "ranks of two machines wait for each other, each at itself",
        test_rendezvous.test_ranks_of_several_machines_talk_towards_them,
        script._gloo_interface,
        "if machines.most == 1 and ip_address(machines.address).is_loopback:"
        ' → if interface_of("127.0.0.1") is not None:',
    ),
    Mutant(
        "L55: machine 2 of 2 waits for others that have all come",
        test_launch_calls.test_a_machine_is_one_of_those_that_are_counted,
        settings.Settings.machines,
        'if (self["machine_rank"] or 0) >= count:'
        ' → if (self["machine_rank"] or 0) > count:',
    ),
    Mutant(
        "L55: two elastic runs that are started without a name become one",
        test_launch_calls.test_a_launch_is_what_its_settings_say,
        settings.Settings._check_whole,
        '("rdzv_endpoint", "rdzv_id") → ("rdzv_endpoint",)',
    ),
    Mutant(
        "an elastic run waits for machines that it could begin without",
        test_rendezvous.test_a_dynamic_run_begins_with_its_fewest_machines,
        machines.Machines.meeting_at.__func__,
        "fewest=counts[0], → fewest=counts[1],",
    ),
    Mutant(
        "L55: a launcher does not wait for the others as long as it was told",
        test_launch_calls.test_machines_meet_as_they_were_told,
        machines.Machines.meeting_at.__func__,
        "join_seconds=join_seconds, → join_seconds=JOIN_SECONDS,",
    ),
    Mutant(
        "accelfn config throws away the comments of a file that it changes",
        test_settings.test_what_is_edited_is_read,
        config.edited,
        "document = tomlkit.parse(text) → document = tomlkit.document()",
    ),
    Mutant(
        "accelfn config says that it has taken out what the file still has",
        test_settings.test_what_is_edited_is_read,
        config.edited,
        "table.remove(name) → pass",
    ),
    Mutant(
        "accelfn config --default takes back what somebody has set",
        test_answers.test_config_keeps_what_the_file_has,
        config.configure,
        "{**begun, **found} → {**found, **begun}",
    ),
    Mutant(
        "accelfn config --set NAME= does not take the setting out",
        test_answers.test_config_keeps_what_the_file_has,
        config._assign,
        "found.pop(name, None) → found.get(name)",
    ),
    Mutant(
        "who presses enter at a question loses what the file had",
        test_answers.test_config_asks_until_the_answer_can_be,
        config._answer,
        "kept = found.get(name, option.default) → kept = option.default",
    ),
    Mutant(
        "accelfn config writes an address for one machine, which it then refuses",
        test_answers.test_config_asks_until_the_answer_can_be,
        config._questions,
        "found.pop(name, None) → found.get(name)",
    ),
    Mutant(
        "who sends the output of accelfn env with a bug report sends a token",
        test_answers.test_env_tells_no_secret,
        environment._variables,
        "any(each in name for each in _SECRET) → any(each == name for each in _SECRET)",
    ),
    Mutant(
        "accelfn env says nothing of a machine whose file of settings is wrong",
        test_answers.test_env_tells_no_secret,
        environment._settings,
        'return {"error": str(error)} → raise',
    ),
    Mutant(
        "a device behind the last GPU is asked for, and each rank finds out by itself",
        test_launch_function.test_what_no_rank_could_do,
        _check_device,
        "asked.index + 1 → asked.index",
        args={
            "given": {"device": "cuda:99"},
            "said": "takes 100 devices of type 'cuda', and torch sees",
        },
    ),
    Mutant(
        "whoever reaches the network of a machine runs code in launchers that meet on it alone",
        test_rendezvous.test_machines_that_meet_on_the_loopback_listen_there_alone,
        listening.open_store,
        "if is_local or is_loopback else None → if is_local else None",
        args={"how": "dynamic"},
    ),
    Mutant(
        "another user of the machine says where a run connects",
        test_settings.test_where_machines_meet_is_said_by_no_other_user,
        file.read,
        "about.st_uid != os.getuid() or → about.st_uid < 0 or",
        args={"name": "main_address", "whose": "another's"},
    ),
    Mutant(
        "a rank that came and died costs the others their timeout once more",
        test_world.test_all_parts_of_a_meeting_share_one_deadline,
        meeting.join,
        "timeout=meeting.seconds_to_open, → timeout=meeting.timeout,",
    ),
    Mutant(
        "what is left of the start's deadline is the timeout of all collectives",
        test_world.test_all_parts_of_a_meeting_share_one_deadline,
        connection.Connection.set_timeout,
        "seconds=seconds → seconds=1.0",
    ),
    Mutant(
        "other ranks hear of torch's wrapper, and not what a data worker raised",
        test_roll_call.test_what_a_data_worker_raised_is_known_by_its_own_words,
        roll_call.name_error,
        'if first.startswith("Caught ") → if first.startswith("Caught: ")',
        args={"error": ValueError("boom"), "cause": "ValueError: boom"},
    ),
]

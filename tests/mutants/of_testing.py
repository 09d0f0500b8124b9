# SPDX-License-Identifier: Apache-2.0
"""Bugs in what tests are made of: simulated ranks, comparisons, checks, processes."""

import torch

from accelfn.testing import bundle
from accelfn.testing.checking import equivalence, laws, method_laws
from accelfn.testing.comparing import differences, loops, snapshot, states
from accelfn.testing.processes import differential, run
from accelfn.testing.simulation import (
    ambient,
    calls,
    exchange,
    faults,
    group,
    meetings,
    operations,
    ranks,
    sums,
    turns,
    work,
)
from tests.kit import (
    test_bundle,
    test_check_step,
    test_check_transform,
    test_equivalence,
    test_loops,
    test_snapshot,
    test_states,
)
from tests.laws import test_faults as faults_law
from tests.mutants.mutant import Mutant
from tests.ranks import test_differential, test_processes
from tests.simulation import (
    test_collectives,
    test_errors,
    test_faults,
    test_inputs_matter,
    test_isolation,
    test_memory,
    test_sums,
)

MUTANTS = [
    Mutant(
        "complex numbers that round otherwise are within no tolerance",
        test_states.test_a_tolerance_is_of_any_kind_of_number,
        differences.Comparison._unequal,
        "(one.is_floating_point() or one.is_complex()) → one.is_floating_point()",
        args={"dtype": torch.complex64, "sign": 1},
    ),
    Mutant(
        "what a simulated rank does to the filters of warnings is done to its caller's",
        test_isolation.test_the_process_is_as_before,
        ambient.Ambient.enter,
        "setattr(*_FILTERS, list(warnings.filters)) → list(warnings.filters)",
        args={"fn": test_isolation.outcome_returns, "faults": ()},
    ),
    Mutant(
        "of ranks whose core has other work, one alone goes to another",
        test_isolation.test_ranks_that_get_little_of_their_core_go_to_another,
        turns.Turns._make_room,
        "for thread in threads: → for thread in threads[:1]:",
    ),
    Mutant(
        "simulated ranks have the same dropout where real ones have not",
        test_isolation.test_draws_depend_on_seed_and_rank,
        ambient.seed_rank,
        'draws.key(seed, "rank", rank) → draws.key(seed, "rank", 0)',
    ),
    Mutant(
        "a test that sets a variable changes the tests after it",
        test_isolation.test_the_process_is_as_before,
        ambient.process_kept,
        "del os.environ[name] → os.environ[name]",
        args={"fn": test_isolation.outcome_returns, "faults": ()},
    ),
    Mutant(
        "several short stalls add up to a timeout that no real run would have",
        test_faults.test_short_stalls_cost_virtual_time,
        exchange.Exchange.wait,
        "max(self.clocks[call.rank], meeting.ends_at) → self.clocks[call.rank]",
    ),
    Mutant(
        "a rank that would be lost on a cluster is waited for in a simulated world",
        test_faults.test_long_stalls_lose_the_rank,
        exchange.Exchange._carry_out,
        "if waited > TIMEOUT: → if waited > 2 * TIMEOUT:",
        args={"seconds": 1801.0},
    ),
    Mutant(
        "a collective that one rank alone calls passes a simulated run",
        test_errors.test_a_call_that_others_never_join,
        exchange.Exchange.close,
        "elif left: → elif len(left) > 1:",
    ),
    Mutant(
        "ranks that meet in calls for different things go on with each other's numbers",
        test_errors.test_a_mismatch_of_labels,
        calls.Call.agreed,
        "self.structure, self.label → self.structure, None",
    ),
    Mutant(
        "an all-to-all with splits that do not fit passes a simulated run",
        test_errors.test_what_differs_is_named_on_all_ranks,
        calls._unequal_splits,
        "shown(calls[j].fills[i]) → shown(calls[i].sends[j])",
        args={"name": "splits", "schedule": ()},
    ),
    Mutant(
        "the error of a rank is hidden by what it is told as it cleans up",
        test_errors.test_an_error_is_shown_though_its_rank_cleans_up_collectively,
        ranks._origin,
        "if errors and is_told(errors[0][1]): → if not errors:",
    ),
    Mutant(
        "a recv from any rank never meets its send",
        test_collectives.test_messages_from_any_rank_name_their_sender,
        meetings._is_message,
        "and recv.peer in (None, send.rank) → and recv.peer == send.rank",
    ),
    Mutant(
        "two messages of one rank are received in the reverse order",
        test_collectives.test_messages_of_one_sender_keep_their_order,
        meetings.Meetings._join_message,
        "for meeting in self._messages: → for meeting in reversed(self._messages):",
    ),
    Mutant(
        "messages of different tags meet, and carry each other's numbers",
        test_collectives.test_messages,
        meetings._is_message,
        "and send.tag == recv.tag → and send.tag is not None",
    ),
    Mutant(
        "a simulated broadcast from another rank gives the values of rank 0",
        test_collectives.test_broadcast,
        operations._of_root,
        "call.rank == call.root → call.rank == 0",
        args={"dtype": torch.float32},
    ),
    Mutant(
        "a sum over three ranks, as a tree adds it, is that of two",
        test_sums.test_each_number_is_added_in_its_order,
        sums._by_pairs,
        "pairs), *odd] → pairs), *odd[:0]]",
    ),
    Mutant(
        "sums of a ring are those of the ranks' order, and show nothing",
        test_sums.test_each_number_is_added_in_its_order,
        sums._around,
        "pieces[(i + k) % size][i] → pieces[k % size][i]",
    ),
    Mutant(
        "a fault that was planned once happens at every such call",
        test_faults.test_places,
        faults.due,
        "faults.remove(fault) → faults.index(fault)",
    ),
    Mutant(
        "L55: a fault that was planned for an update alone happens as the first one begins",
        faults_law.test_an_update_alone_is_a_place,
        faults.due_as_begins,
        "(fault.rank, fault.step) == (rank, update) → fault.rank == rank",
    ),
    Mutant(
        "L55: an update that was planned to fail, and never began, is not missed",
        faults_law.test_an_update_alone_is_a_place,
        exchange.Exchange.check_reached,
        "if missed: → if False:",
    ),
    Mutant(
        "a fault that was planned for an update happens at the first one",
        test_faults.test_places,
        faults._fits,
        "(fault.step is not None and call.step != fault.step)"
        " → (fault.step is not None and call.step is None)",
    ),
    Mutant(
        "a test with a corrupted element finds nothing, for the element is as it was",
        test_faults.test_corrupt_changes_values_of_any_kind,
        faults._corrupt,
        "if torch.equal(wrong, place) or place.isnan(): → if place.isnan():",
        args={"value": torch.tensor([[1e30, 2.0]])},
    ),
    Mutant(
        "a forgotten wait passes a simulated run, and reads garbage in a real one",
        test_memory.test_a_result_is_nan_until_it_is_waited_for,
        work._poison,
        "target.fill_(math.nan) → target.mul_(1)",
        args={"kind": "all_reduce", "dtype": torch.float32},
    ),
    Mutant(
        "a forgotten wait for bytes reads zeros, which pass for a result",
        test_memory.test_an_integer_result_is_far_off_until_it_is_waited_for,
        work._poison,
        "limits.min or limits.max → limits.min",
        args={"dtype": torch.uint8, "number": 0},
    ),
    Mutant(
        "ranks get what a sender wrote after it had sent",
        test_memory.test_inputs_are_copied_when_they_are_posted,
        group.SimulatedGroup._call,
        "each.detach().clone() for each in given → each.detach() for each in given",
    ),
    Mutant(
        "a test of many schedules tries the same order of ranks each time",
        test_inputs_matter.test_schedules_give_other_orders,
        turns.Turns._choose,
        "every[choice % len(every)] → every[choice * 0]",
    ),
    Mutant(
        "compare_loops calls loops exactly equal that once differed in a rounding",
        test_loops.test_the_tolerance_is_relative_to_the_largest_element,
        loops.compare_loops,
        "exact and not _differing(one, two, equal) → not _differing(one, two, equal)",
    ),
    Mutant(
        "compare_loops compares what the old loop held at its end with every update",
        test_loops.test_tensors_changed_later_are_compared_as_they_were_reported,
        loops.compare_loops,
        "tree.clone(dict(each)) → dict(each)",
    ),
    Mutant(
        "a port that trains an epoch too few passes for the loop that it replaces",
        test_loops.test_a_loop_that_ends_early_is_a_difference,
        loops._check_lengths,
        "if compared == steps + 1: → if compared:",
    ),
    Mutant(
        "quantities shows gradients that are as many times too large as a batch has rows",
        test_loops.test_quantities_of_gradients_are_those_of_the_mean,
        loops._gradients,
        "dict(source.tensors) → dict(source.as_taken)",
        args={"setup": None, "weight": 4},
    ),
    Mutant(
        "quantities of a state have numbers of groups as they were before the first step",
        test_loops.test_a_faithful_port_agrees,
        loops._of_state,
        "{**group, **state.opt_state.get(group_key(i), {})} → dict(group)",
        args={"make": test_loops.Taken, "options": {"lr": 0.25, "momentum": 0.5}},
    ),
    Mutant(
        "a test that compares loops changes what the tests after it draw",
        test_loops.test_both_loops_draw_the_same_and_the_process_is_left_as_it_was,
        loops._draws_kept,
        "random.setstate(python) → random.getstate()",
    ),
    Mutant(
        "a state with one tensor in two places equals one with two tensors",
        test_states.test_a_tensor_shared_by_two_entries_counts,
        states.assert_states_equal,
        "found += _ties(a, b, comparison) → _ties(a, b, comparison)",
    ),
    Mutant(
        "comparing a with b and b with a give different answers",
        test_states.test_a_tolerance_is_the_same_from_both_sides,
        differences.Comparison._unequal,
        "largest(one, two) → largest(one)",
    ),
    Mutant(
        "states that differ in the sign of a zero are equal bit by bit",
        test_states.test_what_a_line_says,
        differences.Comparison._unequal,
        "return _bits(one) != _bits(two) → return one != two",
        args={"one": 0.0, "two": -0.0, "line": "0.0 and -0.0"},
    ),
    Mutant(
        "the refusal names the state that has no such entry",
        test_states.test_an_entry_that_only_one_has_is_found_and_named,
        differences.Comparison._lone,
        "0 if in_one else 1 → 1 if in_one else 0",
    ),
    Mutant(
        "a snapshot of communication passes a run whose collectives changed places",
        test_snapshot.test_the_order_of_collectives_counts,
        snapshot._block,
        "groupby(lines) → groupby(sorted(lines))",
    ),
    Mutant(
        "a snapshot of communication depends on the schedule",
        test_snapshot.test_sends_are_listed_by_ranks,
        snapshot._block,
        'sends = sorted(map(_line, (each for each in entries if each.kind == "send")))'
        ' → sends = [_line(each) for each in entries if each.kind == "send"]',
    ),
    Mutant(
        "a snapshot lists updates that had other collectives, or none",
        test_snapshot.test_updates_are_listed_as_ranges,
        snapshot._ranges,
        "if runs and step == runs[-1][-1] + 1: → if runs and step <= runs[-1][-1] + 3:",
        args={
            "updates": [0, 1, 2, 5, 7, 8],
            "title": "each of updates 0 to 2, 5, 7, 8",
        },
    ),
    Mutant(
        "a test that lost its snapshot passes, whatever the run communicates",
        test_snapshot.test_a_missing_file_is_not_written_by_itself,
        snapshot.assert_collectives,
        "if update: → if update or not file.exists():",
    ),
    Mutant(
        "assert_equivalent calls setups equal whose slots differ",
        test_equivalence.test_slots_of_transforms_that_both_have_count,
        equivalence._comparable,
        "names[0] ^ names[1] → names[0] | names[1]",
    ),
    Mutant(
        "assert_equivalent passes a setup that owes another last average",
        test_equivalence.test_what_is_owed_at_the_end_counts,
        equivalence.assert_equivalent,
        "range(updates + 1), range(size) → range(updates), range(size)",
    ),
    Mutant(
        "assert_equivalent passes a setup under which another rank drifts",
        test_equivalence.test_every_size_is_tried,
        equivalence.assert_equivalent,
        "range(updates + 1), range(size) → range(updates + 1), range(1)",
    ),
    Mutant(
        "assert_equivalent trains a setup that shards by itself on a part of the data",
        test_equivalence.test_a_setup_that_shards_already_is_not_sharded_twice,
        equivalence._over_ranks,
        "None if sharded else shard_data() → shard_data()",
    ),
    Mutant(
        "check_transform passes one whose checkpoints cannot be loaded on fewer ranks",
        test_check_transform.test_planted_bugs_are_refused_by_their_law,
        method_laws._loads_anywhere,
        "for size in {1, subject.size + 1}: → for size in {subject.size + 1}:",
        args={"planted": test_check_transform.NotOnFewer(), "law": "loads_anywhere"},
    ),
    Mutant(
        "check_transform passes one whose evaluation has fewer parameters",
        test_check_transform.test_planted_bugs_are_refused_by_their_law,
        method_laws._lost_parameter,
        "params.keys() - returned[0].keys() → returned[0].keys() - params.keys()",
        args={"planted": test_check_transform.EvaluatesLess(), "law": "drops_nothing"},
    ),
    Mutant(
        "check_step passes a step under which ranks drift apart",
        test_check_step.test_replicas_that_drift_are_found,
        laws.replicas_agree,
        "if broken: → if broken and not update:",
    ),
    Mutant(
        "a crash bundle of a step that ended one of its states cannot be replayed",
        test_bundle.test_states_of_which_one_is_over_are_not_saved,
        bundle._write,
        "any(state.lease.is_over for state in kept)"
        " → all(state.lease.is_over for state in kept)",
        args={"given": 0},
    ),
    Mutant(
        "a crash is replayed on ranks, too, that an older run had more",
        test_bundle.test_an_older_run_on_more_ranks_is_not_replayed,
        bundle._read,
        "[bundles[rank] for rank in range(size)] → list(bundles.values())",
        args={"size": 2},
    ),
    Mutant(
        "a rank that was killed is replayed by what it left in a run on other ranks",
        test_bundle.test_an_older_bundle_is_not_that_of_a_rank_that_left_none,
        bundle._read,
        'if each["size"] == size → if each',
    ),
    Mutant(
        "whoever replays a crash that does not come again is not told",
        test_bundle.test_a_run_that_does_not_raise_again_says_so,
        bundle.replay,
        "raise SimulationError(msg) → return",
    ),
    Mutant(
        "a program on no ranks returns nothing, and the test that ran it passes",
        test_processes.test_a_size_is_a_number_of_ranks,
        run._check,
        "if not is_integer(size, 1): → if not is_integer(size, 0):",
        args={"size": 0},
    ),
    Mutant(
        "of real ranks that failed the first is shown, and not the one that began it",
        test_processes.test_the_rank_that_failed_first_is_shown,
        run._report,
        "sorted(failed, key=lambda rank: failed[rank].at) → sorted(failed)",
    ),
    Mutant(
        "after a rank has died every later program of that size fails",
        test_processes.test_a_rank_that_died_between_programs_is_replaced,
        run._pool,
        "if pool is None or not pool.is_idle(): → if pool is None:",
    ),
    Mutant(
        "a run that gives another rank something else on Gloo passes for the same",
        test_differential.test_a_state_is_compared_in_what_is_saved_of_it,
        differential.compare_with_processes,
        "if found: → if found and rank == 0:",
    ),
    Mutant(
        "of a loss that is a sum nothing is said but that setups differ",
        test_equivalence.test_a_loss_that_is_a_sum_is_seen,
        equivalence.assert_equivalent,
        "if moment == 0 and is_own → if moment == 1 and is_own",
    ),
    Mutant(
        "the kit takes every difference for that of a loss that is a sum",
        test_equivalence.test_a_difference_behind_the_loss_is_no_sum,
        equivalence._hint,
        "or not comparison.by_name(*losses) → ",
    ),
]

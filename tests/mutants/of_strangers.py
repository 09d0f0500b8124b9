# SPDX-License-Identifier: Apache-2.0
"""Bugs that a stranger chose from the code alone, which no law saw, and their kin."""

from accelfn.base import codec
from accelfn.checkpoint import compare, files, keep
from accelfn.collectives import averages, parts
from accelfn.data import epoch, stream
from accelfn.engine import agreement, buffers, compression, engine
from accelfn.engine.optimizer import live_optimizer, versions
from accelfn.engine.zero import places
from accelfn.loop import batches, evaluate, memory_use
from accelfn.outer import fragments
from accelfn.state import alike, hyper, metrics, views
from accelfn.state.grads import Grads
from accelfn.state.state import TrainState
from accelfn.step import stages, value_and_grad
from accelfn.testing.simulation import wire
from accelfn.testing.traffic import traffic
from accelfn.transforms import clip, context_parallel, diloco, local_sgd
from accelfn.weights import import_state
from tests.laws import (
    test_averages,
    test_buckets,
    test_buffers,
    test_compression,
    test_counts,
    test_definitions,
    test_diloco,
    test_failing_saves,
    test_flats,
    test_gradients,
    test_import_state,
    test_in_backward,
    test_interrupted,
    test_layer_draws,
    test_local_sgd,
    test_loops_of_nothing,
    test_memory,
    test_norms,
    test_purity,
    test_replicas,
    test_schedule_advice,
    test_shared_draws,
    test_storage,
    test_streams,
    test_traffic,
    test_whole_tensors,
)
from tests.mutants.mutant import Mutant
from tests.unit import test_batches, test_checkpoint, test_loss, test_step, test_views
from tests.unit import test_context_parallel as unit

OF_DATA = [
    Mutant(
        "L4: batches of a budget come in the same order in each epoch",
        test_buckets.test_batches_of_a_budget_come_in_any_order,
        epoch.epoch_of,
        'draws.key(seed, "batches", number) → draws.key(seed, "batches")',
    ),
    Mutant(
        "a fact that data has only now is no other data",
        test_checkpoint.test_going_on_with_another_kind_of_data,
        compare.check_data,
        "names = dict.fromkeys((*saved, *facts)) → names = dict.fromkeys(saved)",
        args={"turned": True},
    ),
    Mutant(
        "L35: a stream that keeps the state that it began with goes on in it",
        test_streams.test_each_reading_begins_at_the_beginning,
        stream.Opened.__init__,
        "dataset.load_state_dict(copy.deepcopy(first)) → dataset.load_state_dict(first)",
    ),
    Mutant(
        "L35: a stream is read from where another reading of it has come",
        test_streams.test_each_reading_begins_at_the_beginning,
        stream.Opened.__init__,
        "if start.memory is None and first is not None: → if False:",
    ),
]

OF_CHECKPOINTS = [
    Mutant(
        "L53: a directory without a manifest is taken for a checkpoint by its name",
        test_failing_saves.test_what_a_store_did_not_write_is_not_its_own,
        keep.steps_in,
        "paths.is_file(path / NAME) → True",
    ),
    Mutant(
        "L41: ranks whose tensors are the same bytes in other shapes are saved as one",
        test_storage.test_what_ranks_see_otherwise_is_each_ones_own,
        files.digests,
        'f"{tensor.dtype}{tuple(tensor.shape)}" → f"{tensor.dtype}"',
    ),
    Mutant(
        "L41: ranks whose tensors are the same bytes in other dtypes are saved as one",
        test_storage.test_what_ranks_see_otherwise_is_each_ones_own,
        files.digests,
        'f"{tensor.dtype}{tuple(tensor.shape)}" → f"{tuple(tensor.shape)}"',
    ),
]

OF_RANKS = [
    Mutant(
        "L3: a large tensor that is not in one piece is cut as if it were",
        test_averages.test_a_mean_is_that_of_all_in_any_pieces,
        averages._buckets,
        "tensor.numel() <= most or not tensor.is_contiguous() → tensor.numel() <= most",
    ),
    Mutant(
        'ranks along "cp" are compared with those of the first samples alone',
        unit.test_batches_that_differ_along_cp_are_refused,
        context_parallel._Sequence._of_group,
        "begin = rank - rank % size → begin = 0",
        args={"odd": 3},
    ),
    Mutant(
        "L47: a dim that a user has cut twice is put together as if it divided",
        test_whole_tensors.test_parts_of_unlike_parts_are_gathered_too,
        parts._in_turn,
        "tensor.shape[dim] % count == 0 → True",
    ),
]

NORMS = test_norms.test_the_norm_of_parts_is_that_of_the_whole

OF_NORMS = [
    Mutant(
        "L14: of the largest element, one rank's NaN is none",
        NORMS,
        clip._norm_of_shards,
        "nan_to_num(math.inf, math.inf) → nan_to_num(0.0, math.inf)",
    ),
    Mutant(
        "L14: parts that are cut along other axes are added up along those of the first",
        NORMS,
        clip._by_ranks,
        "(each.device_mesh, cut), [] → each.device_mesh, []",
    ),
    Mutant(
        "L14: a norm crosses in the dtype of what a rank has",
        NORMS,
        clip._norm_of_shards,
        "norm_type).double() → norm_type)",
    ),
    Mutant(
        "L14: a norm is as wide as the parts that a rank has",
        NORMS,
        clip._norm_of_shards,
        "for each in shards) → for each in shards if local(each).numel())",
    ),
]

OF_LOOPS = [
    Mutant(
        'L21: ranks along "tp" evaluate the same model by other draws',
        test_layer_draws.test_ranks_that_compute_the_same_draw_the_same,
        evaluate._Lent.__init__,
        '"evaluate", state.world.loss.rank → "evaluate", state.world.rank',
        args={"axes": {"tp": 2}},
    ),
    Mutant(
        'L21: ranks along "cp" evaluate their parts of a sample by the same draws',
        test_layer_draws.test_ranks_that_compute_the_same_draw_the_same,
        evaluate._Lent.__init__,
        '"evaluate", state.world.loss.rank → "evaluate", state.world.batch.rank',
        args={"axes": {"cp": 2, "tp": 2}},
    ),
    Mutant(
        "L2: ranks whose schedules part after some updates train together",
        test_definitions.test_any_two_that_differ_are_told_apart,
        agreement._asked,
        "in _ASKED: → in _ASKED[:2]:",
        args={"part": "schedule"},
    ),
    Mutant(
        "L11: fragments are exchanged a whole number of times sooner than evenly",
        test_diloco.test_it_is_what_the_papers_say,
        fragments.Timetable._first,
        "i * self.sync_every // self.fragments → i * (self.sync_every // self.fragments)",
    ),
]

OF_STATES = [
    Mutant(
        "L22: copies of gradients are given with what they were copied from",
        test_gradients.test_copies_of_gradients_are_their_own,
        Grads.map,
        "attrs.evolve(self.taken, lease=Lease()) → self.taken",
    ),
    Mutant(
        "L22: a frozen model shares its buffers with the state that it was made of",
        test_purity.test_what_is_taken_of_a_state_is_the_takers,
        views.frozen,
        "{name: apart(each) for name, each in state.buffers.items()} → state.buffers",
        args={"what": "a frozen model", "at": "train", "setup": None},
    ),
    Mutant(
        "L22: a frozen model of one rank shares its parameters with the state",
        test_purity.test_what_is_taken_of_a_state_is_the_takers,
        views.frozen,
        "{name: apart(each) for name, each in all_of_it.items()} → all_of_it",
        args={"what": "a frozen model", "at": "train", "setup": None},
    ),
    Mutant(
        "L22: a state with other parameters shares those that it was given",
        test_purity.test_what_is_taken_of_a_state_is_the_takers,
        TrainState.with_params,
        "tree.clone(params[n]) → params[n]",
        args={"what": "given parameters", "at": "train", "setup": None},
    ),
    Mutant(
        "L20: a tensor that stands twice in a slot takes its memory twice",
        test_memory.test_a_tensor_in_two_places_is_there_once,
        memory_use._bytes_of,
        "{id(each): each for each in tree.tensor_leaves(value)}.values()"
        " → [*tree.tensor_leaves(value)]",
    ),
    Mutant(
        "L10: neighbours that come in mid-run count the last update alone",
        test_local_sgd.test_neighbours_meet_more_often,
        local_sgd.local_sgd.after_update,
        "if key in before else since → if key in before else update.weight",
    ),
]

BOOKS = test_traffic.test_seconds_are_those_of_the_books

OF_TRAFFIC = [
    Mutant(
        "L49: the busiest rank of an all-gather sends its own part once more",
        BOOKS,
        wire._all_gather,
        "busiest=hops * what.most → busiest=what.total",
    ),
    Mutant(
        "L49: what is passed on from rank to rank is as slow as if each waited for all of it",
        BOOKS,
        wire._pipelined,
        "busiest=n) → busiest=hops * n)",
    ),
    Mutant(
        "L49: an update is over when the first rank's part of the world is",
        test_traffic.test_parts_of_a_world_wait_for_their_own_ranks,
        traffic.Traffic.seconds,
        "(range(1) if whole else range(ranks)) → range(1)",
    ),
    Mutant(
        "L49: a matrix that has fewer rows than the rank is not sent as its factors",
        test_compression.test_a_matrix_is_sent_as_factors_where_that_pays,
        compression.LowRank._pays,
        "min(rows, columns, self._rank) → self._rank",
    ),
    Mutant(
        "L49: a matrix is sent as its factors whatever rate was asked",
        test_compression.test_a_matrix_is_sent_as_factors_where_that_pays,
        compression.LowRank._pays,
        "* rank * self._rate < → * rank <",
    ),
    Mutant(
        "L11: what few bits have left out is lost by the last exchange",
        test_diloco.test_in_the_end_nothing_is_lost_either,
        diloco.diloco._averaged,
        'for name in names if slot["error"] else (): → for name in ():',
    ),
]

OF_IMPORTS = [
    Mutant(
        "L42: the count of a parameter that is one number is imported in its dtype",
        test_import_state.test_what_torch_saved_goes_on,
        import_state._entry,
        'if each.shape == tuple(param.shape) and key != "step":'
        " → if each.shape == tuple(param.shape):",
    ),
]

INTERRUPTED = test_interrupted.test_a_step_that_raises_leaves_a_state_or_none
BUFFERS = test_buffers.test_buffers_are_those_of_the_passes_that_were_applied
EMPTY = test_views.test_after_the_block_it_is_empty
SOUGHT = test_batches.test_seeking_gives_the_batches_that_a_run_had_left

OF_TRAINING = [
    Mutant(
        "L3: to the mean of one whole batch others are added as if it weighed 1",
        test_gradients.test_what_is_added_is_what_one_pass_gives,
        engine.Engine._take_in,
        "into.multiplied() → into.taken.num_micro_batches > 1 and into.multiplied()",
    ),
    Mutant(
        "L22: a buffer that took another shape is written by the next pass, applied or not",
        BUFFERS,
        buffers.Buffers.commit,
        "self._home[name].data = value.clone() → self._home[name].data = value",
    ),
    Mutant(
        "L22: a pass writes into the state's own buffer where the last one's had another shape",
        BUFFERS,
        buffers.Buffers.begin,
        "self._place(each, sources[name].clone()) → self._place(each, sources[name])",
    ),
    Mutant(
        "L22: a pass that raised leaves the memory that it gave to a buffer in the model",
        BUFFERS,
        buffers.Buffers.abandon,
        "self._place(each, self._scratch[each.name]) → pass",
    ),
    Mutant(
        "a module that was lent keeps the state's buffers",
        EMPTY,
        views._end,
        "[*module.parameters(), *module.buffers()] → module.parameters()",
        args={"error": None},
    ),
    Mutant(
        "a module that was lent keeps the state's memory, of which it shows nothing",
        EMPTY,
        views._end,
        "torch.empty(0, dtype=tensor.dtype, device=tensor.device) → tensor.data.view(-1)[:0]",
        args={"error": None},
    ),
    Mutant(
        "seeking without an epoch is seeking in the first",
        SOUGHT,
        batches.seek,
        "state.cursor.epoch if epoch is None else epoch → epoch or 0",
    ),
    Mutant(
        "seeking is seeking in the epoch in which the state stands, whichever is told",
        SOUGHT,
        batches.seek,
        "state.cursor.epoch if epoch is None else epoch → state.cursor.epoch",
    ),
    Mutant(
        "seeking in the first epoch is seeking in that in which the state stands",
        SOUGHT,
        batches.seek,
        "state.cursor.epoch if epoch is None else epoch → epoch or state.cursor.epoch",
    ),
    Mutant(
        "L50: losses of a run that is resumed in a state of another seed draw by that one",
        test_shared_draws.test_what_is_loaded_draws_by_its_own_seed,
        engine.Engine._key,
        "self._key_of[0] != state.seed → self._key_of[0] is None",
    ),
    Mutant(
        "L50: factors of PowerSGD are drawn by the seed of the first state of an engine",
        test_shared_draws.test_what_is_loaded_draws_by_its_own_seed,
        compression.LowRank.begin,
        "self._before, self._seed, self._scale = slot, seed, loss_scale"
        " → self._before, self._seed, self._scale = slot, self._seed or seed, loss_scale",
    ),
    Mutant(
        "L22: a step that raised before its backward pass leaves a plan to the next pass",
        test_in_backward.test_gradients_by_themselves_are_refused,
        stages.take_in_backward,
        "live.forget()  # it may not have come to the backward pass → pass",
    ),
    Mutant(
        "L2: ranks move elements in as many calls as each has bytes for",
        test_flats.test_each_rank_gets_the_elements_that_it_wants,
        places._by_calls,
        "have[name][-1][1] * piece.element_size() → piece.numel() * piece.element_size()",
    ),
    Mutant(
        "L41: elements for which a call has no room any more are in none",
        test_flats.test_each_rank_gets_the_elements_that_it_wants,
        places._by_calls,
        "names, total = [], 0\n        names.append(name)"
        " → names, total = [], 0; continue\n        names.append(name)",
    ),
    Mutant(
        "L41: of two tensors whose places read alike the last one is saved for both",
        test_storage.test_tensors_are_told_apart_by_their_places,
        codec.Table.put,
        "if not _NAME.fullmatch(path) or path in self: → if not _NAME.fullmatch(path):",
    ),
    Mutant(
        "L41: tensors whose places read alike, or as no name, are saved as one",
        test_storage.test_tensors_are_told_apart_by_their_places,
        codec.Table.put,
        'name = f"<{len(self)}>" → name = "<other>"',
    ),
    Mutant(
        "L45: ranks of another number have each seen as much as all before together",
        test_diloco.test_other_ranks_go_on,
        diloco.diloco.merge,
        "mean = [sum(each) / count for → mean = [sum(each) for",
    ),
    Mutant(
        "L2: replicas agree that differ in values that are on their way",
        test_replicas.test_any_leaf_of_a_slot_is_compared,
        alike._rows,
        "elif isinstance(value, Pending): → elif False:",
    ),
    Mutant(
        "L2: replicas agree that differ in the state of an object",
        test_replicas.test_any_leaf_of_a_slot_is_compared,
        alike._rows,
        "elif has_state(value): → elif False:",
    ),
    Mutant(
        "L22: of an update that raised nobody looks at what the one before had made",
        INTERRUPTED,
        live_optimizer.LiveOptimizer.finish,
        "self._versions = None → pass",
    ),
    Mutant(
        "L22: of an update that raised nobody looks at what an optimizer keeps",
        INTERRUPTED,
        versions._tensors_of,
        "for entry in (*states, *groups) → for entry in groups",
    ),
    Mutant(
        "L30: of several that cut a plain value the last is asked for its parts alone",
        test_counts.test_parts_of_parts_are_counted,
        value_and_grad._count,
        "for parts_of in cuts:  # → for parts_of in cuts[-1:]:  #",
    ),
    Mutant(
        "L30: the last of several that cut a plain value is asked first for its parts",
        test_counts.test_parts_of_parts_are_counted,
        value_and_grad._count,
        "for parts_of in cuts:  # → for parts_of in reversed(cuts):  #",
    ),
    Mutant(
        "parameter groups are counted from the last by numbers below 0",
        test_step.test_hyper_of_nothing,
        hyper._chosen,
        "0 <= wanted < len(groups) → wanted < len(groups)",
        args={"where": (-1, "lr")},
    ),
    Mutant(
        "what follows the name of a hyperparameter is not looked at",
        test_step.test_hyper_of_nothing,
        hyper._chosen,
        "isinstance(where, tuple) and len(where) == 2 → isinstance(where, tuple)",
        args={"where": (0, "lr", "betas")},
    ),
    Mutant(
        "L43: a transform that sets the rate of a group is told that the schedule is over",
        test_schedule_advice.test_rates_of_a_transform_are_its_own,
        hyper._planned,
        "w if isinstance(w, str) else w[-1] for w in found → w for w in found",
    ),
    Mutant(
        "L39: a copy of a complete run that was loaded says that it has no batch",
        test_loops_of_nothing.test_a_loop_that_does_nothing_says_so,
        TrainState.copy,
        "lease=Lease(is_loaded=self.lease.is_loaded) → lease=Lease()",
    ),
    Mutant(
        "L14: the norm of no elements is as narrow as they are",
        NORMS,
        clip._norm_here,
        "nothing if nothing.dtype.itemsize >= 4 else nothing.float() → nothing",
    ),
    Mutant(
        "adding metrics changes the first of them",
        test_loss.test_metrics_add_by_weight,
        metrics.Metrics.__add__,
        "sums = dict(self._sums) → sums = self._sums",
    ),
    Mutant(
        "of two metrics of one name the second counts alone",
        test_loss.test_metrics_add_by_weight,
        metrics.Metrics.__add__,
        "sums[name] + entry if name in sums else entry → entry",
    ),
]

MUTANTS = [
    *OF_TRAINING,
    *OF_IMPORTS,
    *OF_TRAFFIC,
    *OF_STATES,
    *OF_NORMS,
    *OF_LOOPS,
    *OF_DATA,
    *OF_CHECKPOINTS,
    *OF_RANKS,
]

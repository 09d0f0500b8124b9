# SPDX-License-Identifier: Apache-2.0
"""Bugs in orders, in streams, and in what ranks with unequal parts do together."""

from typing import Any

from accelfn import budget, gather_valid, split
from accelfn.base import draws
from accelfn.collectives import trees
from accelfn.data import (
    cut,
    dataset,
    dispatch,
    epoch,
    fetch,
    mixed,
    permutation,
    readers,
    reading,
    sharded,
    stream,
    workers,
)
from accelfn.data.lockstep import _batch, _together
from accelfn.data.orders import buckets, order, samplers, weights
from accelfn.data.split import _like
from tests.laws import (
    test_buckets,
    test_gathering,
    test_mixes,
    test_orders,
    test_ranks_data,
    test_streams,
    test_unequal_streams,
    test_weighted,
)
from tests.mutants.mutant import Mutant
from tests.unit import test_workers

OF_ORDERS = [
    Mutant(
        "L40: bucketed positions are taken from the beginning of their window on",
        test_orders.test_an_index_alone_is_the_one_in_sequence,
        buckets.bucketed.of_epoch,
        "[positions[here] - number * window] → [np.arange(here.sum())]",
    ),
    Mutant(
        "L38: the samples of a micro-batch are in another order than the batch's",
        test_orders.test_every_order_is_that_of_one_process,
        epoch.portions,
        "block[first:last] → block[first:last][::-1].copy()",
    ),
    Mutant(
        "L40: a position beyond four thousand million is another one",
        test_orders.test_a_shuffle_of_any_length_is_looked_into,
        permutation.shuffled,
        "positions.astype(np.uint64) → positions.astype(np.uint32).astype(np.uint64)",
    ),
    Mutant(
        "L40: a round of the network forgets half of what it was given",
        test_orders.test_a_long_shuffle_has_each_index_once,
        permutation._feistel,
        "left ^ ((mixed >> high) & mask) → (mixed >> high) & mask",
        args={"n": 2**20},
    ),
    Mutant(
        "L40: a draw at a border takes the sample before it",
        test_weighted.test_a_weight_of_zero_is_never_drawn,
        weights.weighted.of_epoch,
        'np.searchsorted(below, at, side="right")'
        ' → np.searchsorted(below, at, side="right") - 1',
    ),
    Mutant(
        "L40: without replacement a sample may come again",
        test_weighted.test_without_replacement_nothing_comes_twice,
        weights.weighted.of_epoch,
        "if self.replacement: → if True:",
    ),
    Mutant(
        "L40: heavy samples come too often",
        test_weighted.test_weights_are_frequencies,
        weights.weighted.of_epoch,
        "np.cumsum(self.weights) → np.cumsum(self.weights**1.1)",
    ),
    Mutant(
        "L40: without replacement heavy samples come first too often",
        test_weighted.test_without_replacement_as_one_draws_after_another,
        weights.weighted.of_epoch,
        "-np.log1p(-uniform(np.arange(n), key=key)) / self.weights"
        " → uniform(np.arange(n), key=key) / self.weights",
    ),
    Mutant(
        "L35: samples of a batch have any lengths",
        test_buckets.test_buckets_are_sorted_windows,
        buckets.bucketed.of_epoch,
        'indices = indices[np.argsort(self.lengths[indices], kind="stable")] → pass',
    ),
    Mutant(
        "L40: the batches of a window come by length",
        test_buckets.test_batches_of_a_window_come_in_any_order,
        buckets.bucketed.of_epoch,
        "reshape(whole, step)[turns] → reshape(whole, step)[np.sort(turns)]",
    ),
    Mutant(
        "L35: a batch leaves out the sample with which it would be full",
        test_buckets.test_budgets_are_kept_and_used,
        budget._fitting,
        "int(beyond.argmax()) if → max(1, int(beyond.argmax()) - 1) if",
    ),
    Mutant(
        "L38: a sampler that goes by set_epoch gives every epoch alike",
        test_orders.test_samplers_are_kept,
        samplers._drawn,
        'cast("Any", each).set_epoch(epoch) → pass',
    ),
    Mutant(
        "L38: a sampler of fewer samples is replaced by an order of all",
        test_orders.test_random_samplers_are_functions_of_the_epoch,
        samplers.order_of_sampler,
        "== len(sampler.data_source) == n → == len(sampler.data_source)",
    ),
    Mutant(
        "L42: a batch sampler's run that is cut goes on a batch too late",
        test_orders.test_batch_samplers_are_kept,
        cut.UnevenCut.spans,
        "self.stops[first:] → self.stops[first + (start > 0) :]",
    ),
    Mutant(
        "L35: what a block's shares lose is the last dataset's",
        test_mixes.test_mixes_have_their_shares_in_every_block,
        mixed.Mixed.used,
        "positions = sum(self.shares), self.block * blocks"
        " → positions = sum(self.shares), self.block * blocks // 4 * 5",
    ),
    Mutant(
        "L35: the samples of a mixed dataset that come first come most",
        test_mixes.test_mixes_go_through_each_dataset,
        mixed.Mixed.of_epoch,
        "start + np.arange(len(places)) → np.arange(len(places))",
    ),
    Mutant(
        "L38: a user's order is that of the first epoch",
        test_orders.test_an_order_of_ones_own_is_followed,
        order.Own._called,
        "self.function(seed, epoch, n) → self.function(seed, 0, n)",
    ),
    Mutant(
        "L35: a mix is evaluated in the order in which it is trained",
        test_mixes.test_they_are_evaluated_in_their_own_order,
        dataset.Data.in_order,
        "order=None, → ",
    ),
    Mutant(
        "L36: a mix is collated as torch does, whatever it was given",
        test_mixes.test_options_of_a_mix_are_those_of_data,
        dataset.Data.mix.__func__,
        "order=order, **options → order=order, **{**options, 'collate': None}",
    ),
]

OF_STREAMS = [
    Mutant(
        "L42: what fills up a resumed stream's last batch begins where the stream was put",
        test_streams.test_a_stream_goes_on_where_it_was_cut,
        stream.Stream._repeats,
        "Cursor(epoch), self.first) → Cursor(epoch))",
    ),
    Mutant(
        "L35: a micro-batch begins with the last sample of the one before",
        test_streams.test_a_stream_is_read_as_if_by_index,
        stream.Stream.values,
        "at = begin - low if stop > begin"
        " → at = max(begin - low - 1, 0) if stop > begin",
    ),
    Mutant(
        "L35: rank 0 cuts what it reads for itself",
        test_streams.test_dispatched_is_as_if_each_read,
        dispatch._of_rank,
        "rank=rank if plan.num_shares > 1 else plan.rank → rank=plan.rank",
    ),
    Mutant(
        "L35: a stream that divides itself among workers is divided again",
        test_streams.test_workers_read_as_one,
        stream.as_one_reader,
        "torch_worker._worker_info = None → pass",
        args={"workers": 2},
    ),
    Mutant(
        "L35: the sample that tells whether a batch is the last is lost",
        test_streams.test_a_stream_comes_once,
        stream.Stream._epoch,
        "taken, samples = samples[:size], samples[size:]"
        " → taken, samples = samples[:size], samples[size + 1 :]",
    ),
    Mutant(
        "L42: a resumed stream leaves out what was read ahead",
        test_streams.test_a_stream_goes_on_where_it_was_cut,
        stream.Stream._epoch,
        "memory=memories.pop(own) → memory=opened.memory()",
    ),
    Mutant(
        "L42: a worker takes the updates of the next one",
        test_streams.test_workers_that_read_ahead_are_resumed,
        stream.Share.__iter__,
        "if i % count == number:"
        " → if (i + bool(self._start.samples)) % count == number:",
        args={"workers": 2},
    ),
    Mutant(
        "L45: an epoch begins where another loop left the stream",
        test_streams.test_elastic_streams_come_once,
        stream.first_state,
        "return copy.deepcopy(dataset.state_dict()) → return None",
    ),
    Mutant(
        "L42: a stream that is read again gives its last sample twice",
        test_streams.test_a_stream_is_read_again,
        stream.Opened._read_again,
        "while self.position < count and → while self.position < count - 1 and",
    ),
    Mutant(
        "L43: the state in a cursor changes as the stream is read on",
        test_streams.test_saving_and_peeking_change_nothing,
        stream.Opened.memory,
        "return copy.deepcopy(self._knowing.state_dict())"
        " → return self._knowing.state_dict()",
    ),
    Mutant(
        "L36: the last batch of a rank's own stream counts until all have ended",
        test_unequal_streams.test_ranks_with_unequal_streams_see_each_sample_once,
        sharded.Sharded._epoch,
        """\
count = 0
→
count = len(values) and 1
""",
    ),
    Mutant(
        "L42: a resumed worker that was at its end gives its samples again",
        test_unequal_streams.test_workers_of_unequal_streams_see_each_sample_once,
        sharded.Counted.load_state_dict,
        'self._ended = state["ended"] → self._ended = False',
        args={"workers": 2},
    ),
    Mutant(
        "L42: a rank's own stream begins anew when it is resumed",
        test_unequal_streams.test_unequal_streams_go_on_where_they_were_cut,
        sharded.Sharded._loader,
        "if start.memory is not None: → if False:",
    ),
    Mutant(
        "L50: every sample of a stream is augmented alike",
        test_streams.test_a_stream_draws_anew_at_every_place,
        stream.Opened.read,
        "draws.fold(self._key, self.position) → self._key",
    ),
    Mutant(
        "L40: a stream that somebody looked into begins where he left it",
        test_streams.test_a_stream_of_datasets_that_was_looked_at_comes_whole,
        stream.first_state,
        'if hasattr(dataset, "_starting_state_dict"): → if False:',
    ),
    Mutant(
        "L40: a stream without state is refused to a second loop too",
        test_streams.test_a_stream_with_one_state_is_read_by_one_loop,
        stream.Opened.read,
        "self._knowing is self._dataset → True",
    ),
]

A_SPLIT: dict[str, Any] = {
    "values": ("A", "B", "C"),
    "size": 2,
    "pad": True,
    "parts": [("A", "B"), ("C", "C")],
}

OF_GATHERING = [
    Mutant(
        "L36: ranks that have more are cut short",
        test_gathering.test_lockstep_gives_every_rank_as_many,
        _together,
        'ends == "first" and → number and',
    ),
    Mutant(
        "L36: what was to be together ends with the last",
        test_gathering.test_lockstep_together_is_together,
        _together,
        'if without and ends == "together": → if False:',
    ),
    Mutant(
        "L36: a rank that has ended trains on its last batch again",
        test_gathering.test_lockstep_trains_on_the_mean_over_all,
        _batch,
        "weights=(None if counts else 0,) → weights=(None,)",
    ),
    Mutant(
        "L36: a rank without samples trains on one of another's",
        test_gathering.test_uneven_data_need_no_join,
        readers.assembled,
        "weights += (high - low,) → weights += (max(high - low, 1),)",
    ),
    Mutant(
        "L36: repeats, and stand-ins, are among what was computed",
        test_gathering.test_what_is_gathered_is_each_sample_once,
        gather_valid,
        "(~batch.filler).nonzero() → (~batch.filler | True).nonzero()",
    ),
    Mutant(
        "L48: results of a dict are gathered in the order in which each rank filled it",
        test_gathering.test_results_meet_by_name,
        trees.tensors_of,
        "tree.leaves_by_key(values) → tree.tree_leaves(values)",
    ),
    Mutant(
        "L43: a stream that was left early gives its rest to the next loop",
        test_gathering.test_what_is_left_early_harms_nothing,
        stream.first_state,
        "return copy.deepcopy(dataset.state_dict()) → return None",
    ),
    Mutant(
        "L35: a rank's part is left in the dict that it was given",
        test_gathering.test_split_gives_all_and_changes_nothing,
        split,
        """\
return {name: part(inner) for name, inner in items}
→
each.update({name: part(inner) for name, inner in items})
            return each
""",
    ),
    Mutant(
        "L36: a part that is padded is of another type than what was split",
        test_gathering.test_split_as_others_do,
        _like,
        "return kind(picked) → return picked",
        args=A_SPLIT,
    ),
]

OF_RESUMING = [
    Mutant(
        "L45: an epoch that is resumed is shuffled anew",
        test_ranks_data.test_a_run_goes_on_with_other_numbers_of_ranks,
        reading._portions,
        "seed=reading.seed, → seed=reading.seed + (start.samples > 0),",
    ),
    Mutant(
        "L45: an epoch that is resumed takes as many samples as a whole one",
        test_ranks_data.test_elastic_runs_see_each_sample_once,
        cut.EvenCut.spans,
        "end = self.end(start) → end = self.end(start) + start",
    ),
    Mutant(
        "L42: samples before a cut within a batch come again",
        test_ranks_data.test_a_run_goes_on_at_any_sample,
        cut.EvenCut.spans,
        "end = self.end(start)"
        " → end, start = self.end(start), start // self.batch_size * self.batch_size",
    ),
    Mutant(
        "L50: what a sample draws depends on the worker that reads it",
        test_ranks_data.test_workers_change_nothing,
        fetch.Fetch.__call__,
        "task.first + place)"
        " → task.first + place"
        " + getattr(__import__('torch').utils.data.get_worker_info(), 'id', 7))",
        args={"workers": 2},
    ),
    Mutant(
        "L50: numpy's generator is not set, and every sample gets the same of it",
        test_ranks_data.test_draws_are_of_a_place,
        draws.seeded.begin,
        "mtrand.seed(seed >> 32 & 0xFFFFFFFF) → mtrand.seed(0)",
    ),
]

OF_FORKS = [
    Mutant(
        "a data worker collects what was garbage in its parent",
        test_workers.test_a_worker_leaves_the_garbage_of_its_parent_alone,
        workers._leave_garbage,
        "gc.freeze() → pass",
        args={"dataset": test_workers.Collecting()},
    ),
    Mutant(
        "whatever is forked leaves its parent's garbage alone",
        test_workers.test_another_fork_is_as_python_makes_it,
        workers._leave_garbage,
        'if getattr(_starting, "here", False): → if True:',
    ),
    Mutant(
        "the update that waited for a worker is that at which reading began",
        test_workers.test_the_update_that_was_due_is_named,
        workers.watched,
        "place.update + num_read → place.update",
        args={"kind": "items"},
    ),
]

MUTANTS = [*OF_ORDERS, *OF_STREAMS, *OF_GATHERING, *OF_RESUMING, *OF_FORKS]

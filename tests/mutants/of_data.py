# SPDX-License-Identifier: Apache-2.0
"""Bugs in who reads which samples, and in what a checkpoint keeps."""

from accelfn.base import codec
from accelfn.checkpoint import commit, disk, elastic, fields, files, manifest
from accelfn.checkpoint.hashing import Hashing
from accelfn.checkpoint.manifest import Manifest
from accelfn.data import cut, epoch, fetch, permutation, plan, readers, reading, sources
from accelfn.data.orders import order
from accelfn.engine import ddp
from accelfn.loop.batches import Batches
from tests.laws import (
    test_faults,
    test_ranks_data,
    test_resume,
    test_sharding,
    test_storage,
)
from tests.mutants.mutant import Mutant
from tests.unit import test_sources

UNREAD = test_sources.test_a_sample_that_cannot_be_read_is_named

MUTANTS = [
    Mutant(
        "what cannot be read of a subset is named by another index than that of the data",
        UNREAD,
        sources.Items.samples,
        "dataset index {indices[place]}. → dataset index {index}.",
    ),
    Mutant(
        "of several datasets none is said to be the one that cannot be read",
        UNREAD,
        sources.within,
        'error.add_note(f"That is {which}.") → pass',
    ),
    Mutant(
        "L35: a longer share's last sample is the next share's first",
        test_sharding.test_parts_partition_every_batch,
        cut.even_part,
        "begin = start + index * size + min(index, longer)"
        " → begin = start + index * size",
    ),
    Mutant(
        "L4: a share that does not divide evenly has a micro-batch too few",
        test_sharding.test_micro_batch_size_bounds_parts,
        plan.Plan.parts,
        "-(-largest // self.micro_batch_size) → largest // self.micro_batch_size",
    ),
    Mutant(
        "L37: ranks take the batch's samples in another order than they have in it",
        test_ranks_data.test_global_order_does_not_depend_on_the_world,
        plan.Plan.parts,
        "even_part(batch, self.rank, self.num_shares)"
        " → even_part(batch, self.num_shares - 1 - self.rank, self.num_shares)",
    ),
    Mutant(
        "L38: each number of ranks shuffles in its own way",
        test_ranks_data.test_global_order_does_not_depend_on_the_world,
        reading._portions,
        "seed=reading.seed, → seed=reading.seed + reading.plan.num_shares,",
    ),
    Mutant(
        "L35: the samples of a short last batch are never seen",
        test_sharding.test_parts_partition_every_batch,
        cut.EvenCut.updates_per_epoch,
        "return -(-self.num_samples // self.batch_size)"
        " → return max(1, self.num_samples // self.batch_size)",
    ),
    Mutant(
        "L36: repeats that fill a batch are not told from samples",
        test_ranks_data.test_filler_is_what_is_marked,
        readers._beyond,
        "return np.arange(low, high) >= own → return False",
    ),
    Mutant(
        "L39: a short last batch is not in the length",
        test_ranks_data.test_len_is_honest_from_any_cursor,
        cut.EvenCut.num_batches,
        "-(-(self.end(start) - start) // self.batch_size)"
        " → (self.end(start) - start) // self.batch_size",
    ),
    Mutant(
        "L39: other ranks count one batch more",
        test_ranks_data.test_len_is_honest_from_any_cursor,
        Batches.__len__,
        "return left + → return (self.reading.world.rank > 0) + left +",
    ),
    Mutant(
        "L40: an index that falls outside the dataset is sent through the network once",
        test_sharding.test_shuffle_is_a_bijection,
        permutation.shuffled,
        "outside = outside[walked >= n] → outside = outside[:0]",
    ),
    Mutant(
        "L40: an index beyond two thousand million is another one",
        test_sharding.test_order_needs_no_memory_of_the_length_of_the_data,
        permutation.shuffled,
        "return result.astype(np.int64) → return result.astype(np.int32)",
    ),
    Mutant(
        "L40: the order's key leaves out the epoch",
        test_sharding.test_order_changes_with_epoch_and_seed,
        order.Shuffled.of_epoch,
        'draws.key(seed, "order", epoch) → draws.key(seed, "order")',
    ),
    Mutant(
        "L40: one round of mixing keeps most of the order",
        test_sharding.test_shuffle_is_even,
        permutation.shuffled,
        "range(_ROUNDS) → range(2)",
    ),
    Mutant(
        "L51: what a sample draws depends on which others are read with it",
        test_ranks_data.test_augmentation_does_not_depend_on_the_world,
        fetch.Fetch.__call__,
        "task.first + place) → task.first)",
    ),
    Mutant(
        "L42: a resumed run leaves out a sample",
        test_sharding.test_resuming_at_any_batch_gives_the_very_rest,
        epoch.portions,
        "Cursor.reached(epoch.number, high) → Cursor.reached(epoch.number, high + 1)",
    ),
    Mutant(
        "L42: a resumed run sees a sample twice",
        test_sharding.test_resuming_at_any_batch_gives_the_very_rest,
        epoch.portions,
        "Cursor.reached(epoch.number, high) → Cursor.reached(epoch.number, high - 1)",
    ),
    Mutant(
        "L42: a resumed run leaves out the batch that was read ahead",
        test_sharding.test_resuming_at_any_batch_gives_the_very_rest,
        epoch.portions,
        "Cursor.reached(epoch.number, high) → Cursor.reached(epoch.number, 2 * high)",
    ),
    Mutant(
        "L42: a run that is resumed at an epoch's end begins that epoch again",
        test_sharding.test_resuming_at_any_batch_gives_the_very_rest,
        epoch.portions,
        "following = Cursor(epoch.number + 1) → following = Cursor(epoch.number)",
    ),
    Mutant(
        "L42: a loaded state goes on with the seed of the state that it was loaded into",
        test_resume.test_cut_and_resumed_runs_are_uninterrupted_ones,
        fields.with_fields,
        'seed=saved["seed"] → seed=state.seed',
    ),
    Mutant(
        "L41: momentum and moments are not loaded",
        test_resume.test_cut_and_resumed_runs_are_uninterrupted_ones,
        fields.with_fields,
        'opt_state=beside(saved["opt_state"], params, optimizer, module) → opt_state={}',
    ),
    Mutant(
        "L42: DDP lays its buckets out anew behind the first step of each process",
        test_resume.test_sums_are_taken_alike_after_a_cut,
        ddp.LeanDDP.lay_out,
        "self.reducer._push_all_rebuilt_params() → return",
    ),
    Mutant(
        "L43: a state that was saved goes on without what its transforms had kept",
        test_resume.test_saving_changes_nothing,
        fields.fields_of,
        """\
return {
→
for slot in state.slots.values():
        for kept in slot.values() if isinstance(slot, dict) else ():
            kept.zero_() if isinstance(kept, torch.Tensor) else None
    return {
""",
    ),
    Mutant(
        "L42: what tells ranks' states apart leaves out the values",
        test_resume.test_ranks_resume_bitwise,
        files.digests,
        "digest.update(bytes_of(tensor)) → pass",
    ),
    Mutant(
        "L45: what is saved counts the samples of one rank, not of all",
        test_resume.test_another_number_of_ranks_goes_on,
        fields.fields_of,
        "state.cursor.to_plain()"
        " → [state.cursor.epoch, state.cursor.samples // state.world.size, None]",
    ),
    Mutant(
        "L45: another number of ranks goes on with rank 0's parameters",
        test_resume.test_ranks_that_differ_are_averaged,
        elastic.Source.tensors,
        "if self.weights is not None: → if False:",
    ),
    Mutant(
        "L45: a user's own entries that differ are taken of rank 0 by any number of ranks",
        test_resume.test_ranks_that_differ_in_what_has_no_mean_are_refused,
        elastic._averaging,
        """\
if without or len(merging) != 1:
→
if not merging:
        return source
    if without:
""",
    ),
    Mutant(
        "L41: a transform that is called as a field is goes on without the slot it has not",
        test_resume.test_a_transform_may_be_called_as_a_field_is,
        Manifest.slots,
        '(unit for unit in self.trees if unit.startswith("slots.")) → self.trees',
    ),
    Mutant(
        "L41: one tensor in two places is saved, and loaded, as two",
        test_storage.test_any_tree_comes_back,
        codec.Table.put,
        "name = self._names.get(id(tensor)) → name = None",
    ),
    Mutant(
        "L41: JSON knows no tuples",
        test_storage.test_any_tree_comes_back,
        codec.encode,
        'return {type(tree).__name__: coded} → return {"list": coded}',
    ),
    Mutant(
        "L41: values are converted on their way to the file",
        test_storage.test_any_tree_comes_back,
        files.bytes_of,
        "tensor.detach() → tensor.detach().nan_to_num()",
    ),
    Mutant(
        "L44: saving the same state twice writes different bytes",
        test_storage.test_what_is_loaded_is_saved_alike,
        files._header,
        'dict(metadata) → {**metadata, "at": str(__import__("time").time_ns())}',
    ),
    Mutant(
        "L41: a file that has changed on the disk is loaded",
        test_storage.test_any_change_of_a_file_is_noticed,
        Hashing._differing,
        "self._digest.hexdigest() != expected → False",
    ),
    Mutant(
        "L41: small tensors at the end of a file are read and not hashed",
        test_storage.test_any_change_of_a_file_is_noticed,
        Hashing.finish,
        "self._hand_over() → pass",
    ),
    Mutant(
        "L41: a manifest that has changed on the disk is believed",
        test_storage.test_any_change_of_a_file_is_noticed,
        Manifest.from_bytes.__func__,
        "_compare(data) → pass",
    ),
    Mutant(
        "L41: states that were saved at two moments are loaded as if together",
        test_storage.test_states_that_are_saved_together_are_what_each_alone_is,
        manifest.read_manifest,
        "digests[name] not in (None, blake3(data).hexdigest()) → False",
    ),
    Mutant(
        "L52: a checkpoint has its name before all that is in it is written",
        test_storage.test_a_save_that_is_cut_off_leaves_nothing_or_all,
        commit.write,
        """\
        if "" not in digests:
            disk.write(save.partial / NAME, [joint_bytes(digests)])
            disk.flush(save.partial)
        disk.rename(save.partial, save.final)
→
        disk.rename(save.partial, save.final)
        if "" not in digests:
            disk.write(save.final / NAME, [joint_bytes(digests)])
            disk.flush(save.final)
""",
    ),
    Mutant(
        "L52: a checkpoint has its name before the other ranks have written their files",
        test_faults.test_a_save_in_which_a_rank_fails_leaves_nothing_or_all,
        commit.write,
        'texts = save.agreed(exchange, "write its file", write_file)'
        ' → texts = save.agreed(exchange, "write its file", write_file)'
        " if save.rank else [write_file()] * save.size",
    ),
    Mutant(
        "L52: a crash of the machine leaves a checkpoint with empty files",
        test_storage.test_everything_is_on_the_disk_before_it_has_its_name,
        disk.write,
        "os.fsync(file.fileno()) → pass",
    ),
    Mutant(
        "L52: a crash of the machine leaves a checkpoint without its files",
        test_storage.test_everything_is_on_the_disk_before_it_has_its_name,
        disk.flush,
        "os.fsync(handle) → pass",
    ),
]

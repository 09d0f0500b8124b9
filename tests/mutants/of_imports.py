# SPDX-License-Identifier: Apache-2.0
"""Bugs in reading what other libraries saved, and in writing what they read."""

import torch

from accelfn.checkpoint import files, to_torch
from accelfn.weights import (
    accelerate,
    deepspeed,
    distributed,
    entries,
    import_state,
    importing,
    placing,
    shards,
    zero_groups,
    zero_parts,
)
from accelfn.weights.boxes import read_box
from accelfn.weights.mapped import Maps
from accelfn.weights.pieces import Piece
from accelfn.weights.shards import Shards
from tests.laws import test_import_deepspeed as zero
from tests.laws import test_import_parts as parts
from tests.laws import test_import_state as laws
from tests.laws import test_mapped as mapped
from tests.mutants.mutant import Mutant
from tests.unit import test_import_deepspeed as zero_unit
from tests.unit import test_import_memory as memory
from tests.unit import test_import_model as unit_model
from tests.unit import test_import_state as unit
from tests.unit import test_reading

MUTANTS = [
    Mutant(
        "each thread that reads of a file reads the file's first part",
        test_reading.test_threads_read_what_one_would,
        files._read_by,
        "handle, begin + at, buffer[at : at + size] → handle, begin, buffer[at : at + size]",
    ),
    Mutant(
        "a file that ends within a thread's part is read as zeros",
        test_reading.test_threads_read_what_one_would,
        files._read_by,
        "each.result() → pass",
    ),
    Mutant(
        "a thread reads to the end of what all do",
        test_reading.test_threads_read_what_one_would,
        files._read_by,
        "size = -(-len(buffer) // threads) → size = len(buffer) // threads + len(buffer)",
    ),
    Mutant(
        "what is read after a part that threads read is that part",
        test_reading.test_threads_read_what_one_would,
        files.read_into,
        "stream.seek(begin + len(buffer)) → stream.seek(begin)",
    ),
    Mutant(
        "one thread reads, however many there are",
        test_reading.test_threads_read_what_one_would,
        files.read_into,
        "if threads > 1: → if threads > len(buffer):",
    ),
    Mutant(
        "L42: a training of torch's that is imported begins its optimizer anew",
        laws.test_what_torch_saved_goes_on,
        import_state._read,
        'fields["opt_state"] = opt_state → pass',
    ),
    Mutant(
        "L42: an imported optimizer counts from where the state stood",
        laws.test_what_torch_saved_goes_on,
        import_state._read,
        'fields["step"], fields["num_skipped"] = step, 0 → pass',
    ),
    Mutant(
        "L42: buffers of an imported training stay the state's",
        laws.test_what_torch_saved_goes_on,
        import_state._read,
        '(("params", params), ("buffers", buffers)) → (("params", params),)',
    ),
    Mutant(
        "L45: each rank has the first rank's part of what it imports",
        laws.test_what_ranks_saved_in_parts_goes_on,
        import_state._laid,
        "slice_of(own) or Slice.whole(own.shape)"
        " → attrs.evolve(slice_of(own) or Slice.whole(own.shape), offset=(0,) * own.ndim)",
    ),
    Mutant(
        "L45: a rank reads the whole of each tensor of which it has a part",
        parts.test_a_rank_reads_what_it_has,
        Shards.read_box,
        "read_box(stream, entry.begin, files.DTYPES[entry.dtype], box)"
        " → box.of(self.read(name)).clone()",
    ),
    Mutant(
        "L45: a rank reads the whole of each box that torch saved",
        parts.test_a_rank_reads_what_it_has,
        distributed._Chunk.read,
        "if first is not None and meta.is_contiguous(): → if False:",
    ),
    Mutant(
        "L45: a tensor that torch saved turned round is read in the order of its memory",
        parts.test_however_it_lay_it_comes_as_it_was,
        distributed._Chunk.read,
        "first is not None and meta.is_contiguous() → first is not None",
    ),
    Mutant(
        "L45: of a tensor that is cut in its last dim the first runs are read",
        parts.test_a_rank_reads_what_it_has,
        read_box,
        "(begin + start * dtype.itemsize) → (begin + number * num_bytes)",
    ),
    Mutant(
        "L41: what begins anywhere in its file is computed with as it lies there",
        mapped.test_a_model_in_its_file_is_one_in_memory,
        Maps.read,
        "return values if is_aligned(values) else self.shards.read(name) → return values",
    ),
    Mutant(
        "L41: tensors of an export begin wherever the one before ends",
        mapped.test_a_model_in_its_file_is_one_in_memory,
        files._ordered,
        "return size % ALIGNED > 0, → return False,",
    ),
    Mutant(
        "L41: the first tensor of a file begins wherever its header ends",
        mapped.test_a_model_in_its_file_is_one_in_memory,
        files._header,
        "(-(8 + len(text)) % ALIGNED) → (-len(text) % 8)",
    ),
    Mutant(
        "what a model has memory for is read into other memory first",
        memory.test_one_tensor_at_a_time,
        placing.Placement.has_room,
        "and old.is_contiguous() → and False",
    ),
    Mutant(
        "what an import converts is read as a whole first",
        memory.test_what_is_converted_is_never_there_whole,
        placing._give,
        "room is not None → False",
    ),
    Mutant(
        "what an import converts is as long as its first piece",
        unit_model.test_what_is_converted_piece_by_piece_is_all_there,
        shards.Shards.read_to,
        "tensor.view(-1).split(_PIECE) → [tensor.view(-1)[:_PIECE]]",
        args={"there": torch.float32, "here": torch.bfloat16, "into": "factory"},
    ),
    Mutant(
        "memory in another order is taken for what lies in the file",
        unit_model.test_memory_in_another_order_is_filled,
        placing.Placement.has_room,
        "and old.is_contiguous() → and True",
    ),
    Mutant(
        "a graph does not hear that its values were replaced by an import",
        unit_model.test_a_graph_of_what_was_there_is_told,
        placing._give,
        "torch.autograd.graph.increment_version(old) → pass",
    ),
    Mutant(
        "L41: a model that stays in its file is read at once",
        mapped.test_nothing_is_read_before_it_is_used,
        importing.import_model,
        "Maps(shards).read if mapped → shards.read if mapped",
    ),
    Mutant(
        "L42: an optimizer of all parameters goes by their order from the last",
        laws.test_what_accelerate_saved_goes_on,
        accelerate.entries_of,
        "names = [every] → names = [[*reversed(every)]]",
    ),
    Mutant(
        "L41: what is exported for torch counts from 0",
        laws.test_what_is_exported_for_torch_is_all_there,
        to_torch.write_distributed,
        "torch.tensor(source.manifest.step) → torch.tensor(0)",
    ),
    Mutant(
        "what a class brings along is called as metadata are read",
        unit.test_nothing_that_is_read_runs,
        distributed._Records.find_class,
        "isinstance(found, torch.dtype) → True",
    ),
    Mutant(
        "metadata name files of other folders",
        unit.test_files_of_other_folders_are_not_read,
        distributed._piece,
        "if not _FILE.fullmatch(place.relative_path): → if False:",
    ),
    Mutant(
        "boxes that leave a part of a tensor open are read",
        unit.test_boxes_that_leave_something_open_are_refused,
        distributed._piece,
        "if not tile((chunk.box for chunk in chunks), shape): → if False:",
    ),
    Mutant(
        "of several models in a folder the first is taken",
        unit.test_one_of_several_models_must_be_named,
        distributed._prefix,
        "if len(most) > 1: → if False:",
    ),
    Mutant(
        "an average goes on from weights that an import has replaced",
        unit.test_slots_begin_with_what_was_imported,
        import_state.import_state,
        "if name not in own → if name",
    ),
    Mutant(
        "a state that was imported has not said what was left unread",
        unit.test_it_tells_what_it_did,
        import_state._read,
        "(*found.strange, *found.left) → (*found.strange,)",
    ),
    Mutant(
        "ranks of a split model import each for itself",
        unit.test_a_rank_that_cannot_read_tells_the_others,
        import_state.import_state,
        "together(state, read) → read()",
    ),
    Mutant(
        "another optimizer's state is imported",
        unit.test_an_optimizer_of_another_kind_is_refused,
        entries.check_kept,
        "own is not None and own != entry.keys() → False",
    ),
    Mutant(
        "L42: what ZeRO has put between parameters is taken for the next of them",
        zero.test_what_zero_saved_is_all_there,
        zero_groups._cut_across,
        "(paddings[index] if paddings else 0) → 0",
    ),
    Mutant(
        "L42: of what ZeRO's ranks have one behind the other each begins with its first",
        zero.test_what_zero_saved_is_all_there,
        zero_groups._cut_across,
        "(rank, first - begin, last - first) → (rank, 0, last - first)",
    ),
    Mutant(
        "L42: parts that ranks have of each parameter lie at their beginning",
        zero.test_what_zero_saved_is_all_there,
        zero_groups._cut_each,
        "(rank, at, length) → (rank, 0, length)",
    ),
    Mutant(
        "L42: a model trained by ZeRO goes on with its weights of 16 bits",
        zero.test_what_zero_saved_is_all_there,
        deepspeed.found_in,
        "weights |= masters → weights = {**masters, **weights}",
    ),
    Mutant(
        "L42: updates that DeepSpeed skipped count as taken",
        zero.test_what_zero_saved_is_all_there,
        deepspeed.found_in,
        'int(model["global_steps"]) - int(model["skipped_steps"])'
        ' → int(model["global_steps"])',
    ),
    Mutant(
        "L42: frozen parameters of ZeRO's stage 3 are those of the first rank",
        zero.test_what_zero_saved_is_all_there,
        deepspeed._model,
        "in (model, *others) → in (model, *[model for _ in others])",
    ),
    Mutant(
        "L45: a rank's part of what lies in runs begins where the runs do",
        zero.test_what_zero_saved_is_all_there,
        Piece.of_runs.__func__,
        "run[max(begin - at, 0) : end - at] → run[: end - at]",
    ),
    Mutant(
        "L42: weights of ZeRO remember that they are views of what was trained",
        zero.test_what_zero_saved_is_all_there,
        Piece.of_runs.__func__,
        "run.detach() for run in runs → run for run in runs",
    ),
    Mutant(
        "a folder of ZeRO is read without one of its ranks' files",
        zero_unit.test_a_rank_s_file_that_is_missing_is_named,
        zero_parts.parts_of,
        "if missing: → if False:",
        args={"stage": 1},
    ),
    Mutant(
        "parts of two saves of ZeRO are put together",
        zero_unit.test_parts_of_two_saves_are_told,
        zero_parts.parts_of,
        "part.counts != {len(parts)} → False",
        args={"stage": 1},
    ),
    Mutant(
        "a group of ZeRO may have more elements than its parameters take",
        zero_unit.test_sizes_that_do_not_fit_are_told,
        zero_groups.put_together,
        "if not fits: → if False:",
        args={"stage": 3},
    ),
    Mutant(
        "of a model that DeepSpeed split over ranks the first part is read",
        zero_unit.test_what_is_cut_by_more_is_refused,
        deepspeed._check_kind,
        "elif several: → elif False:",
        args={
            "name": "mp_rank_01_model_states.pt",
            "said": "split over ranks, as mp_rank_01 says",
        },
    ),
    Mutant(
        "of a folder of DeepSpeed's the first save is read, and not the newest",
        zero_unit.test_the_folder_or_a_tag_s_in_it,
        deepspeed.parts_at,
        "return folder / said → return folder / tags[-1]",
        args={"stage": 1},
    ),
    Mutant(
        "fused optimizers of DeepSpeed count from 0",
        zero_unit.test_a_step_that_a_group_counts,
        zero_parts._entries_of_groups,
        '{"step": group["step"]} if "step" in group else {} → {}',
    ),
]

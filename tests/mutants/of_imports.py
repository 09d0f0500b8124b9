# SPDX-License-Identifier: Apache-2.0
"""Bugs in reading what other libraries saved, and in writing what they read."""

from accelfn.checkpoint import to_torch
from accelfn.weights import accelerate, distributed, entries, import_state
from tests.laws import test_import_state as laws
from tests.mutants.mutant import Mutant
from tests.unit import test_import_state as unit

MUTANTS = [
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
]

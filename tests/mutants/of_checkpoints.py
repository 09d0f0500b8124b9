# SPDX-License-Identifier: Apache-2.0
"""Bugs in checkpoints and weights: what is written, what is read, what may differ."""

import torch

from accelfn.checkpoint import (
    commit,
    compare,
    fields,
    keep,
    lock,
    options,
    partial,
    retention,
    store,
)
from accelfn.checkpoint.save import contents_of
from accelfn.weights import placing, shards, torch_files
from accelfn.weights.export import _by_its_own_method, _named, save_pretrained
from tests.laws import test_load_calls, test_store, test_store_calls
from tests.mutants.mutant import Mutant
from tests.unit import (
    test_checkpoint,
    test_checkpoint_partial,
    test_export,
    test_import_empty,
    test_import_model,
)

MUTANTS = [
    Mutant(
        "after a save that was killed the same save fails for ever",
        test_checkpoint.test_leftover_of_an_interrupted_save,
        commit.begin,
        """\
disk.remove(save.partial)
→

""",
    ),
    Mutant(
        "a scheduler in a slot of the state that was loaded into has the saved epoch",
        test_checkpoint.test_objects_with_a_state,
        fields._with_objects,
        "copy.deepcopy(current) → current",
    ),
    Mutant(
        "parameters that were trained and then frozen are not written, and are lost",
        test_checkpoint_partial.test_what_was_trained_is_written,
        contents_of,
        "state.definition.skeleton.once_trained → state.definition.skeleton.trainable",
    ),
    Mutant(
        "a run goes on with other frozen weights than it was trained with",
        test_checkpoint_partial.test_frozen_parameters_that_are_others,
        partial.kept_of,
        "if changed or here.keys() != kept.keys(): → if here.keys() != kept.keys():",
    ),
    Mutant(
        "a step on a loaded state changes the state that it was loaded into",
        test_checkpoint_partial.test_what_was_kept_by_hash_is_its_own,
        partial.kept_of,
        "else p.clone() → else p",
    ),
    Mutant(
        "a checkpoint with an infinite entry cannot be loaded with cast=True",
        test_checkpoint_partial.test_what_is_not_finite_is_cast,
        partial.converted,
        "(before & ~after).any() → (~after).any()",
    ),
    Mutant(
        "a weight of 1e10 that is loaded into float16 becomes infinite in silence",
        test_checkpoint_partial.test_what_is_not_finite_is_cast,
        partial.converted,
        "(before & ~after).any() → (before & ~after).all()",
    ),
    Mutant(
        "a step on what a partial load gave changes the state that it was given",
        test_checkpoint_partial.test_what_is_loaded_is_its_own,
        partial.taken,
        "fields_of(state.copy()) → fields_of(state)",
    ),
    Mutant(
        "L41: a misspelt name of a slot is loaded as nothing, and nobody is told",
        test_load_calls.test_a_partial_load_is_what_was_asked_for,
        partial._places,
        "for name in asked if name not in saved → for name in asked if name in saved",
    ),
    Mutant(
        "L53: the best checkpoint by accuracy is removed, and the worst one is kept",
        test_store_calls.test_a_store_is_what_was_saved_and_kept,
        keep.best_of,
        'if mode == "max" else value → if mode == "min" else value',
    ),
    Mutant(
        "L53: a store with keep=2 has one checkpoint when the newest turns out corrupt",
        test_store_calls.test_a_store_is_what_was_saved_and_kept,
        retention.Retention._kept,
        "steps[-self.keep :] → steps[-self.keep :][-1:]",
    ),
    Mutant(
        "L53: restoring at once after a save gives the checkpoint before it",
        test_store_calls.test_a_store_is_what_was_saved_and_kept,
        store.CheckpointStore.restore,
        """\
self._wait(world)
→

""",
    ),
    Mutant(
        "L53: restoring an earlier step goes on with the newest",
        test_store_calls.test_a_store_is_what_was_saved_and_kept,
        store.CheckpointStore.restore,
        "steps[-1] if step is None else step → steps[-1]",
    ),
    Mutant(
        "L52: the lock of a dead job is never taken over where its number was given again",
        test_store.test_one_job_saves_to_a_directory,
        lock._refuse_living,
        '_begun(pid) != holder.get("begun") → _begun(pid) is None',
        args={"who": "dead"},
    ),
    Mutant(
        "a metric that is given as text is saved as a number, and True as 1",
        test_checkpoint.test_metrics_of_a_save_are_numbers_by_name,
        options._float,
        "isinstance(value, (str, bool)) → isinstance(value, bool)",
        args={"metrics": {"loss": "0.5"}},
    ),
    Mutant(
        "a checkpoint cannot be loaded when gradients are no longer clipped",
        test_checkpoint.test_a_transform_without_a_slot_may_go,
        compare.check_transforms,
        "if n in saved and n not in mine → if n not in mine",
    ),
    Mutant(
        "files of an export are smaller than the size that was given in MiB",
        test_export.test_a_size_is_bytes_or_text,
        shards.bytes_in,
        '1024 if unit.endswith("i") else 1000 → 1000',
        args={"size": "8KiB", "count": 2},
    ),
    Mutant(
        "small tensors about a large one lie in two files, and not in one",
        test_export.test_a_larger_tensor_has_a_file_of_its_own,
        shards.divided,
        """\
shards.append([name])
→
shards, open_, held = [*shards, open_, [name]], [], 0
""",
    ),
    Mutant(
        "an export of a tied model is larger, and is untied where it is read",
        test_export.test_safetensors_reads_it,
        _named,
        "if id(meta) not in seen: → if name not in found:",
    ),
    Mutant(
        "ranks write over one another what save_pretrained has written",
        test_export.test_a_model_writes_itself_once,
        save_pretrained.__wrapped__,
        "if job.rank == 0: → if job.rank >= 0:",
    ),
    Mutant(
        "what is handed to a model's own save_pretrained does not come there",
        test_export.test_a_model_writes_itself_once,
        _by_its_own_method,
        "module.save_pretrained(directory, **options)"
        " → module.save_pretrained(directory)",
    ),
    Mutant(
        "parameters that a factory froze require gradients after an import",
        test_import_empty.test_what_is_frozen_stays_frozen,
        placing._set,
        "nn.Parameter(value, requires_grad=old.requires_grad) → nn.Parameter(value)",
    ),
    Mutant(
        "an optimizer decays parameters that the model had marked",
        test_import_model.test_frozen_parameters_and_their_marks_stay,
        placing._set,
        "vars(new).update(vars(old)) → vars(new)",
    ),
    Mutant(
        "an optimizer over a model goes on with the weights of before the import",
        test_import_model.test_memory_in_another_order_is_filled,
        placing._set,
        "old.copy_(value) → old.data = value",
    ),
    Mutant(
        "an optimizer over a model goes on with the weights of before they were read",
        test_import_model.test_what_has_memory_keeps_it,
        placing._give,
        "incoming.read_to(name, old) → old.data = incoming.read(name)",
        args={"dtype": torch.float32},
    ),
    Mutant(
        "a layer that was named for the second GPU goes with the rest to the first",
        test_import_model.test_the_longest_prefix_says_the_device,
        placing.Placement.device,
        "max(fitting, key=len) → min(fitting, key=len)",
        args={"name": "norm.bias", "device": "cuda:2"},
    ),
    Mutant(
        "a device for `norm` is taken for `normal`, too",
        test_import_model.test_the_longest_prefix_says_the_device,
        placing._within,
        'name.startswith(f"{prefix}.") → name.startswith(prefix)',
        args={"name": "normal.weight", "device": "cuda:0"},
    ),
    Mutant(
        "a counter or a table of indices is imported as floating-point numbers",
        test_import_model.test_a_dtype_is_for_floating_point,
        placing.Placement._dtype,
        "if not value.is_floating_point(): → if value.ndim < 0:",
        args={"meta": True, "dtype": torch.bfloat16},
    ),
    Mutant(
        "an untied model's weights go into a tied one, of which one is lost",
        test_import_model.test_names_of_a_tie_that_differ_are_refused,
        placing._check_ties,
        "if strict: → if not others:",
    ),
    Mutant(
        "a file that has the second name of a tied weight is refused",
        test_import_model.test_either_name_of_a_tie_will_do,
        placing._paired,
        "[name for name in target.names if name in there]"
        " → [name for name in target.names[:1] if name in there]",
    ),
    Mutant(
        "with strict=False what is there is left as it was, too",
        test_import_model.test_a_loose_import_says_what_is_left,
        placing._paired,
        "    return pairs →     return {} if found else pairs",
    ),
    Mutant(
        "of a tensor that lies in two files the one is read that the index does not name",
        test_import_model.test_a_tensor_is_read_where_the_index_says,
        shards._indexed,
        "if named.get(n, file) == file} → if n}",
    ),
    Mutant(
        "a tensor in a file that no index names is passed over in silence",
        test_import_model.test_tensors_beside_those_of_the_index_are_unexpected,
        shards._indexed,
        "if named.get(n, file) == file} → if named.get(n) == file}",
    ),
    Mutant(
        "an imported model changes or crashes when its file is overwritten",
        test_import_model.test_what_was_read_does_not_depend_on_the_file,
        torch_files._dense,
        "tensor.detach().clone(memory_format=torch.contiguous_format)"
        " → tensor.detach()",
        args={"meta": True},
    ),
]

# SPDX-License-Identifier: Apache-2.0
"""Bugs in what others are given of a state, and in what is taken from them."""

from accelfn import full_params
from accelfn.state.views import params_at
from accelfn.structure.on_meta import parameters_on_meta
from accelfn.weights.placing import Placement, _set
from accelfn.weights.shards import divided
from accelfn.weights.valueless import Valueless
from tests.laws import test_empty_weights, test_export
from tests.mutants.mutant import Mutant
from tests.unit import test_empty_weights as unit_empty

MUTANTS = [
    Mutant(
        "L41: buffers that are drawn in a block without weights are not drawn",
        test_empty_weights.test_a_block_acts_in_itself_alone,
        Valueless.__torch_function__,
        "if tensor.is_meta: → if True:",
    ),
    Mutant(
        "torch passes over what it cannot do without values, and makes another model",
        unit_empty.test_a_layer_that_asks_for_values_is_named,
        Valueless.__torch_function__,
        "raise ModelError(_needs_values(name, error)) from error → raise",
        args={"rows": 3, "function": "geqrf"},
    ),
    Mutant(
        "L41: parameters are exported as they are trained, and no average of them",
        test_export.test_what_is_exported_is_imported,
        params_at,
        'if at == "train" or (at is None and not owners): → if True:',
    ),
    Mutant(
        "L41: each name of a tied parameter gets a tensor of its own",
        test_export.test_what_is_exported_is_imported,
        _set,
        "setattr(module, name, new)"
        " → setattr(module, name, type(new)(new.detach().clone()))",
    ),
    Mutant(
        "L41: a parameter that stands in a second place gets a tensor of its own there",
        test_export.test_what_is_exported_is_imported,
        parameters_on_meta,
        "param is None or param.is_meta or → param is None or",
    ),
    Mutant(
        "L41: a parameter that was frozen is trained after it had no values",
        test_empty_weights.test_a_block_acts_in_itself_alone,
        parameters_on_meta,
        "requires_grad=param.requires_grad → requires_grad=True",
    ),
    Mutant(
        "L41: another thread's modules lose their values, too",
        test_empty_weights.test_a_block_acts_in_itself_alone,
        parameters_on_meta,
        "param.is_meta or threading.get_ident() != ours: → param.is_meta:",
    ),
    Mutant(
        "L41: modules that are built after a block have no values either",
        test_empty_weights.test_a_block_acts_in_itself_alone,
        parameters_on_meta,
        "handle.remove() → None",
    ),
    Mutant(
        "L41: what is read is converted, though nobody asked for it",
        test_export.test_what_is_exported_is_imported,
        Placement._dtype,
        "old.dtype if self.dtype is None else self.dtype → __import__('torch').float32",
    ),
    Mutant(
        "L41: who changes what full_params returned changes the state",
        test_export.test_full_params_are_copies_on_every_rank,
        full_params,
        "_host(t).clone() → _host(t)",
    ),
    Mutant(
        "L41: a file is full only when it holds more than it may",
        test_export.test_files_hold_what_they_may,
        divided,
        "if held + size > limit: → if held > limit:",
    ),
]

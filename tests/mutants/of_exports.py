# SPDX-License-Identifier: Apache-2.0
"""Bugs in what others are given of a state, and in what is taken from them."""

from accelfn import full_params
from accelfn.state.views import params_at
from accelfn.weights.empty import _parameters_on_meta
from accelfn.weights.placing import Placement, _set
from accelfn.weights.shards import divided
from tests.laws import test_export
from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="an export of what is trained",
        says="parameters are exported as they are trained, and no average of them",
        law="L41",
        test=test_export.test_what_is_exported_is_imported,
        place=params_at,
        old='if at == "train" or (at is None and not owners):',
        new="if True:",
    ),
    Mutant(
        name="an import cuts ties",
        says="each name of a tied parameter gets a tensor of its own",
        law="L41",
        test=test_export.test_what_is_exported_is_imported,
        place=_set,
        old="setattr(module, name, new)",
        new="setattr(module, name, type(new)(new.detach().clone()))",
    ),
    Mutant(
        name="a factory cuts ties",
        says="a parameter that stands in a second place gets a tensor of its own there",
        law="L41",
        test=test_export.test_what_is_exported_is_imported,
        place=_parameters_on_meta,
        old="param is None or param.is_meta or",
        new="param is None or",
    ),
    Mutant(
        name="an import in single precision",
        says="what is read is converted, though nobody asked for it",
        law="L41",
        test=test_export.test_what_is_exported_is_imported,
        place=Placement.placed,
        old="old.dtype if self.dtype is None else self.dtype",
        new="__import__('torch').float32",
    ),
    Mutant(
        name="the state's own tensors are given away",
        says="who changes what full_params returned changes the state",
        law="L41",
        test=test_export.test_full_params_are_copies_on_every_rank,
        place=full_params,
        old="_host(t).clone()",
        new="_host(t)",
    ),
    Mutant(
        name="a tensor too many in a file",
        says="a file is full only when it holds more than it may",
        law="L41",
        test=test_export.test_files_hold_what_they_may,
        place=divided,
        old="if held + size > limit:",
        new="if held > limit:",
    ),
]

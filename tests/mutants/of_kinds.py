# SPDX-License-Identifier: Apache-2.0
"""Bugs in what is told of tensors that are held in another shape, dtype, or both."""

from accelfn.checkpoint import compare, elastic, partial
from accelfn.collectives import replicas
from accelfn.structure import skeleton
from accelfn.weights import placing
from tests.laws import test_kinds
from tests.mutants.mutant import Mutant

TOLD = test_kinds.test_a_shape_and_a_dtype_are_both_told

MUTANTS = [
    Mutant(
        "L42: of a saved tensor of another shape the dtype is not told, in which it differs too",
        TOLD,
        compare.differences,
        '" {tuple(current[n].shape)} {current[n].dtype}" → " {tuple(current[n].shape)}"',
    ),
    Mutant(
        "L42: of a part of a tensor that is split the shape alone is told",
        TOLD,
        elastic.Source._plan,
        "{target.shape} {wanted.dtype}. Load → {target.shape}. Load",
    ),
    Mutant(
        "L42: a tensor of another shape is taken where dtypes are converted",
        TOLD,
        partial.Wanted.refuses,
        "found.shapes\n → found.shapes and not self.cast\n",
    ),
    Mutant(
        "L2: ranks compare shapes of parameters, and not their dtypes",
        TOLD,
        replicas.check_replicas,
        "{tuple(t.shape)} {t.dtype} → {tuple(t.shape)}",
    ),
    Mutant(
        "L2: of parameters of another dtype ranks do not compare shapes",
        TOLD,
        replicas.check_replicas,
        "{tuple(t.shape)} {t.dtype} → {t.numel()} {t.dtype}",
    ),
    Mutant(
        "L25: parameters of another dtype stand in the place of a state's",
        TOLD,
        skeleton.check_params,
        "want != have → want[::2] != have[::2]",
    ),
    Mutant(
        "L41: a file's tensors of another shape and dtype are given to a model",
        TOLD,
        placing._paired,
        "if found.shapes or → if any(there[n].dtype == expected[n].dtype for n in found.shapes) or",
    ),
]

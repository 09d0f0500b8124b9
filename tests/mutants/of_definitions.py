# SPDX-License-Identifier: Apache-2.0
"""Bugs in what ranks compare before they train together."""

from accelfn.engine import agreement
from tests.laws import test_definitions
from tests.mutants.mutant import Mutant

REFUSED = test_definitions.test_definitions_that_differ_are_refused

MUTANTS = [
    Mutant(
        "L2: ranks may have other transforms than one another",
        REFUSED,
        agreement._rows,
        "for i, each in enumerate(definition.setup) → for i, each in enumerate(())",
    ),
    Mutant(
        "L2: of optimizers only the classes are told",
        REFUSED,
        agreement._rows,
        'if name != "params": → if False:',
    ),
    Mutant(
        "L2: two functions of one name pass for one schedule",
        test_definitions.test_any_two_that_differ_are_told_apart,
        agreement._asked,
        "for update in _ASKED: → for update in ():",
        args={"part": "schedule"},
    ),
    Mutant(
        "L2: ranks may share data of which each has another length or order",
        REFUSED,
        agreement._rows,
        "definition.plan.num_shares > 1 → False",
    ),
    Mutant(
        "L2: ranks may draw from seeds of their own",
        REFUSED,
        agreement._rows,
        '{"seed": str(state.seed)} → {}',
    ),
    Mutant(
        "L2: where ranks share no data, theirs must be alike too",
        test_definitions.test_data_of_each_rank_may_be_its_own,
        agreement._rows,
        "and definition.plan.num_shares > 1 → ",
    ),
    Mutant(
        "L2: a function is told by where it lies in a process's memory",
        test_definitions.test_functions_may_lie_anywhere,
        agreement._shown,
        '_ADDRESS.sub("", repr(transform)) → repr(transform)',
    ),
]

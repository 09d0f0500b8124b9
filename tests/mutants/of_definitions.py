# SPDX-License-Identifier: Apache-2.0
"""Bugs in what ranks compare before they train together."""

from accelfn.engine import agreement
from tests.laws import test_definitions
from tests.mutants.mutant import Mutant

REFUSED = test_definitions.test_definitions_that_differ_are_refused

MUTANTS = [
    Mutant(
        name="setups are not compared",
        says="ranks may have other transforms than one another",
        law="L2",
        test=REFUSED,
        place=agreement._rows,
        old="for i, each in enumerate(definition.setup)",
        new="for i, each in enumerate(())",
    ),
    Mutant(
        name="hyperparameters are not compared",
        says="of optimizers only the classes are told",
        law="L2",
        test=REFUSED,
        place=agreement._rows,
        old='if name != "params":',
        new="if False:",
    ),
    Mutant(
        name="schedules by their names",
        says="two functions of one name pass for one schedule",
        law="L2",
        test=test_definitions.test_any_two_that_differ_are_told_apart,
        args={"part": "schedule"},
        place=agreement._asked,
        old="for update in _ASKED:",
        new="for update in ():",
    ),
    Mutant(
        name="data is not compared",
        says="ranks may share data of which each has another length or order",
        law="L2",
        test=REFUSED,
        place=agreement._rows,
        old="definition.plan.num_shares > 1",
        new="False",
    ),
    Mutant(
        name="seeds are not compared",
        says="ranks may draw from seeds of their own",
        law="L2",
        test=REFUSED,
        place=agreement._rows,
        old='{"seed": str(state.seed)}',
        new="{}",
    ),
    Mutant(
        name="a rank's own data is compared",
        says="where ranks share no data, theirs must be alike too",
        law="L2",
        test=test_definitions.test_data_of_each_rank_may_be_its_own,
        place=agreement._rows,
        old="and definition.plan.num_shares > 1",
        new="",
    ),
    Mutant(
        name="addresses are compared",
        says="a function is told by where it lies in a process's memory",
        law="L2",
        test=test_definitions.test_functions_may_lie_anywhere,
        place=agreement._shown,
        old='_ADDRESS.sub("", repr(transform))',
        new="repr(transform)",
    ),
]

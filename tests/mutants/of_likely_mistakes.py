# SPDX-License-Identifier: Apache-2.0
"""Bugs by which likely mistakes pass in silence."""

import math

from accelfn.base import arguments
from accelfn.checkpoint import commit
from accelfn.data import checks
from accelfn.engine import engine, strangers
from accelfn.engine.optimizer import live_optimizer
from accelfn.schedules import rates
from accelfn.state import metrics, views
from accelfn.structure import prototype
from tests.mutants.mutant import Mutant
from tests.unit import test_likely_mistakes as tests

MUTANTS = [
    Mutant(
        "of the graph of a loss the end alone is looked at for parameters of nobody",
        tests.test_parameters_of_a_model_that_was_given_away_are_told,
        strangers._parameters_of,
        "left += [after for after, _ in node.next_functions] → left = []",
    ),
    Mutant(
        "of several functions of a loss one is looked through for parameters of nobody",
        tests.test_parameters_that_nobody_trains_are_told,
        engine.Engine._look,
        "if code not in self._looked_at and → if not self._looked_at and",
        args={"size": 1},
    ),
    Mutant(
        "a function of a loss is looked through again and again",
        tests.test_parameters_that_nobody_trains_are_told,
        engine.Engine._look,
        "self._looked_at.add(code) → pass",
        args={"size": 1},
    ),
    Mutant(
        "inputs with a gradient are taken for parameters of nobody",
        tests.test_what_reads_a_frozen_model_is_not_told,
        strangers._parameters_of,
        "nn.Parameter) → torch.Tensor)",
    ),
    Mutant(
        "memory that is put in the place of a lent tensor's is not looked at",
        tests.test_what_is_put_in_the_place_of_a_lent_tensor_is_refused,
        views._place,
        "return tensor.data_ptr(), → return 0,",
        args={"put": tests.put_data},
    ),
    Mutant(
        "a lent module of another kind of numbers is refused",
        tests.test_what_is_put_in_the_place_of_a_lent_tensor_is_refused,
        views._check_replaced,
        "and now[name][1][1:] == was[1][1:] → ",
        args={"put": tests.put_data},
    ),
    Mutant(
        "the gradient of a loss's weight is dropped",
        tests.test_a_weight_with_a_gradient_is_refused,
        metrics.Loss.__init__,
        "weight.requires_grad: → False:",
    ),
    Mutant(
        "a schedule may climb",
        tests.test_a_schedule_below_zero_is_refused,
        rates.FactorRates.__call__,
        "or factor < 0 → ",
    ),
    Mutant(
        "a list of many samples is taken for columns",
        tests.test_columns_in_a_list_are_told,
        checks._warn_of_columns,
        "if not 2 <= len(rows) <= _FEW or → if",
    ),
    Mutant(
        "ranks that agree by files do not look whether they see them",
        tests.test_directories_by_rank_are_refused_at_once,
        commit.check_seen,
        "if not paths.is_directory(save.partial): → if False:",
    ),
    Mutant(
        "an optimizer that lacks what it kept fails as Python does",
        tests.test_an_optimizer_of_other_options_says_what_it_lacks,
        live_optimizer.LiveOptimizer._stepped,
        "lacks {error} among → has not all that it needs among",
    ),
    Mutant(
        "a rate that is no number is taken",
        tests.test_a_rate_that_is_no_number_is_refused,
        prototype._check_rates,
        "not math.isfinite(rate) → rate == math.inf",
        args={"rate": math.nan, "first": True},
    ),
    Mutant(
        "a rate of a second group is not looked at",
        tests.test_a_rate_that_is_no_number_is_refused,
        prototype._check_rates,
        "enumerate(optimizer.param_groups) → enumerate(optimizer.param_groups[:1])",
        args={"rate": math.nan, "first": False},
    ),
    Mutant(
        "no world at all is tried",
        tests.test_numbers_of_ranks_are_asked_for,
        arguments.check_sizes,
        "if not sizes or not all → if not all",
        args={"sizes": []},
    ),
]

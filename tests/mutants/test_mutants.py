# SPDX-License-Identifier: Apache-2.0
"""Test the mutants: they match the code, are removed completely, and cover every law's test."""

import importlib
import inspect
import pkgutil
import re

import attrs
import pytest

import tests.laws
from tests.mutants.hunt import hunt, lent
from tests.mutants.mutant import Mutant, planted
from tests.mutants.table import read_table

UNTRIED = {
    "test_composition::test_catalog_is_complete": "looks at the tests' own catalogue",
    "test_torch_schedules::test_every_scheduler_is_drawn": "looks at the tests' own table",
    "test_dtypes::test_every_transform_has_a_row": "looks at the tests' own rows",
    "test_draws::test_everything_that_draws_has_a_row": "looks at the tests' own table",
    "test_draws::test_no_two_rows_share_draws": "each row's own mutants are with the rows",
    "test_users_own::test_they_have_every_field_by_public_names": "looks at the tests' own classes",
    "test_ddp::test_a_profiler_sees_ddp_and_changes_nothing": "runs in other processes",
    "test_forged_manifests::test_a_forged_manifest_is_an_error_or_the_saved_state": (
        "what is wrongly taken crashes, and a crash finds nothing"
    ),
    "test_coupled_losses::test_real_ranks_gather_uneven_shares": "runs in other processes",
}
"""Tests of laws without a mutant, each with the reason."""


MUTANTS = read_table()
HARMLESS = Mutant(
    place="collectives:sum_",
    change="world.size > 1 → not world.size <= 1",
    case="laws.test_collectives::test_all_reduce_is_the_sum",
    law="L49",
    says="nothing",
)


def id_of(module: str, name: str) -> str:
    return f"{module.rpartition('.')[2]}::{name}"


def test_every_row_fits() -> None:
    """Each row of the table names one function, and its code to change occurs there once."""
    stale = [said for each in MUTANTS if (said := why_stale(each))]
    assert not stale, "\n".join(stale)


def why_stale(mutant: Mutant) -> str:
    try:
        mutant.code()
    except (LookupError, ValueError) as error:
        return str(error.args[0])
    return ""


@pytest.mark.slow
def test_mutants_come_and_go() -> None:
    """While a bug is inserted, the function has other code; then its own code object again."""
    for mutant in MUTANTS:
        own = mutant.function.__code__
        with planted(mutant):
            assert mutant.function.__code__ is not own, mutant.says
            assert mutant.function.__code__ != own, mutant.says
        assert mutant.function.__code__ is own, mutant.says


def test_mutants_name_their_tests() -> None:
    """Each test exists with its parameters; a row has a law exactly if its test is in laws/."""
    for mutant in MUTANTS:
        assert (mutant.law == "") != mutant.module.startswith("tests.laws."), (
            mutant.says
        )
        assert re.fullmatch(r"(L\d+)?", mutant.law), mutant.says
        with lent(mutant.test) as fixtures:
            asked = inspect.signature(mutant.test).parameters.keys()
            assert asked == mutant.args.keys() | fixtures.keys(), mutant.says


def test_sentences_differ() -> None:
    """Each mutant has a different sentence, which identifies the mutant."""
    assert len({each.says for each in MUTANTS}) == len(MUTANTS)


def test_every_law_has_a_mutant() -> None:
    """Every test in tests/laws finds at least one mutant, or is in UNTRIED with a reason."""
    found = set()
    for each in pkgutil.iter_modules(tests.laws.__path__):
        if each.name.startswith("test_"):
            module = importlib.import_module(f"tests.laws.{each.name}")
            found |= {
                id_of(each.name, name)
                for name, value in vars(module).items()
                if name.startswith("test_") and callable(value)
            }
    of_laws = [each.test for each in MUTANTS if each.law]
    tried = {id_of(each.__module__, each.__name__) for each in of_laws}
    assert found == tried | UNTRIED.keys()
    assert not tried & UNTRIED.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "says",
    [
        "ranks reduce with another operation than was meant",
        "a longer share's last sample is the next share's first",
        "a resumed run leaves out a sample",
    ],
)
def test_a_bug_is_found(says: str) -> None:
    """A few mutants are found; `nox -s mutants` runs all of them."""
    (mutant,) = [each for each in MUTANTS if each.says == says]
    assert hunt(mutant).killed


def test_what_is_no_bug_survives() -> None:
    """A change without an effect is not found, nor one that crashes; one must fit the code."""
    outcome = hunt(HARMLESS)
    assert (outcome.killed, outcome.told) == (False, "")
    assert outcome.examples > 1
    change = "world.size > 1 → world.no_such_name"
    outcome = hunt(attrs.evolve(HARMLESS, change=change))
    assert (outcome.killed, outcome.told[:14]) == (False, "AttributeError")
    with pytest.raises(ValueError, match="0 times, expected once. Update its row"):
        attrs.evolve(HARMLESS, change="no_such_line → pass").code()
    with pytest.raises(ValueError, match="no name no_such. Update its row"):
        attrs.evolve(HARMLESS, change="world.size > 1 → no_such").code()

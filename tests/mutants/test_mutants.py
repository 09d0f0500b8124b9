# SPDX-License-Identifier: Apache-2.0
"""Mutants fit what they are planted in, go without a trace, and leave no law untried."""

import importlib
import inspect
import pkgutil
import re

import attrs
import pytest
import torch

import tests.laws
from accelfn import collectives
from tests.laws import test_collectives
from tests.mutants.hunt import hunt, lent
from tests.mutants.mutant import Mutant, planted
from tests.mutants.mutants import MUTANTS
from tests.mutants.page import PAGE

UNTRIED = {
    "test_composition::test_catalog_is_complete": "looks at the tests' own catalogue",
    "test_torch_schedules::test_every_scheduler_is_drawn": "looks at the tests' own table",
    "test_dtypes::test_every_transform_has_a_row": "looks at the tests' own rows",
    "test_draws::test_everything_that_draws_has_a_row": "looks at the tests' own table",
    "test_draws::test_no_two_rows_share_draws": "each row's own mutants are with the rows",
    "test_users_own::test_they_have_every_field": "looks at the tests' own classes",
    "test_users_own::test_they_use_public_names_alone": "looks at the tests' own code",
    "test_ddp::test_a_profiler_sees_ddp_and_changes_nothing": "runs in other processes",
    "test_forged_manifests::test_a_forged_manifest_is_an_error_or_the_saved_state": (
        "what is wrongly taken crashes, and a crash finds nothing"
    ),
    "test_coupled_losses::test_real_ranks_gather_uneven_shares": "runs in other processes",
}
"""Laws without a mutant, and why."""


def id_of(module: str, name: str) -> str:
    return f"{module.rpartition('.')[2]}::{name}"


def test_mutants_come_and_go() -> None:
    """The function has other code while the bug is in it, and its very own before and after."""
    for mutant in MUTANTS:
        own = mutant.function.__code__
        with planted(mutant):
            assert mutant.function.__code__ is not own, mutant.says
            assert mutant.function.__code__ != own, mutant.says
        assert mutant.function.__code__ is own, mutant.says


def test_mutants_name_their_tests() -> None:
    """Each test is a function of a module here; one of a law is with the laws, and says which."""
    for mutant in MUTANTS:
        module, name = mutant.test.__module__, mutant.test.__name__
        assert re.match(r"tests\.(\w+\.)*test_", module), mutant.says
        assert name.startswith("test_"), mutant.says
        assert getattr(importlib.import_module(module), name) is mutant.test
        assert (mutant.law is None) != module.startswith("tests.laws."), mutant.says
        assert mutant.law is None or re.fullmatch(r"L\d+", mutant.law), mutant.says


def test_tests_get_what_they_ask_for() -> None:
    """A mutant gives its test what pytest would, of parameters; what it lends is all the rest."""
    for mutant in MUTANTS:
        parameters = inspect.signature(mutant.test).parameters
        marks = getattr(mutant.test, "pytestmark", [])
        given = [n for m in marks if m.name == "parametrize" for n in names_of(m)]
        assert mutant.args.keys() == set(given) & parameters.keys(), mutant.says
        with lent(mutant.test) as fixtures:
            assert parameters.keys() == mutant.args.keys() | fixtures.keys(), (
                mutant.says
            )


def names_of(mark: pytest.Mark) -> list[str]:
    named = mark.args[0]
    return named.replace(" ", "").split(",") if isinstance(named, str) else list(named)


def test_sentences_differ() -> None:
    """Each mutant says something of its own, which it is found by."""
    assert len({each.says for each in MUTANTS}) == len(MUTANTS)


def test_every_law_has_a_mutant() -> None:
    """Every test of a law is there to find a bug that is here, or says why not."""
    found = set()
    for each in pkgutil.iter_modules(tests.laws.__path__):
        if each.name.startswith("test_"):
            module = importlib.import_module(f"tests.laws.{each.name}")
            found |= {
                id_of(each.name, name)
                for name, value in vars(module).items()
                if name.startswith("test_") and callable(value)
            }
    of_laws = [each.test for each in MUTANTS if each.law is not None]
    tried = {id_of(each.__module__, each.__name__) for each in of_laws}
    assert found == tried | UNTRIED.keys()
    assert not tried & UNTRIED.keys()


def test_the_page_lists_them() -> None:
    """docs/mutants.md has a row for each mutant, in order; `nox -s mutants` writes it."""
    rows = re.findall(r"^\| (.+?) \|", PAGE.read_text(), re.MULTILINE)[2:]
    assert rows == [each.says for each in MUTANTS]


@pytest.mark.parametrize(
    "says",
    [
        "ranks reduce with another operation than was meant",
        "a longer share's last sample is the next share's first",
        "a resumed run leaves out a sample",
    ],
)
def test_a_bug_is_found(says: str) -> None:
    """The hunt finds some of them at once; `nox -s mutants` tries them all."""
    (mutant,) = [each for each in MUTANTS if each.says == says]
    assert hunt(mutant).killed


def test_what_is_no_bug_survives() -> None:
    """A change that changes nothing is not found, and a stale one is refused."""
    harmless = Mutant(
        "L49: nothing",
        test_collectives.test_all_reduce_is_the_sum,
        collectives.sum_,
        "if world.size > 1: → if not world.size <= 1:",
    )
    outcome = hunt(harmless)
    assert not outcome.killed
    assert outcome.told == ""
    assert outcome.examples > 1
    with pytest.raises(ValueError, match="plant the bug anew"):
        attrs.evolve(harmless, change="no such line → pass").code()


def test_a_bug_leaves_nothing_behind() -> None:
    """A mode that a test was broken off in is not that of the next hunt."""
    leaving = Mutant(
        "L49: a mode that stays",
        test_collectives.test_all_reduce_is_the_sum,
        collectives.sum_,
        "if world.size > 1: → if torch.set_grad_enabled(False) is None:",
    )
    was = torch.is_grad_enabled()
    hunt(leaving)
    assert torch.is_grad_enabled() is was


def test_a_crash_is_no_finding() -> None:
    """A bug that breaks the function itself is not found by the law."""
    crashing = Mutant(
        "L49: a name that is not there",
        test_collectives.test_all_reduce_is_the_sum,
        collectives.sum_,
        "if world.size > 1: → if no_such_name:",
    )
    outcome = hunt(crashing)
    assert outcome.told.startswith("NameError")
    assert not outcome.killed

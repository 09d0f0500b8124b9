# SPDX-License-Identifier: Apache-2.0
"""Test that the reference's tables have the facts that transforms declare and reject."""

import pytest

import accelfn as af
from tests import facts


@pytest.mark.parametrize("page", [facts.PAGE, facts.SUMMARY])
def test_the_tables_of_a_page_are_those_of_the_code(page):
    """`python -m tests.facts` writes them."""
    text = page.read_text(encoding="utf-8")

    assert "<!-- facts -->" in text
    assert text == facts.page(page)


def test_the_table_of_deepspeed_is_that_of_the_code():
    """`python -m tests.facts` writes it, if DeepSpeed is installed."""
    pytest.importorskip("deepspeed")
    text = facts.DEEPSPEED.read_text(encoding="utf-8")

    assert "`af.wrap_deepspeed(2)` |" in text
    assert text == facts.page(facts.DEEPSPEED)


def test_every_public_transform_is_shown():
    """Each card begins with an example, and each variant has a card."""
    shown = facts.shown(facts.cards())
    assert {type(each) for each in shown} == facts.public() - {af.wrap_deepspeed}
    assert all(each in shown for each in facts.VARIANTS)


def test_every_fact_is_told_by_one():
    """A fact that no transform of accelfn's tells would be nobody's to try."""
    shown = facts.shown(facts.cards())
    told = {fact for each in shown for fact in facts.facts_of(each)}

    assert told == set(facts.FACTS)

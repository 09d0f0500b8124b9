# SPDX-License-Identifier: Apache-2.0
"""The reference says what transforms tell and refuse, as they do."""

from tests import facts


def test_the_tables_of_the_page_are_those_of_the_code() -> None:
    """`python -m tests.facts` writes them."""
    text = facts.PAGE.read_text(encoding="utf-8")

    assert "<!-- facts -->" in text
    assert text == facts.page(text)


def test_every_public_transform_is_shown() -> None:
    assert {type(each) for each in facts.SHOWN} == facts.public()


def test_every_fact_is_told_by_one() -> None:
    """A fact that no transform of accelfn's tells would be nobody's to try."""
    told = {fact for each in facts.SHOWN for fact in facts.facts_of(each)}

    assert told == set(facts.FACTS)

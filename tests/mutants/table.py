# SPDX-License-Identifier: Apache-2.0
"""Read and write `table.tsv`, which has a row for each mutant, with cells between tabs."""

from collections.abc import Iterable
from pathlib import Path

import attrs

from tests.mutants.mutant import Mutant

PATH = Path(__file__).with_name("table.tsv")
_HEAD = "place\tchange\ttest\tlaw\twhat is wrong\texamples"


def read_table() -> list[Mutant]:
    """Read all mutants.

    Raises:
        ValueError: a row does not have the same number of cells as the header.
    """
    return [_mutant(number, row) for number, row in enumerate(_rows(), start=2)]


def write_table(mutants: Iterable[Mutant]) -> None:
    """Write the table with these mutants."""
    rows = ["\t".join(attrs.astuple(each)) for each in mutants]
    PATH.write_text("\n".join([_HEAD, *rows, ""]), encoding="utf-8")


def _rows() -> list[str]:
    return PATH.read_text(encoding="utf-8").rstrip("\n").split("\n")[1:]


def _mutant(number: int, row: str) -> Mutant:
    cells = row.split("\t")
    if len(cells) != len(attrs.fields(Mutant)):
        msg = (
            f"{PATH.name}:{number}: {len(cells)} cells between tabs; expected"
            f" {len(attrs.fields(Mutant))}: {_HEAD.replace(chr(9), ', ')}"
        )
        raise ValueError(msg)
    return Mutant(*cells)

# SPDX-License-Identifier: Apache-2.0
"""Bugs that tests must find; `python -m tests.mutants` plants them one by one.

A law whose test cannot fail proves nothing. `table.tsv` has a row for each bug: the function that
has it, what is changed there, and the test that must fail. The hunt gives each test as many
examples as CI does. A bug is found if the test's own assertion fails, or if accelfn refuses what
the bug leads to. Any other crash finds nothing.

To add a bug, add a row next to those of its test, with an empty last cell. `change`, `places` and
`cases` say how the first three cells are written. `operators` makes random bugs, which need no row.
"""

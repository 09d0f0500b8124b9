# SPDX-License-Identifier: Apache-2.0
"""Mutation tests: `python -m tests.mutants` inserts bugs, one by one, that tests must find.

A property test that cannot fail proves nothing. Each row of `table.tsv` is a bug (a mutant): the
function, the change of its code, and the test that must fail. Each test runs as many Hypothesis
examples as in CI. A bug is found if an assertion of the test fails, or if accelfn raises an
accelfn error. Any other exception does not count.

To add a bug, add a row next to those of the same test, with an empty last cell. `places`, `change`
and `cases` describe the first three cells. `operators` creates random bugs, which need no row.
"""

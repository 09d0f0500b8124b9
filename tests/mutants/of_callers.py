# SPDX-License-Identifier: Apache-2.0
"""Bugs of one caller, in what another one does as it should."""

from accelfn.checkpoint import command
from accelfn.loop import evaluate
from accelfn.weights import export
from tests.laws import test_callers
from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="an export may be forgotten",
        says="an exported model is named before the names of its files last",
        law="L52",
        test=test_callers.test_whatever_has_its_name_is_on_the_disk,
        args={"writer": "export_model"},
        place=export.export_model,
        old="disk.flush(job.partial)",
        new="pass",
    ),
    Mutant(
        name="inner folders may be forgotten",
        says="what a model's own method writes into a folder of its own is not flushed",
        law="L52",
        test=test_callers.test_whatever_has_its_name_is_on_the_disk,
        args={"writer": "save_pretrained"},
        place=export.save_pretrained,
        old='job.partial.rglob("*")',
        new='job.partial.glob("*")',
    ),
    Mutant(
        name="an export file by file",
        says="what the command exports gets its name before it is whole",
        law="L52",
        test=test_callers.test_whatever_is_cut_off_is_there_whole_or_not,
        args={"writer": "accelfn checkpoint export"},
        place=command.export,
        old="disk.rename(job.partial, job.final)",
        new="disk.make(job.final); disk.rename(job.partial / _MODEL, job.final / _MODEL)",
    ),
    Mutant(
        name="statistics of one's own",
        says="each rank evaluates with the statistics that it has counted itself",
        law="L36",
        test=test_callers.test_whatever_looks_at_buffers_sees_those_of_rank_0,
        place=evaluate._Lent.__init__,
        old="if buffers:",
        new="if False:",
    ),
]

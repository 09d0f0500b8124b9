# SPDX-License-Identifier: Apache-2.0
"""Bugs of one caller, in what another one does as it should."""

from accelfn.checkpoint import command
from accelfn.loop import evaluate
from accelfn.weights import export
from tests.laws import test_callers
from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "L52: an exported model is named before the names of its files last",
        test_callers.test_whatever_has_its_name_is_on_the_disk,
        export.export_model,
        "disk.flush(job.partial) → pass",
        args={"writer": "export_model"},
    ),
    Mutant(
        "L52: what a model's own method writes into a folder of its own is not flushed",
        test_callers.test_whatever_has_its_name_is_on_the_disk,
        export.save_pretrained,
        'job.partial.rglob("*") → job.partial.glob("*")',
        args={"writer": "save_pretrained"},
    ),
    Mutant(
        "L52: what the command exports gets its name before it is whole",
        test_callers.test_whatever_is_cut_off_is_there_whole_or_not,
        command.export,
        "disk.rename(job.partial, job.final)"
        " → disk.make(job.final); disk.rename(job.partial / _MODEL, job.final / _MODEL)",
        args={"writer": "accelfn checkpoint export"},
    ),
    Mutant(
        "L36: each rank evaluates with the statistics that it has counted itself",
        test_callers.test_whatever_looks_at_buffers_sees_those_of_rank_0,
        evaluate._Lent.__init__,
        "if buffers: → if False:",
    ),
]

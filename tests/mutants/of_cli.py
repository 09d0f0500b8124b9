# SPDX-License-Identifier: Apache-2.0
"""Bugs in the command line: exit codes, which file is meant, what is said of checkpoints."""

from accelfn import cli
from accelfn.checkpoint import command
from accelfn.launching import file
from tests.laws import test_launch_calls
from tests.mutants.mutant import Mutant
from tests.unit import test_answers, test_cli_pipes

MUTANTS = [
    Mutant(
        "accelfn checkpoint verify exits with 0 if what it reads last is whole",
        test_answers.test_verify_looks_at_all_and_forgets_no_loss,
        command.verify,
        "code = code if all( → code = 0 if all(",
    ),
    Mutant(
        "accelfn checkpoint verify says nothing of what comes after a corrupt file",
        test_answers.test_verify_looks_at_all_and_forgets_no_loss,
        command.verify,
        """\
        code = code if all(is_whole for _, is_whole in found) else 1
→
        code = code if all(is_whole for _, is_whole in found) else 1
        if code:
            break
""",
    ),
    Mutant(
        "a corrupt checkpoint of a store is found when it is needed",
        test_answers.test_verify_looks_at_all_and_forgets_no_loss,
        command.verify,
        "for step in steps] or [store] → for step in steps[-1:]] or [store]",
    ),
    Mutant(
        "accelfn checkpoint export takes another checkpoint of a store than is loaded",
        test_answers.test_a_store_is_its_newest_checkpoint,
        command._folder,
        "steps[-1] → steps[0]",
    ),
    Mutant(
        "accelfn checkpoint ls calls a checkpoint whole of which a part is gone",
        test_answers.test_ls_tells_what_is_cut_off,
        command._row,
        "if found != file.size: → if found > file.size:",
    ),
    Mutant(
        "what an interrupted save has left fills the disk, and ls does not show it",
        test_answers.test_ls_tells_what_is_cut_off,
        command.ls,
        'store.glob(".tmp-*") → store.glob("tmp-*")',
    ),
    Mutant(
        "an exported model has buffers that its own state dict has not",
        test_answers.test_an_export_is_what_a_model_would_save,
        command._exported,
        "if n in manifest.persistent → if n",
    ),
    Mutant(
        "accelfn checkpoint export --slot ema writes the model without its average",
        test_answers.test_an_export_is_what_a_model_would_save,
        command._exported,
        "params |= found → params = found | params",
    ),
    Mutant(
        "an exported model that somebody uses is overwritten",
        test_answers.test_an_export_is_what_a_model_would_save,
        command.export,
        "commit.begin(job) → disk.remove(job.final), commit.begin(job)",
    ),
    Mutant(
        "a script goes on after a command that was interrupted",
        test_answers.test_a_command_that_is_left_says_so,
        cli._run,
        "return 130 → return 0",
    ),
    Mutant(
        "a script goes on after a command that was refused",
        test_answers.test_a_command_that_is_left_says_so,
        cli._run,
        "return 2 → return 0",
    ),
    Mutant(
        "a step that is replayed fails by a broken pipe, and nobody is told",
        test_cli_pipes.test_another_broken_pipe_is_an_error,
        cli.main,
        "if not _reader_left(): → if sys.stdout.closed:",
    ),
    Mutant(
        "a launch with a misspelt file of settings runs with the defaults",
        test_answers.test_a_file_that_is_named_must_be_there,
        file.find,
        "if named is not None: → if named is None and file.exists():",
    ),
    Mutant(
        "a launch with a file of settings of its own runs with the directory's",
        test_answers.test_a_file_that_is_named_must_be_there,
        file.find,
        "Path(FILE if named is None else named)"
        " → Path(FILE if named is None or Path(FILE).is_file() else named)",
    ),
    Mutant(
        "L55: a launch on a machine without a GPU starts nothing",
        test_launch_calls.test_a_launch_is_what_its_settings_say,
        cli._num_processes,
        "max(1, accelerator.count()) → accelerator.count()",
    ),
    Mutant(
        "a launch with --max-restarts does not start its ranks again",
        test_answers.test_what_is_launched_is_what_was_said,
        cli._launch,
        'max_restarts=chosen["max_restarts"] → max_restarts=0',
    ),
    Mutant(
        "a launch after -m looks for a file of that name",
        test_answers.test_what_is_launched_is_what_was_said,
        cli._launch,
        "module=words.module → module=False",
    ),
    Mutant(
        "who writes --nproc=9 behind the script is not told that accelfn has not read it",
        test_answers.test_what_is_launched_is_what_was_said,
        cli._say_whose,
        'word.partition("=")[0] in flags → word in flags',
    ),
    Mutant(
        "accelfn test exits with 0 on a machine whose ranks cannot talk",
        test_answers.test_what_is_launched_is_what_was_said,
        cli._test,
        "return code → return 0",
    ),
    Mutant(
        "accelfn test --nproc 4 tells the ranks that they are two",
        test_answers.test_what_is_launched_is_what_was_said,
        cli._test,
        '[str(nproc)] → ["2"]',
    ),
]

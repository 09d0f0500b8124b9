# SPDX-License-Identifier: Apache-2.0
"""Bugs that show where a call is broken off midway: what it leaves behind, or half done."""

from accelfn.base import contexts, draws
from accelfn.checkpoint import arriving, background, commit, disk, moving
from accelfn.engine import engine
from accelfn.engine.optimizer import live_optimizer
from accelfn.loop import profiling, stopping
from accelfn.placing import hooks
from accelfn.step import holding, stages
from accelfn.track.jsonl import _Jsonl
from accelfn.weights import entries
from tests.laws import test_broken_off, test_broken_regroup
from tests.mutants.mutant import Mutant
from tests.unit import test_import_state

_LAW = test_broken_off.test_what_is_broken_off_leaves_nothing_half_done
_TOLD = test_broken_off.test_what_is_broken_off_on_a_rank_is_told_to_the_other
_UPDATE = test_broken_off.test_an_update_that_is_broken_off_was_not_begun_or_says_so

MUTANTS = [
    Mutant(
        "L54: an optimizer that is interrupted before it begins costs the state",
        _UPDATE,
        stages._stepped,
        "except BaseException: → except Exception:",
        args={"call": "apply"},
    ),
    Mutant(
        "L54: an update that had not begun is judged by what the last one changed",
        _UPDATE,
        live_optimizer.LiveOptimizer.expect,
        "self._has_begun = False → pass",
        args={"call": "apply"},
    ),
    Mutant(
        "L54: gradients that were to be added to are there in the next backward pass",
        _UPDATE,
        engine.Engine._take_in,
        """\
        self._move_out()
        self._home.clear_gradients()
        raise
→
        raise
""",
        args={"call": "older_gradients"},
    ),
    Mutant(
        "L54: an interrupted backward pass leaves gradients to the next",
        _UPDATE,
        engine.Engine.value_and_grad,
        "except BaseException as error: → except Exception as error:",
        args={"call": "older_gradients"},
    ),
    Mutant(
        "L54: an update in backward that could not begin costs the state",
        _UPDATE,
        stages.take_in_backward,
        "_undo(state, engine) → pass",
        args={"call": "step"},
    ),
    Mutant(
        "L54: a file that cannot be looked at stays open",
        _LAW,
        disk.open_plain,
        """\
    except BaseException:
        os.close(handle)
→
    except BaseException:
""",
        args={"call": "load"},
    ),
    Mutant(
        "L50: what is drawn after a block that raised goes on from that block's seed",
        _LAW,
        draws.seeded.__exit__,
        "_default.set_state(self._saved) → any(error) or _default.set_state(self._saved)",
        args={"call": "rng"},
    ),
    Mutant(
        "L50: Python's generator stays where a dataset that raised has left it",
        _UPDATE,
        draws.seeded.__exit__,
        "_restore_python(self._python) → any(error) or _restore_python(self._python)",
        args={"call": "batches"},
    ),
    Mutant(
        "L54: behind a step that raised Ctrl-C goes to nobody",
        _UPDATE,
        holding.holding.__exit__,
        """\
        _set(signal.SIGINT, self._previous)
        if self
→
        any(error) or _set(signal.SIGINT, self._previous)
        if self
""",
        args={"call": "apply"},
    ),
    Mutant(
        "L54: behind a run that raised signals are only noted, by nobody",
        _LAW,
        stopping.stopping,
        """\
    finally:
        for each, handler
→
    else:
        for each, handler
""",
        args={"call": "stopping"},
    ),
    Mutant(
        "L52: what a save had written that could not go on stays on the disk",
        _LAW,
        commit.Save.agreed,
        "disk.remove(self.partial) → pass",
        args={"call": "save"},
    ),
    Mutant(
        "L54: gradients are on behind a call that was made without them",
        _LAW,
        contexts.own_modes,
        "stack.enter_context(torch.enable_grad()) → torch.set_grad_enabled(True)",
        args={"call": "copy"},
    ),
    Mutant(
        "L54: a model that was placed keeps a hook",
        _LAW,
        hooks.let_in,
        "stack.callback(module.register_forward_pre_hook(before, prepend=True).remove)"
        " → module.register_forward_pre_hook(before, prepend=True)",
        args={"call": "placed"},
    ),
    Mutant(
        "L54: a log that could not be begun stays open",
        _LAW,
        _Jsonl.__init__,
        """\
        os.close(self._handle)
        raise
→
        raise
""",
        args={"call": "jsonl"},
    ),
    Mutant(
        "L54: each rank says of a save that it was itself that could not make it",
        _TOLD,
        commit.Save.agreed,
        "rank {rank} could not → rank {self.rank} could not",
    ),
    Mutant(
        "L54: a profile that broke off is the one of its process for good",
        _LAW,
        profiling.profile,
        """\
    finally:
        _ONE_A_PROCESS.release()
→
    except ZeroDivisionError:
        raise
    else:
        _ONE_A_PROCESS.release()
""",
        args={"call": "profile"},
    ),
    Mutant(
        "L54: behind a block that raised torch's profiler looks on",
        _LAW,
        profiling.profile,
        """\
        finally:
            profiler.stop()
→
        except ZeroDivisionError:
            raise
        else:
            profiler.stop()
""",
        args={"call": "profile"},
    ),
    Mutant(
        "L54: a rank that cannot begin in another world lets those wait that can",
        _TOLD,
        moving.moved,
        """\
    fresh = _all_begin(state, world, meeting)

    def take() -> TrainState:
→
    def take() -> TrainState:
        fresh = _begun(state, world)
""",
    ),
    Mutant(
        "L54: an error in the thread that writes a save is nobody's",
        test_broken_off.test_a_save_that_is_broken_off_behind_the_training_says_so,
        background.Writing._run,
        "self._error = self._alone(error) → pass",
    ),
    Mutant(
        "L54: what a rank could not hand over passes for handed over",
        test_broken_regroup.test_ranks_that_go_on_are_told_who_does_not,
        arriving.Arrivals._sent,
        "if error is not None: → if False:",
    ),
    Mutant(
        "short memory where an optimizer is tried is an answer of its",
        test_import_state.test_memory_that_is_short_is_no_answer,
        entries._keeps,
        "except MemoryError: → except ZeroDivisionError:",
    ),
]

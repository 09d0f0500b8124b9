# SPDX-License-Identifier: Apache-2.0
"""Every promise of the project is one session here; `nox -l` lists them.

Sessions run on the Python that runs nox, and install by pip what `constraints.txt`
pins, so a session does the same thing on every machine.
"""

import os
import subprocess
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "types", "tests"]

WITH_TESTS = (
    *(
        "-e",
        ".[testing,examples,tensorboard,wandb,comet,mlflow,docs,fp8,megatron]",
    ),
    *("sybil", "schedulefree", "lomo-optim", "pytest-xdist"),
    "openmpi",  # its mpirun
    *("ipykernel", "nbclient"),  # notebooks, executed
    *("accelerate", "datasets", "transformers", "peft"),  # what others read and write
)

# DeepSpeed is built where torch is there already, and none of its kernels, which are compiled
BUILDS_DEEPSPEED = "setuptools", "wheel", "ninja", "py-cpuinfo"
NO_KERNELS = {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}

SAMPLED = (  # of these CI runs a part
    "tests/kit/test_check_transform.py",
    "tests/simulation/test_ddp.py",
    "tests/unit/test_checkpoint_faults.py",
    "tests/test_examples.py",
)

TURNS = 8
"""Of so many parts of the slow tests a commit runs one, which its hash draws."""

ASKS_MOST_OF_TORCH = (  # where other versions broke so far
    *("tests/simulation", "tests/unit/test_collectives.py", "tests/unit/test_step.py"),
    *(
        "tests/unit/test_compile.py",
        "tests/unit/test_launch.py",
        "tests/unit/test_data.py",
    ),
    *("tests/unit/test_workers.py", "tests/unit/test_checkpoint.py"),
    "tests/unit/test_frozen.py",
)


def install(session: nox.Session, *requirements: str) -> None:
    """Install the versions that accelfn is tested with, and no others."""
    session.install("-c", "constraints.txt", *requirements)


def install_all(session: nox.Session) -> None:
    """Install all that tests look at: what others read and write, and engines of others."""
    install(session, *WITH_TESTS, *BUILDS_DEEPSPEED)
    install_deepspeed(session)


def install_deepspeed(session: nox.Session) -> None:
    """Install DeepSpeed beside torch, for its build asks for it."""
    isolated = "--no-build-isolation"
    session.install("-c", "constraints.txt", isolated, "deepspeed", env=NO_KERNELS)


def run(session: nox.Session, *command: str) -> None:
    """Run with one thread per process: ranks on one machine share its cores.

    Hundreds of processes import accelfn, which is compiled once for all, whatever the shell says.
    """
    env = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    session.run(*command, env=env)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting, the layers of imports, spelling, words and sizes."""
    install(session, "ruff", "import-linter", "codespell")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("lint-imports")
    session.run("codespell")
    session.run("python", "-m", "tests.style")


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of the package with pyright, and that type checkers find typos."""
    install(session, "-e", ".[testing,megatron]", "mypy", "pyright[nodejs]")
    session.run("pyright")
    session.run("python", "-m", "tests.typed")


def whose_turn() -> str:
    """Return which of the slow tests run at this commit; where there is none, all do."""
    asks = "git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "HEAD"
    try:
        found = subprocess.run(asks, capture_output=True, text=True, check=True)  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return "0/1"
    return f"{int(found.stdout, 16) % TURNS}/{TURNS}"


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests, of slow ones those whose turn it is at this commit; or those you name."""
    run_tests(session, *([] if session.posargs else [f"--turn={whose_turn()}"]))


@nox.session
def whole(session: nox.Session) -> None:
    """Run all tests, the slow ones too."""
    run_tests(session)


def run_tests(session: nox.Session, *options: str) -> None:
    """Run pytest, files side by side."""
    install_all(session)
    # one more than cores, for one group of tests waits most of its time
    num_workers = (os.cpu_count() or 1) + 1
    side_by_side = "-n", str(num_workers), "--dist", "loadgroup"
    # groups begin in the order of tests/conftest.py, which puts the longest first
    side_by_side += ("--no-loadscope-reorder",)
    # what was skipped is said, with its reason, and where the time went
    said = "-rs", "--durations=30", *side_by_side
    # What hangs shows the stacks of all its threads, and ends its process, which nothing takes
    # the place of: the others would wait for it. No thread of Python's does so, which would
    # wait for whatever lock the test left taken.
    ends = "-ofaulthandler_timeout=600", "-ofaulthandler_exit_on_timeout=true"
    ends += ("--max-worker-restart=0",)
    options = "--hypothesis-profile=ci", *said, *ends, *options
    run(session, "pytest", *options, *session.posargs)


@nox.session
def laws(session: nox.Session) -> None:
    """Search long for an example that breaks a law."""
    install_all(session)
    profile = "--hypothesis-profile=deep"
    run(session, "pytest", "tests/laws", *SAMPLED, profile, *session.posargs)


@nox.session
def mutants(session: nox.Session) -> None:
    """Plant bugs, and see that a test finds each."""
    install_all(session)
    run(session, "python", "-m", "tests.mutants", *session.posargs)


@nox.session
def demo(session: nox.Session) -> None:
    """Train the first example on two processes of this machine."""
    install(session, "-e", ".[examples]")
    script = "examples/01_digits.py"
    run(session, "accelfn", "launch", "--nproc", "2", script, *session.posargs)


@nox.session
def examples(session: nox.Session) -> None:
    """Run every example and see that it learns, the notebook among them."""
    install_all(session)
    scripts = "tests/test_examples.py", "tests/test_notebooks.py"
    run(session, "pytest", *scripts, *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Run every code block of the documentation and follow its links."""
    install_all(session)
    run(session, "pytest", "tests/test_docs.py", *session.posargs)


@nox.session
def site(session: nox.Session) -> None:
    """Build the documentation as a site, into build/site."""
    install(session, "-e", ".[docs,testing]")
    run(session, "python", "docs/site/build.py", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure a step against other loops, and write docs/benchmarks.md."""
    install(session, "-e", ".[bench,testing]", *BUILDS_DEEPSPEED)
    install_deepspeed(session)
    run(session, "python", "tests/bench/run.py", *session.posargs)
    run(session, "python", "docs/pictures/draw.py")


@nox.session
def compare(session: nox.Session) -> None:
    """Train one task by hand, with Accelerate, Fabric and accelfn, and print them side by side."""
    install(session, "-e", ".[bench,examples]")
    run(session, "python", "tests/compare/compare.py", *session.posargs)


@nox.session
def newest(session: nox.Session) -> None:
    """Run tests on the newest torch that pip finds; several GB, by hand and before a release."""
    on_another_torch(session, "torch", *session.posargs)


@nox.session
def oldest(session: nox.Session) -> None:
    """Run tests on the oldest torch that accelfn takes; several GB, as above."""
    on_another_torch(session, "torch==2.13.*", *session.posargs)


def on_another_torch(session: nox.Session, torch: str, *words: str) -> None:
    """Run tests, by default those that ask most of torch, beside nothing that pins torch."""
    session.install("-U", torch, "-e", ".[testing,examples]", "sybil", "pytest-xdist")
    session.run(
        "python", "-c", "import sys, torch; print(sys.version, torch.__version__)"
    )
    run(session, "pytest", "--hypothesis-profile=ci", *(words or ASKS_MOST_OF_TORCH))

# SPDX-License-Identifier: Apache-2.0
"""nox sessions for all checks of the project; `nox -l` lists them.

Sessions use the Python that runs nox, and install the versions that `constraints.txt` pins. So a
session does the same on every machine.
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
    "openmpi",  # has mpirun
    *("ipykernel", "nbclient"),  # to run notebooks
    *("accelerate", "datasets", "transformers", "peft"),  # for tests with their files
    *(
        "hydra-core",
        "torch_geometric",
        "webdataset",
        "bitsandbytes",
    ),  # for docs/how-to/libraries.md
)

# DeepSpeed's build imports torch and these packages. Its kernels, which need a compiler, are not
# built.
BUILDS_DEEPSPEED = "setuptools", "wheel", "ninja", "py-cpuinfo"
NO_KERNELS = {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}

SAMPLED = (  # CI runs only a part of these tests
    "tests/kit/test_check_transform.py",
    "tests/simulation/test_ddp.py",
    "tests/unit/test_checkpoint_faults.py",
    "tests/test_examples.py",
)

TURNS = 8
"""The slow tests are split into this many parts. The hash of a commit selects one part to run."""

ASKS_MOST_OF_TORCH = (  # tests that failed with other versions of torch so far
    *("tests/simulation", "tests/unit/test_collectives.py", "tests/unit/test_step.py"),
    *(
        "tests/unit/test_compile.py",
        "tests/unit/test_launch.py",
        "tests/unit/test_data.py",
    ),
    *("tests/unit/test_workers.py", "tests/unit/test_checkpoint.py"),
    "tests/unit/test_frozen.py",
)


AT_THE_FLOOR = (  # tests that the oldest torch passes; it has neither wrap_fsdp nor compile
    *("tests/unit/test_collectives.py", "tests/unit/test_data.py"),
    *("tests/unit/test_launch.py", "tests/unit/test_likely_mistakes.py"),
    *("tests/unit/test_local_sgd.py", "tests/unit/test_step.py"),
    *("tests/unit/test_world.py", "tests/laws/test_local_sgd.py"),
    *("tests/laws/test_random_replicas.py", "tests/laws/test_updates.py"),
    *("-k", "not fsdp and not fully_shard and not compile"),
)


def install(session: nox.Session, *requirements: str) -> None:
    """Install packages, in the versions that `constraints.txt` pins."""
    session.install("-c", "constraints.txt", *requirements)


def install_all(session: nox.Session) -> None:
    """Install all packages that the tests use, including DeepSpeed."""
    install(session, *WITH_TESTS, *BUILDS_DEEPSPEED)
    install_deepspeed(session)


def install_deepspeed(session: nox.Session) -> None:
    """Install DeepSpeed without build isolation, because its build imports torch."""
    isolated = "--no-build-isolation"
    session.install("-c", "constraints.txt", isolated, "deepspeed", env=NO_KERNELS)


def run(session: nox.Session, *command: str) -> None:
    """Run a command with one thread per process, because ranks on a machine share its cores.

    Python writes bytecode even if the shell disables this: hundreds of processes import accelfn.
    """
    env = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    session.run(*command, env=env)


@nox.session
def lint(session: nox.Session) -> None:
    """Check code style, formatting, import layers, spelling, plain language and code size."""
    install(session, "ruff", "import-linter", "codespell")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("lint-imports")
    session.run("codespell")
    session.run("python", "-m", "tests.style")


@nox.session
def types(session: nox.Session) -> None:
    """Check the package's types with pyright; test that type checkers find wrong calls."""
    install(session, "-e", ".[testing,megatron]", "mypy", "pyright[nodejs]")
    session.run("pyright")
    session.run("python", "-m", "tests.typed")


def whose_turn() -> str:
    """Return "k/n": at this commit, part k of n of the slow tests runs; 0/1 without git."""
    asks = "git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "HEAD"
    try:
        found = subprocess.run(asks, capture_output=True, text=True, check=True)  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return "0/1"
    return f"{int(found.stdout, 16) % TURNS}/{TURNS}"


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests that you name; or all fast tests, and one part of the slow tests."""
    run_tests(session, *([] if session.posargs else [f"--turn={whose_turn()}"]))


@nox.session
def whole(session: nox.Session) -> None:
    """Run all tests, including all slow tests."""
    run_tests(session)


def run_tests(session: nox.Session, *options: str) -> None:
    """Run pytest with several worker processes."""
    install_all(session)
    # one worker more than cores, because one group of tests mostly waits
    num_workers = (os.cpu_count() or 1) + 1
    side_by_side = "-n", str(num_workers), "--dist", "loadgroup"
    # start groups in the order of tests/conftest.py, which has the longest group first
    side_by_side += ("--no-loadscope-reorder",)
    # report skipped tests with the reason, and the slowest tests
    said = "-rs", "--durations=30", *side_by_side
    # If a test hangs, faulthandler prints the stacks of all threads and ends the worker, which
    # is not restarted. faulthandler needs no Python thread, which could wait for a lock that the
    # test holds.
    ends = "-ofaulthandler_timeout=600", "-ofaulthandler_exit_on_timeout=true"
    ends += ("--max-worker-restart=0",)
    options = "--hypothesis-profile=ci", *said, *ends, *options
    run(session, "pytest", *options, *session.posargs)


@nox.session
def laws(session: nox.Session) -> None:
    """Run the property tests with many examples."""
    install_all(session)
    profile = "--hypothesis-profile=deep"
    run(session, "pytest", "tests/laws", *SAMPLED, profile, *session.posargs)


@nox.session
def mutants(session: nox.Session) -> None:
    """Run the mutation tests: insert bugs, and check that a test finds each bug."""
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
    """Run all examples and the notebook, and check that each of them learns."""
    install_all(session)
    scripts = "tests/test_examples.py", "tests/test_notebooks.py"
    run(session, "pytest", *scripts, *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Run all code blocks of the documentation, and check its links."""
    install_all(session)
    run(session, "pytest", "tests/test_docs.py", *session.posargs)


@nox.session
def site(session: nox.Session) -> None:
    """Build the documentation's website in build/site."""
    install(session, "-e", ".[docs,testing]")
    run(session, "python", "docs/site/build.py", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Run the benchmarks, which compare accelfn with other loops; write docs/benchmarks.md."""
    install(session, "-e", ".[bench,testing]", *BUILDS_DEEPSPEED)
    install_deepspeed(session)
    run(session, "python", "tests/bench/run.py", *session.posargs)
    run(session, "python", "docs/pictures/draw.py")


@nox.session
def compare(session: nox.Session) -> None:
    """Train one task with a plain loop, Accelerate, Fabric and accelfn; print all results."""
    install(session, "-e", ".[bench,examples]")
    run(session, "python", "tests/compare/compare.py", *session.posargs)


@nox.session
def newest(session: nox.Session) -> None:
    """Run tests with the newest torch on PyPI, before a release; downloads several GB."""
    on_another_torch(session, "torch", *session.posargs)


@nox.session
def oldest(session: nox.Session) -> None:
    """Run tests with the oldest torch that accelfn supports; downloads several GB."""
    on_another_torch(session, "torch==2.11.*", *(session.posargs or AT_THE_FLOOR))


def on_another_torch(session: nox.Session, torch: str, *words: str) -> None:
    """Run tests with another torch, without packages that pin torch.

    By default, run the tests that failed with other versions of torch.
    """
    session.install("-U", torch, "-e", ".[testing,examples]", "sybil", "pytest-xdist")
    session.run(
        "python", "-c", "import sys, torch; print(sys.version, torch.__version__)"
    )
    run(session, "pytest", "--hypothesis-profile=ci", *(words or ASKS_MOST_OF_TORCH))

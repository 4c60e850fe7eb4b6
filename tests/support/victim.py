"""A process that saves and loads, and dies or is interrupted at a moment that one of its own store calls gives.

    outcome = run_victim({"kind": "die", "url": url, "storage_options": options, "num_tensors": 3, "at": "/.metadata"})

Scenarios, one after the other in the same process:

- `kind`: `die` ends the process on the spot, a forked one of its own, since others are to come; `interrupt` sends
  SIGINT to the process and lets the call go on.
- `during`: `save` (the default) or `load`.
- `at`: the write (or read, during a load) of a path that contains this text gives the moment; `after` such calls
  before it pass.
- `catch`: false for one that ends the process by the exception; the last, of course.
- `num_tensors`: of the state, and so the number of shard files; `arguments`: further ones for the writer or reader.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import fsspec

DIED = 70

_PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class Outcome:
    """What became of the process.

    Attributes:
        returncode: None if it had to be killed at the deadline.
        reports: of each scenario. After `die`, `exit`: `DIED`, or 0 if the moment never came. After `interrupt`,
            `raised` and its `text`, and `threads` of the package that still run.
        output: all that it printed.
    """

    returncode: int | None
    reports: list[dict[str, Any]] = field(default_factory=list)
    output: str = ""


def run_victim(*scenarios: dict[str, Any], deadline_seconds: float = 100.0) -> Outcome:
    """Run the scenarios in a new process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "support.victim", json.dumps(scenarios)]
    try:
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=deadline_seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        return Outcome(None, output=f"{error.stdout!r}\n{error.stderr!r}")
    reports = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    return Outcome(ended.returncode, reports, ended.stdout + ended.stderr)


def state_of(num_tensors: int, seed: int = 50) -> dict[str, Any]:
    """Return the state that the process saves and loads: `num_tensors` shard files at the smallest shard size."""
    from support.tensors import random_tensor

    return {f"tensor{number}": random_tensor(15_000, seed=seed + number) for number in range(num_tensors)}


class _Moment:
    """Calls `strike` in the store call that the scenario names."""

    def __init__(self, scenario: dict[str, Any], strike: Callable[[], object]) -> None:
        self._at, self._left = scenario["at"], scenario.get("after", 0)
        self._strike = strike
        self._lock = threading.Lock()

    def comes(self, path: str) -> None:
        with self._lock:
            if self._at not in path:
                return
            self._left -= 1
            due = self._left == -1
        if due:
            self._strike()

    def hook(self, owner: Any, name: str, only: Callable[..., bool] = lambda *_, **__: True) -> None:
        """Let the moment come just before `owner.name(path, ...)` is called with arguments that satisfy `only`.

        A call of an S3 operation names its object by ``Key=``.
        """
        original = getattr(owner, name)

        def hooked(*arguments: Any, **options: Any) -> Any:
            if only(*arguments, **options):
                self.comes(str(options.get("Key", arguments[0])))
            return original(*arguments, **options)

        setattr(owner, name, hooked)


@contextlib.contextmanager
def _store_that(moment: _Moment, options: dict[str, Any] | None, *, writes: bool) -> Iterator[dict[str, Any]]:
    """Give arguments for a writer or reader whose writes, or else reads, are hooked."""
    if options is None:  # local files go through the operating system
        before = os.open
        moment.hook(os, "open", lambda _, flags, *__, **___: bool(flags & os.O_WRONLY) == writes)
        try:
            yield {}
        finally:
            os.open = before
        return
    filesystem = fsspec.filesystem("s3", skip_instance_cache=True, **options)
    for name in ("pipe_file",) if writes else ("cat_file", "call_s3"):
        moment.hook(filesystem, name)
    yield {"filesystem": filesystem}


_noticed = threading.Event()


def _raise_interrupt(*_: object) -> None:
    _noticed.set()
    raise KeyboardInterrupt


def _interrupt() -> None:
    """Interrupt the main thread as Ctrl-C does, and go on once it has learnt it."""
    _noticed.clear()
    os.kill(os.getpid(), signal.SIGINT)
    _noticed.wait(_PATIENCE_SECONDS)


def _run(scenario: dict[str, Any]) -> None:
    from support.checkpoints import load, save

    strikes = {"die": lambda: os._exit(DIED), "interrupt": _interrupt}
    moment = _Moment(scenario, strikes[scenario["kind"]])
    state, url = state_of(scenario["num_tensors"]), scenario["url"]
    writes = scenario.get("during", "save") == "save"
    with _store_that(moment, scenario["storage_options"], writes=writes) as store:
        arguments = {**store, **scenario.get("arguments", {})}
        if writes:
            save(state, url, shard_bytes=64 << 10, **arguments)
        else:
            load(state, url, **arguments)


def _report(error: BaseException | None) -> None:
    from support.checkpoints import threads_of_ours

    print(json.dumps({"raised": repr(error), "text": str(error), "threads": threads_of_ours()}), flush=True)


def _die(scenario: dict[str, Any]) -> None:
    # Nothing has started a thread here yet, as long as no interrupt scenario came before; so forking is safe.
    child = os.fork()
    if child == 0:
        _run(scenario)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(json.dumps({"exit": os.waitstatus_to_exitcode(status)}), flush=True)


def main() -> None:
    """Run the scenarios that the command line holds."""
    import support.checkpoints  # noqa: F401  # before any fork, once for all

    signal.signal(signal.SIGINT, _raise_interrupt)
    for scenario in json.loads(sys.argv[1]):
        if scenario["kind"] == "die":
            _die(scenario)
            continue
        if not scenario.get("catch", True):
            _run(scenario)
        try:
            _run(scenario)
        except BaseException as error:  # torch's CheckpointException and KeyboardInterrupt are no Exceptions
            _report(error)
        else:
            _report(None)


if __name__ == "__main__":
    main()

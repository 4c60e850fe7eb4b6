"""Every kind of failure: one clear line, a code that scripts can trust, no traceback."""

from __future__ import annotations

import signal
import socket
import threading
from pathlib import Path
from typing import Any

import click
import pytest

from dcp_fsspec.cli import options
from dcp_fsspec.cli.app import cli
from support.commands import flags, run, run_process, start
from support.stores import FolderStore, S3Store, Store

on_stores = pytest.mark.parametrize("store", ["file", "moto", "seaweed"], indirect=True)


@on_stores
def test_where_nothing_is_nothing_is_found(store: Store, tmp_path: Path) -> None:
    nothing = store.below("nothing")
    for command in (("ls",), ("show",), ("verify",), ("latest",), ("sweep",), ("prune", "--keep-latest", "1")):
        assert "nothing" in run(store, command[0], nothing, *command[1:], code=3).line
    for command in ("diff", "cp", "export", "import"):
        assert "nothing" in run(store, command, nothing, str(tmp_path / "x"), code=3).line


def test_a_bucket_that_is_not_there_is_named(seaweed_store: S3Store, place: Any, tmp_path: Path) -> None:
    local = FolderStore(tmp_path, str(tmp_path))
    assert "no-such-bucket" in run(seaweed_store, "ls", "s3://no-such-bucket/run", code=3).line
    assert "no-such-bucket" in run(seaweed_store, "cp", place(local, "ours"), "s3://no-such-bucket/x", code=3).line


@pytest.mark.parametrize(
    "arguments",
    [
        ("ls", "nosuch://bucket/run"),
        ("ls", "s3://"),
        ("ls", "s3:/bucket/run"),
        ("ls",),
        ("ls", "x", "--option", "key"),
        ("ls", "x", "--option", "a:={"),
        ("export", "x", "y", "--dtype", "int3"),
        ("nosuchcommand",),
    ],
)
def test_a_wrong_url_or_option_is_wrong_usage(arguments: tuple[str, ...]) -> None:
    answer = run(None, *arguments, code=2)
    assert answer.err
    assert "Traceback" not in answer.err
    assert not answer.out


@pytest.mark.parametrize("name", ["no_such_option", "client_kwargs.no_such_option", "config_kwargs.no_such_option"])
def test_an_option_that_the_filesystem_does_not_know_is_named(name: str) -> None:
    answer = run(None, "ls", "s3://bucket/x", "--option", f"{name}=1", "--option", "anon=true", code=2)
    assert "no_such_option" in answer.line


def test_no_rights_is_the_stores_failure(seaweed_store: S3Store, place: Any) -> None:
    root = place(seaweed_store, "ours")
    wrong = {**(seaweed_store.storage_options or {}), "secret": "wrong-secret-of-the-test"}
    for command in (("ls", root), ("verify", root), ("export", root, f"{root}-out")):
        words = list(flags(FolderStore(Path("/"), "/", wrong)))
        answer = run(None, command[0], *words, *command[1:], code=4)
        assert "credentials" in answer.line
        assert "wrong-secret" not in answer.line


@on_stores
def test_a_broken_or_hostile_checkpoint_is_refused(store: Store, place: Any, tmp_path: Path) -> None:
    root = place(store, "ours")
    name = "run/iter_000000002/model/.metadata"
    good = store.raw_read(name)
    store.raw_write(name, good[: len(good) // 2])
    for command in ("show", "export", "cp", "diff"):
        target = () if command == "show" else (root,) if command == "diff" else (str(tmp_path / command),)
        assert ".metadata" in run(store, command, f"{root}/iter_000000002", *target, code=5).line
    run(store, "verify", root, code=1)
    store.raw_write(name, b"cposix\nsystem\n(S'touch hacked'\ntR.")
    assert "system" in run(store, "show", root, code=5).line
    store.raw_delete(name)
    store.raw_delete("run/iter_000000002/commit.json")
    assert "model" in run(store, "export", f"{root}/iter_000000002", str(tmp_path / "x"), code=3).line


COMMANDS = {
    "ls": ("URL",),
    "show": ("URL",),
    "verify": ("URL",),
    "diff": ("URL", "LOCAL"),
    "cp": ("URL", "LOCAL"),
    "export": ("URL", "LOCAL"),
    "import": ("URL", "LOCAL"),
    "latest": ("URL",),
    "prune": ("URL", "--keep-latest", "1"),
    "sweep": ("URL",),
    "bench": ("URL", "--size", "1MiB"),
}
"""Every command, with what it needs."""


def _failure(store: Store | None, command: str, url: str, tmp_path: Path, *options: str, code: int) -> str:
    """Return the one line with which a command ends; bench has said before what it is about to do."""
    words = [{"URL": url, "LOCAL": str(tmp_path / "local")}.get(word, word) for word in COMMANDS[command]]
    answer = run(store, command, *options, *words, code=code)
    if command == "bench":
        answer.err = "".join(line for line in answer.err.splitlines(keepends=True) if line != "latency ...\n")
    return answer.line


def test_all_commands_are_tried() -> None:
    assert list(COMMANDS) == cli.list_commands(click.Context(cli))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_ends_with_a_line_on_a_wrong_url_and_a_wrong_option(command: str, tmp_path: Path) -> None:
    assert "nosuch" in _failure(None, command, "nosuch://bucket/run", tmp_path, code=2)
    wrong = ("--option", "no_such_option=1")
    assert "no_such_option" in _failure(None, command, "s3://bucket/run", tmp_path, *wrong, code=2)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_ends_with_a_line_without_rights(command: str, seaweed_store: S3Store, tmp_path: Path) -> None:
    wrong = FolderStore(Path("/"), "/", {**(seaweed_store.storage_options or {}), "secret": "wrong-secret"})
    assert "credentials" in _failure(wrong, command, seaweed_store.below("run"), tmp_path, code=4)


def test_commands_that_write_end_with_a_line_without_rights_in_the_target(
    seaweed_store: S3Store, place: Any, tmp_path: Path
) -> None:
    local = FolderStore(tmp_path, str(tmp_path))
    root = place(local, "ours")
    run(None, "export", root, local.below("model.safetensors"))
    wrong = FolderStore(Path("/"), "/", {**(seaweed_store.storage_options or {}), "secret": "wrong-secret"})
    for command, source in (("cp", root), ("export", root), ("import", local.below("model.safetensors"))):
        words = (source, seaweed_store.below("target"), *flags(wrong, "--target-option"))
        assert "credentials" in run(None, command, *words, code=4).line
    assert seaweed_store.raw_list() == {}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_ends_with_a_line_on_an_interrupt(command: str, tmp_path: Path) -> None:
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        held: list[socket.socket] = []

        def interrupt() -> None:
            held.append(listener.accept()[0])  # It waits for an answer that never comes.
            signal.pthread_kill(main_thread, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        endpoint = f"client_kwargs.endpoint_url=http://127.0.0.1:{listener.getsockname()[1]}"
        options = ("--option", "key=abc", "--option", "secret=def", "--option", endpoint)
        assert "interrupted" in _failure(None, command, "s3://bucket/run", tmp_path, *options, code=130)
        thread.join()
        for one in held:
            one.close()


def test_an_interrupt_ends_a_process_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(120)
        endpoint = f"client_kwargs.endpoint_url=http://127.0.0.1:{listener.getsockname()[1]}"
        words = ("--option", "key=abc", "--option", "secret=def", "--option", endpoint)
        process = start("ls", "s3://bucket/run", *words)
        connection, _ = listener.accept()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
        connection.close()
    assert process.returncode == 130, err
    assert len(err.strip().splitlines()) == 1
    assert "interrupted" in err
    assert not out


def test_without_its_libraries_the_command_line_says_what_to_install() -> None:
    code = "import sys; sys.modules['rich'] = None\nfrom dcp_fsspec.cli import main; main()"
    answer = run_process("ls", "x", python=("-c", code))
    assert answer.code == 2
    assert "dcp-fsspec[cli]" in answer.line


def test_the_real_command_answers(written: dict[str, Path]) -> None:
    answer = run_process("latest", str(written["ours"]))
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.strip().endswith("iter_000000002")


def test_every_command_explains_itself() -> None:
    for command in COMMANDS:
        answer = run(None, command, "--help")
        assert "--option" in answer.out
        assert "--json" in answer.out


def test_options_are_what_they_look_like() -> None:
    texts = [
        "key=0123",
        "secret=true",
        "anon=false",
        "client_kwargs.endpoint_url=http://h:1/?a=b",
        "n=5",
        "x:=[1]",
        "z=007",
    ]
    assert options.storage_options([*texts, "client_kwargs.verify=null"]) == {
        "key": "0123",
        "secret": "true",
        "anon": False,
        "client_kwargs": {"endpoint_url": "http://h:1/?a=b", "verify": None},
        "n": 5,
        "x": [1],
        "z": "007",
    }

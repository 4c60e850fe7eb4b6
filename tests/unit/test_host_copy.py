"""Copies from host memory to host memory by several threads."""

from __future__ import annotations

import pytest
import torch

from dcp_fsspec.checkpointer import host_copy
from dcp_fsspec.checkpointer.host_copy import copy_on_host


@pytest.mark.parametrize("num_threads", [1, 4])
def test_all_kinds_of_memory_are_copied(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copy, "_num_threads", lambda: num_threads)
    monkeypatch.setattr(host_copy, "_PIECE_BYTES", 1000)
    generator = torch.Generator().manual_seed(1)
    plain = torch.rand(50, 37, generator=generator)
    imaginary = torch.rand(50, 37, dtype=torch.complex64, generator=generator)
    sources = [
        plain,
        plain.t(),
        plain[::2, 1:30],
        plain[:1].expand(40, 37),
        torch.tensor(3),
        torch.empty(0, 5),
        torch.arange(2001, dtype=torch.uint8),
        imaginary.conj(),
        imaginary.imag,
        torch.nn.Parameter(plain.clone()).detach(),
        plain.bfloat16(),
        *torch.rand(300, 3, generator=generator),
    ]
    pairs = [(source, torch.full(source.shape, 9, dtype=source.dtype)) for source in sources]
    copy_on_host(pairs)
    for source, place in pairs:
        assert torch.equal(source, place)


def test_error_of_any_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copy, "_num_threads", lambda: 3)
    monkeypatch.setattr(host_copy, "_PIECE_BYTES", 8)
    good = (torch.ones(3), torch.zeros(3))
    with pytest.raises(RuntimeError, match="size"):
        copy_on_host([good, good, (torch.ones(6)[::2], torch.zeros(4)), good])

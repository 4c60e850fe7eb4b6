"""The Python blocks of the README and of docs/ run as they are printed.

The blocks of one file share their names, in order, and begin with what a reader has at hand: a model, its optimizer, a
state. `s3://bucket` means `memory://` here. A block after the comment `<!-- compiled only -->` needs what a test does
not have, such as an account; it must be valid Python. One after `<!-- recipe -->` is a program: see tests/recipes.
"""

from __future__ import annotations

import re
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^(?P<mark><!-- (?:compiled only|recipe[^\n]*) -->\n)?```python\n(?P<code>.*?)^```", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Block:
    """One block of a file, with as many lines before it as the file has, so that tracebacks point at it."""

    code: str
    only_compiled: bool


def _blocks(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    found = BLOCK.finditer(text)
    return [Block("\n" * text[: one.start("code")].count("\n") + one["code"], bool(one["mark"])) for one in found]


class _Loader:
    """A data loader with a state."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def _at_hand() -> dict[str, Any]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "state": {"weight": torch.arange(6.0)},
        "loader": _Loader(),
        "train_one_iteration": lambda: 0.5,
    }


@pytest.mark.parametrize("path", FILES, ids=[path.name for path in FILES])
def test_the_python_blocks_run_in_their_order(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("blocks_of_a_page")  # Classes that a block defines can be pickled by their names.
    monkeypatch.setitem(sys.modules, module.__name__, module)
    module.__dict__.update(_at_hand())
    blocks = _blocks(path)
    assert len(blocks) == path.read_text(encoding="utf-8").count("```python"), "a block is not closed, or indented"
    for block in blocks:
        compiled = compile(block.code.replace("s3://bucket", f"memory://{tmp_path.name}"), str(path), "exec")
        if not block.only_compiled:
            exec(compiled, module.__dict__)


def test_readme_and_the_migration_page_are_among_the_files() -> None:
    assert {"README.md", "migration.md"} <= {path.name for path in FILES}

"""errors <- storage <- checkpointer <- tools <- cli, and nothing points back."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import dcp_fsspec

ROOT = Path(dcp_fsspec.__file__).parent
LAYERS = ["errors", "version", "storage", "checkpointer", "tools", "cli"]


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == "dcp_fsspec"}


def test_no_layer_imports_one_above_it() -> None:
    for path in ROOT.rglob("*.py"):
        layer = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if layer not in LAYERS:
            continue
        for name in _imports(path):
            imported = name.split(".")[1] if "." in name else ""
            assert imported in LAYERS, f"{path.name} imports {name}: the package's face, not a module"
            assert LAYERS.index(imported) <= LAYERS.index(layer), f"{path.relative_to(ROOT)} imports {name}"


def test_errors_imports_nothing() -> None:
    assert not any(
        isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(ast.parse((ROOT / "errors.py").read_text()))
    )


def test_private_parts_of_torch_are_imported_in_one_place() -> None:
    allowed = {"torch_internals.py"}
    for path in [path for layer in LAYERS for path in (ROOT / layer).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                private = [part for part in f"{node.module}.{node.names[0].name}".split(".") if part.startswith("_")]
                assert not private or path.name in allowed, f"{path.relative_to(ROOT)} imports {private}"


def test_commands_that_open_no_checkpoint_do_without_torch() -> None:
    script = "import sys, dcp_fsspec.cli.listing, dcp_fsspec.cli.keeping; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, cwd=ROOT.parent)

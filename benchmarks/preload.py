"""Imported once by the fork server: every measured process is then a fork that has its imports behind it.

Imports only; nothing here may start a thread or open a connection.
"""

from __future__ import annotations

import contextlib
import gc
import importlib

MODULES = (
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "fsspec",
    "s3fs",
    "obstore.fsspec",
    "s3torchconnector.dcp",
    "dcp_fsspec",
    "benchmarks.worker",
)

for _name in MODULES:
    # What is missing is reported by `peers.why_missing`, and only for the peers that need it.
    with contextlib.suppress(Exception):
        importlib.import_module(_name)
# Else the first collection in each child would copy most of these pages.
gc.freeze()

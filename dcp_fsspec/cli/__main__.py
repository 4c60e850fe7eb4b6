"""``python -m dcp_fsspec.cli``."""

from dcp_fsspec.cli import main

main()

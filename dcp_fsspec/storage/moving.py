"""Put one file in the place of another on filesystems that have no better way than a move."""

import contextlib
import errno
import logging
import secrets

from fsspec import AbstractFileSystem

from dcp_fsspec.storage.retry import passes

logger = logging.getLogger(__name__)


def move_over(fs: AbstractFileSystem, source: str, target: str, data: bytes, *, own_mv: bool) -> None:
    """Move `source` onto `target`, which may exist, whatever `fs` thinks of that.

    Args:
        fs: The filesystem.
        source: Path of the new file.
        target: Path to put it at.
        data: Content of the new file, to tell whether it is there.
        own_mv: ``fs.mv`` takes names literally.

    Raises:
        Exception: what `fs` raised; the old file is at `target` still.
    """
    try:
        _move(fs, source, target, own_mv)
        return
    except NotImplementedError:
        logger.warning("%s can neither move nor copy: %s is written in place", type(fs).__name__, target)
        fs.pipe_file(target, data)
        fs.rm_file(source)
        return
    except Exception as error:
        there = bool(fs.exists(target))
        if there and fs.cat_file(target) == data:
            with contextlib.suppress(Exception):
                fs.rm_file(source)  # It was copied, and only removing the source failed.
            return
        if not there or not _may_mean_exists(error):
            raise
    # This filesystem does not move onto an existing file. The old one steps aside, and back if need be.
    aside = f"{target}.old-{secrets.token_hex(4)}"
    _move(fs, target, aside, own_mv)
    try:
        _move(fs, source, target, own_mv)
    except BaseException:
        _move(fs, aside, target, own_mv)
        raise
    fs.rm_file(aside)


def _move(fs: AbstractFileSystem, source: str, target: str, own_mv: bool) -> None:
    if own_mv:
        fs.mv(source, target)
    else:
        # fsspec's own mv reads [, ? and * as a pattern; these two do not.
        fs.cp_file(source, target)
        fs.rm_file(source)


def _may_mean_exists(error: Exception) -> bool:
    """Tell whether a failed move may have failed because its target exists, which filesystems say in many ways."""
    if isinstance(error, OSError):
        return error.errno in (None, errno.EEXIST)
    return not passes(error)

"""How DCP calls the files of a checkpoint. Pure, and quick to import."""

FILE_NAME = ".metadata"
SHARD_SUFFIX = ".distcp"


def file_name(rank: int | None = None) -> str:
    """Return the name of the metadata file, or of the one that `rank` wrote without collectives."""
    return FILE_NAME if rank is None else f"__{rank}{FILE_NAME}"

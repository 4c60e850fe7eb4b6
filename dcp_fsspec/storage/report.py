"""What a save or a load did, as plain numbers."""

import dataclasses


@dataclasses.dataclass
class SaveReport:
    """One rank's part of a save.

    Attributes:
        num_files: Shard files written.
        num_items: Items in them.
        num_bytes: Bytes of the shard files.
        seconds: Wall time of the writing on this rank, from the plan to the last shard file.
        num_requests: Calls made to the filesystem by this rank, the commit included.
        num_retries: Those of them that repeated a failed one.
        save_id: The id that ``.metadata`` carries, or would have carried after a failure; on the coordinator.
    """

    num_files: int = 0
    num_items: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    num_requests: int = 0
    num_retries: int = 0
    save_id: str = ""


@dataclasses.dataclass
class ReadReport:
    """One rank's part of a load.

    Attributes:
        num_items: Items read, whole or in part.
        num_bytes_needed: Bytes of the items, or parts of items, that the plan asked for.
        num_bytes: Bytes fetched.
        num_bytes_received: Bytes that came from other ranks, which had fetched them.
        seconds: Wall time of the reading on this rank.
        num_requests: Calls made to the filesystem by this rank, ``.metadata`` included.
        num_retries: Those of them that repeated a failed one.
        num_verified: Items whose checksum was compared.
        num_unverified: Items loaded unchecked: read only in part, written without checksums, or by choice.
        checksums: ``"checked"``, ``"off"`` or ``"absent"``, for the checkpoint as a whole.
    """

    num_items: int = 0
    num_bytes_needed: int = 0
    num_bytes: int = 0
    num_bytes_received: int = 0
    seconds: float = 0.0
    num_requests: int = 0
    num_retries: int = 0
    num_verified: int = 0
    num_unverified: int = 0
    checksums: str = "absent"

    def add(self, other: "ReadReport") -> None:
        """Count what another read of the same load did."""
        self.num_items += other.num_items
        self.num_bytes_needed += other.num_bytes_needed
        self.num_bytes += other.num_bytes
        self.num_verified += other.num_verified
        self.num_unverified += other.num_unverified


def speed_text(num_bytes: int, seconds: float) -> str:
    """Return how much took how long, for a log."""
    speed = num_bytes / 1e6 / seconds if seconds else 0.0
    return f"{num_bytes / 1e6:.1f} MB in {seconds:.2f} s ({speed:.0f} MB/s)"

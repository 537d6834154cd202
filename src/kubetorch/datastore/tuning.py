"""Times and limits of the data store: scans, trees, blobs and their transfer."""

from __future__ import annotations

from kubetorch.lib.tuning import Table


class Timing(Table):
    """Times of the data store; all in seconds."""

    # ------------------------------------------------------------------------------------ scans
    #: The coarsest clock of a file system is FAT's, of 2 s; most have 1 to 10 ms.
    racy_file_seconds: float = 2.0
    #: A listing is removed after so long without use.
    unused_listing_seconds: float = 30 * 24 * 3600.0

    # ------------------------------------------------------------------------------------ blobs
    #: After so long, a temporary file counts as left by a process that died.
    abandoned_file_seconds: float = 3600.0


class Limits(Table):
    """Bytes and counts that the data store takes at most."""

    # ------------------------------------------------------------------------------------ trees
    #: Entries of a tree.
    tree_entries: int = 100_000
    #: All files of a tree.
    tree_files_bytes: int = 512 * 1024**2
    #: The tree itself, encoded.
    tree_encoded_bytes: int = 16 * 1024**2

    # ------------------------------------------------------------------------------------ scans
    #: From here on a scan warns: the first deploy uploads all of it.
    project_warning_bytes: int = 50 * 1024 * 1024
    #: Links that a warning names.
    named_links: int = 10
    #: Attempts to read a file that changes meanwhile.
    read_attempts: int = 3
    #: From here on more than one thread pays off for the hash of a file that is read in pieces.
    scan_parallel_hash_bytes: int = 16 * 1024 * 1024
    #: Copies that stay in memory; larger spools move to an unnamed temporary file.
    spool_memory_bytes: int = 16 * 1024 * 1024

    # ------------------------------------------------------------------------------------ blobs
    #: From here on more than one thread pays off for the hash of bytes in memory.
    blob_parallel_hash_bytes: int = 8 * 1024 * 1024

    # --------------------------------------------------------------------------------- transfer
    #: One stream of blobs, decompressed.
    stream_bytes: int = 64 * 1024**3
    #: Blobs of one stream.
    stream_blobs: int = 1_000_000
    #: A stream whose decompression needs more memory is refused (level 1 needs 512 KiB).
    stream_window_bytes: int = 8 * 1024**2

    # ------------------------------------------------------------------------------------ slots
    #: Slots that stay: the slot that serves, and a slot for the next generation.
    retained_slots: int = 2

    def __post_init__(self) -> None:
        assert self.project_warning_bytes < self.tree_files_bytes, "a warning comes before an error"
        assert self.tree_entries <= self.stream_blobs, "one stream can have all files of a tree"
        assert self.tree_files_bytes <= self.stream_bytes, "one stream can have all files of a tree"


TIMING = Timing()
LIMITS = Limits()

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
    #: Until then a get may not have locked the folder into which it fetches.
    young_stage_seconds: float = 5.0
    #: The lock of a node's trees is held for as long as it takes to compare some names.
    node_lock_seconds: float = 10.0

    # ---------------------------------------------------------------------------------- buckets
    #: A bucket has it to take a connection.
    bucket_connect_seconds: float = 10.0
    #: A request for a part of an object, or for a page of names, has it to end.
    bucket_request_seconds: float = 120.0
    #: A request that fails as if a second attempt may help is sent again for so long.
    bucket_retry_seconds: float = 30.0
    #: The first pause before that, which doubles.
    bucket_retry_pause_seconds: float = 0.1
    #: Chunks that were stored stay so long at least without being named anew.
    bucket_renewal_seconds: float = 120.0
    #: A request to the bucket of the store has it to end: a chunk of 8 MiB at 2 Mbit/s.
    store_request_seconds: float = 30.0
    #: A request to it that fails is sent again for so long: a put, and who waits for it, wait.
    store_retry_seconds: float = 20.0
    #: It is remembered for so long when a blob of the bucket was needed: longer than it is young.
    remembered_use_seconds: float = 3600.0
    #: Between two reports of progress.
    bucket_report_seconds: float = 0.2

    # ------------------------------------------------------------------------------- transports
    #: A getter has it to connect with a putter, which waits for it.
    transport_connect_seconds: float = 3.0
    #: A getter has it to send its greeting, which it does at once.
    greeting_seconds: float = 1.0
    #: A putter waits for its getters to come and to have their memory: they hear of the end of the
    #: window within a fraction of a second, and ask the store for the version.
    rendezvous_seconds: float = 15.0
    #: A transport that moves nothing for so long is given up: a frame takes 20 s at 3 MB/s, and a
    #: communicator of many members some seconds to form.
    transport_silence_seconds: float = 20.0
    #: Pause between two looks whether the other side is still there.
    transport_poll_seconds: float = 0.05
    #: Pause between two looks whether a broadcast has ended.
    work_poll_seconds: float = 0.0005


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

    #: Files that are synced to disk at a time: 1 GB in 350 of them takes 0.8 s instead of 2.9 s.
    sync_threads: int = 8

    # ----------------------------------------------------------------------------------- chunks
    #: Chunks of a file: small enough that a change moves little, and large enough that the store
    #: has few files. The borders of chunks move if one of these changes.
    smallest_chunk_bytes: int = 1024**2
    #: Half of a chunk is cut off before this size is reached, half after it.
    usual_chunk_bytes: int = 2 * 1024**2
    #: Both ends have a chunk in memory as a whole.
    largest_chunk_bytes: int = 8 * 1024**2
    #: A file is cut in blocks of so many bytes, each in memory once.
    cut_block_bytes: int = 16 * 1024**2
    #: Files up to this size share blobs, of about so many bytes each: a blob costs the store and
    #: the network more than such a file.
    packed_file_bytes: int = 64 * 1024
    #: Such a shared blob: a get of one small file fetches all of it.
    pack_bytes: int = 1024**2

    # -------------------------------------------------------------------------------- manifests
    #: Entries of a manifest: the controller has one of them in memory.
    manifest_entries: int = 500_000
    #: Chunks of all its files and packs: more than a manifest has room for whose chunks have
    #: digests. Each takes some 200 bytes in memory.
    manifest_chunks: int = 600_000
    #: A manifest, encoded: chunks of 1 MiB of a file of 450 GiB.
    manifest_encoded_bytes: int = 32 * 1024**2
    #: Levels of a path: each is a step for who looks for the folders of a path.
    manifest_path_levels: int = 128
    #: All files of a manifest, holes included: no file system has larger files.
    manifest_files_bytes: int = 2**60
    #: A chunk of a file: a reader may have it in memory.
    chunk_bytes: int = 1024**3

    # ------------------------------------------------------------------------------------- keys
    #: A key; as a path it is then far from the 4096 bytes that systems allow.
    key_bytes: int = 1024
    #: A name between two `/`: file systems allow no longer one.
    key_name_bytes: int = 255

    # ----------------------------------------------------------------------------- publications
    #: Versions of keys that a pod got and offers to later getters.
    offered_versions: int = 16
    #: Publications of a pod that its agent has in memory.
    remembered_publications: int = 8

    # --------------------------------------------------------------------------------- transfer
    #: One stream of blobs, decompressed.
    stream_bytes: int = 64 * 1024**3
    #: Blobs of one stream.
    stream_blobs: int = 1_000_000
    #: A stream whose decompression needs more memory is refused (level 1 needs 512 KiB).
    stream_window_bytes: int = 8 * 1024**2

    # ---------------------------------------------------------------------------------- buckets
    #: Requests to a bucket at once; their parts of objects are in memory.
    bucket_streams: int = 6
    #: A part of an object that one request fetches.
    bucket_part_bytes: int = 8 * 1024**2
    #: A part of an object that one request writes, unless it had too many of them. S3 and Google
    #: take no smaller parts.
    bucket_written_part_bytes: int = 5 * 1024**2
    #: Parts in which an object is written: S3 and Google take no more.
    bucket_parts_of_object: int = 10_000
    #: Parts of one object that are written at once.
    bucket_writes_of_object: int = 4
    #: Attempts of a request, with a server that answers 5xx or not at all.
    bucket_attempts: int = 4
    #: Attempts of a request to the bucket of the store: its time ends them.
    store_attempts: int = 100
    #: Attempts to pull objects that change meanwhile.
    bucket_pulls: int = 3
    #: Characters of an answer of a bucket that an error has.
    bucket_answer_characters: int = 300
    #: The list of the files of a repository of Hugging Face.
    hub_list_bytes: int = 64 * 1024**2
    #: Memory of a program of the controller that talks to a bucket; some 131 MiB are usual.
    bucket_memory_bytes: int = 768 * 1024**2

    # ---------------------------------------------------------------------------------- tensors
    #: A chunk of tensors. Smaller chunks cost a request and a file each, larger chunks are sent
    #: whole for one changed byte where the receiver has no version before.
    tensor_chunk_bytes: int = 4 * 1024**2
    #: All tensors of a key: a manifest has no room for the names of more chunks.
    tensors_bytes: int = 2 * 1024**4
    #: The header of a file of safetensors: 150,000 tensors. It takes ten times as much in memory.
    tensor_header_bytes: int = 16 * 1024**2
    #: Chunks that are hashed or read at a time: as many as a small machine has cores.
    tensor_threads: int = 4
    #: Chunks of the weights that this user put or got last; the oldest go first.
    chunk_cache_bytes: int = 8 * 1024**3

    # ------------------------------------------------------------------------------- transports
    #: Bytes of tensors that one broadcast moves.
    frame_bytes: int = 64 * 1024**2
    #: Such broadcasts at a time; as many frames of small tensors are in memory twice.
    frames_under_way: int = 4
    #: Communicators that a process keeps: each takes memory of its GPU.
    process_groups: int = 4
    #: A line between a putter and a getter; the largest describes the memory of a GPU.
    rendezvous_message_bytes: int = 64 * 1024

    # ------------------------------------------------------------------------------------ slots
    #: Slots that stay: the slot that serves, and a slot for the next generation.
    retained_slots: int = 2

    def __post_init__(self) -> None:
        assert 2 * self.largest_chunk_bytes <= self.cut_block_bytes, "a block has a whole chunk"
        assert self.project_warning_bytes < self.tree_files_bytes, "a warning comes before an error"
        assert self.tree_entries <= self.stream_blobs, "one stream can have all files of a tree"
        assert self.chunk_bytes <= self.stream_bytes, "one stream can have a chunk"
        assert self.tree_files_bytes <= self.stream_bytes, "one stream can have all files of a tree"


TIMING = Timing()
LIMITS = Limits()

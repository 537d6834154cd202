"""What a pod publishes and offers, and for how long."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kubetorch.datastore import publications
from kubetorch.datastore.blobs import digest_of
from kubetorch.datastore.publications import Arrival, Publications
from kubetorch.datastore.snapshots import Extent
from kubetorch.datastore.tuning import LIMITS
from kubetorch.errors import DataStoreError


def test_the_oldest_offers_end_and_what_a_pod_published_itself_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    blob, folder = digest_of(b"x"), tmp_path / "publications"
    extents = {blob: (Extent(str(tmp_path / "file"), 0, 1),)}
    versions = [digest_of(b"%d" % number) for number in range(LIMITS.offered_versions + 2)]
    publications.write(folder, digest_of(b"mine"), extents)
    for number, version in enumerate(versions):
        publications.offer(folder, version, extents)
        os.utime(folder / "offers" / version, (number, number))
    publications.offer(folder, versions[2], extents)  # it is the newest one now
    publications.offer(folder, digest_of(b"last"), extents)
    pod = Publications(folder)
    for version in [digest_of(b"mine"), versions[2], *versions[4:], digest_of(b"last")]:
        pod.check(version, [blob])
    for version in [*versions[:2], versions[3]]:
        with pytest.raises(DataStoreError, match=f"does not publish {version} any more"):
            pod.check(version, [blob])


class Getting:
    """A program that gets a version of two blobs into files."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "publications"
        self.version = digest_of(b"version")
        self.blobs = {digest_of(data): data for data in (b"one", b"two")}
        self.first, self.second = self.blobs
        self.extents = {
            digest: (Extent(str(root / data.decode()), 0, 3),)
            for digest, data in self.blobs.items()
        }
        self.paths = {digest: root / data.decode() for digest, data in self.blobs.items()}

    def begin(self) -> Arrival | None:
        return Arrival.begin(self.folder, self.version, self.extents, list(self.blobs))


def test_what_a_program_is_getting_is_there_as_far_as_it_has_come(tmp_path: Path) -> None:
    getting = Getting(tmp_path)
    arrival = getting.begin()
    assert arrival is not None
    pod = Publications(getting.folder)
    both = [getting.first, getting.second]
    pod.check(getting.version, both)
    assert pod.arrived(getting.version, both) == []
    getting.paths[getting.second].write_bytes(b"two")
    arrival.add(getting.second)
    assert pod.arrived(getting.version, both) == [getting.second]
    assert b"two" in b"".join(pod.packed(getting.version, [getting.second]))
    # Then all of it lies elsewhere.
    for digest, data in getting.blobs.items():
        getting.paths[digest].unlink(missing_ok=True)
        (tmp_path / f"final-{data.decode()}").write_bytes(data)
    extents = {
        digest: (Extent(str(tmp_path / f"final-{data.decode()}"), 0, 3),)
        for digest, data in getting.blobs.items()
    }
    publications.offer(getting.folder, getting.version, extents)
    arrival.close()
    assert pod.arrived(getting.version, both) == both
    assert b"one" in b"".join(pod.packed(getting.version, both))


def test_of_two_programs_that_get_the_same_the_first_one_offers_it(tmp_path: Path) -> None:
    getting = Getting(tmp_path)
    first = getting.begin()
    assert first is not None
    assert getting.begin() is None
    first.close()
    second = getting.begin()
    assert second is not None
    second.close()


def test_what_a_program_that_died_was_getting_comes_no_more(tmp_path: Path) -> None:
    getting = Getting(tmp_path)
    arrival = getting.begin()
    assert arrival is not None
    pod = Publications(getting.folder)
    assert pod.arrived(getting.version, [getting.first]) == []
    arrival._lock.close()  # as the system does with the files of a process that was killed
    with pytest.raises(DataStoreError, match="does not publish"):
        pod.arrived(getting.version, [getting.first])
    again = getting.begin()
    assert again is not None
    assert pod.arrived(getting.version, [getting.first]) == []
    again.close()

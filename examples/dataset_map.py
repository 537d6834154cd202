"""A folder of files in the data store, and a map whose pods have it before their first item."""

import tempfile
from pathlib import Path

import kubetorch as kt

KEY = "datasets/plays"


def count(name: str) -> int:
    """Count the words of a file of the dataset."""
    return len(Path("/plays", name).read_text().split())


def main(folder: Path) -> None:
    names = [f"{number}.txt" for number in range(40)]
    for number, name in enumerate(names):
        (folder / name).write_text("to be " * number)
    kt.put(KEY, src=folder, contents=True)

    remote = kt.fn(count).to(kt.Compute(cpus="0.1", replicas=2, data={"/plays": KEY}))
    print("words:", sum(remote.map(names)))

    (folder / "39.txt").write_text("not to be")
    kt.put(KEY, src=folder, contents=True)  # what changed is sent, and the pods have the old one
    print("versions:", remote.refresh_data())
    print("words:", sum(remote.map(names)))
    remote.teardown()
    kt.rm(KEY, recursive=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))

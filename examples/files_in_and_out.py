"""Files into pods, with the image or later; results back, or into a volume."""

import json
import tempfile
from pathlib import Path

import kubetorch as kt


def count(name: str) -> bytes:
    """Count the words of a file, for a volume and for the caller."""
    words = Path("texts", name).read_text().split()
    counts = {word: words.count(word) for word in sorted(set(words))}
    result = json.dumps(counts).encode()
    Path("/counts", f"{name}.json").write_bytes(result)
    return result


def kept() -> list[str]:
    return sorted(path.name for path in Path("/counts").iterdir())


def main(here: Path) -> None:
    texts = here / "texts"
    texts.mkdir()
    (texts / "hamlet.txt").write_text("to be or not to be")

    counts = kt.Volume("counts", size="1Gi", mount_path="/counts")
    image = kt.Image().copy(texts, "texts")
    compute = kt.Compute(cpus="0.1", image=image, volumes=[counts])
    remote = kt.fn(count).to(compute)

    (here / "hamlet.json").write_bytes(remote("hamlet.txt"))
    print("on this machine:", (here / "hamlet.json").read_text())

    (texts / "rose.txt").write_text("a rose is a rose")
    remote.compute.rsync(texts / "rose.txt", "texts/")  # into the pods that run
    print("of the second file:", remote("rose.txt").decode())
    remote.teardown()

    reader = kt.fn(kept).to(kt.Compute(cpus="0.1", volumes=[counts]))
    print("in the volume:", reader())
    reader.teardown()
    counts.delete()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))

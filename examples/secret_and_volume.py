"""A secret and a volume that two services use; the volume outlives both."""

import os
from pathlib import Path

import kubetorch as kt


def prepare(name: str) -> str:
    """Fetch a dataset, which takes the token, into the volume."""
    token = os.environ["DATASET_TOKEN"]
    folder = Path("/datasets", name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.txt").write_text("1\n2\n3\n")
    return f"fetched {name} with a token of {len(token)} characters"


def total(name: str) -> int:
    """Read the dataset from the volume; the same credentials are there as files."""
    credentials = Path("~/.datasets/credentials").expanduser()
    if not credentials.is_file():
        raise RuntimeError("no credentials")
    return sum(map(int, Path("/datasets", name, "rows.txt").read_text().split()))


def main() -> None:
    # Stands for `export DATASET_TOKEN=...` in the shell. A secret's values never travel with code.
    os.environ.setdefault("DATASET_TOKEN", os.urandom(8).hex())
    token = kt.secret("dataset-token", env_vars=["DATASET_TOKEN"], override=True)
    values = {"credentials": os.environ["DATASET_TOKEN"]}
    files = kt.Secret("dataset-files", values=values, path="~/.datasets", override=True)
    print(token)
    datasets = kt.Volume("datasets", size="1Gi", mount_path="/datasets")

    writer = kt.fn(prepare).to(kt.Compute(cpus="0.1", secrets=[token], volumes=[datasets]))
    reader = kt.fn(total).to(kt.Compute(cpus="0.1", secrets=[files], volumes=[datasets]))
    print(writer("numbers"))
    print("total:", reader("numbers"))

    writer.teardown()
    reader.teardown()
    print("the volume is still there:", datasets.exists())
    datasets.delete()


if __name__ == "__main__":
    main()

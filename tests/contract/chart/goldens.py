"""What the chart becomes with the values beside this file: `python -m contract.chart.goldens`.

Run in `tests/`, after a change of the chart that is meant.
"""

from pathlib import Path

import yaml

from kubetorch.install.chart import Chart

FOLDER = Path(__file__).parent
VALUES = sorted((FOLDER / "values").glob("*.yaml"))
NAMESPACE = "kubetorch"


def render(file: Path) -> str:
    """The objects for a file of values, without the kind's long schema."""
    objects = Chart().render(yaml.safe_load(file.read_text()), namespace=NAMESPACE)
    short = [manifest for manifest in objects if manifest["kind"] != "CustomResourceDefinition"]
    return yaml.safe_dump_all(short, width=100)


if __name__ == "__main__":
    for path in VALUES:
        (FOLDER / "goldens" / path.name).write_text(render(path))

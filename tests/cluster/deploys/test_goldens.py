"""A real API server takes every golden: its schemas, and the admission of the operators."""

from pathlib import Path

import pytest
import yaml

# The kinds that are defined for them would be there for all tests beside them, those of doomed
# deploys among them, which expect that the cluster lacks some.
pytestmark = [pytest.mark.cluster, pytest.mark.alone]

GOLDENS = Path(__file__).parents[2] / "contract/manifests/goldens"
FILES = sorted(GOLDENS.iterdir())


@pytest.mark.parametrize("golden", FILES, ids=lambda path: path.stem)
def test_the_api_server_takes_the_golden(golden, kubectl, kinds):
    objects = list(yaml.safe_load_all(golden.read_text()))
    for manifest in objects:
        group = manifest["apiVersion"].rpartition("/")[0]
        name = f"{manifest['kind']}.{group}"
        if name not in kinds:
            pytest.skip(f"the cluster has no {name}")
        kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", manifests=[manifest])


def test_an_unknown_field_is_refused(kubectl, kinds):
    """So that a golden that is taken means something."""
    manifest = next(yaml.safe_load_all((GOLDENS / "deployment.yaml").read_text()))
    manifest["spec"]["template"]["spec"]["nodeSelektor"] = {"disk": "ssd"}
    with pytest.raises(AssertionError, match="nodeSelektor"):
        kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", manifests=[manifest])


def test_the_queue_of_the_goldens_can_be_made(kubectl, kinds):
    manifest = next(yaml.safe_load_all((GOLDENS / "deployment.yaml").read_text()))
    name = manifest["metadata"]["labels"]["kai.scheduler/queue"]
    share = {"quota": -1, "limit": -1, "overQuotaWeight": 1}
    queue = {
        "apiVersion": "scheduling.run.ai/v2",
        "kind": "Queue",
        "metadata": {"name": name},
        "spec": {"resources": {"cpu": share, "gpu": share, "memory": share}},
    }
    kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", manifests=[queue])

"""How JAX learns of the world that its process belongs to, with a package that stands for JAX."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kubetorch.pod.user_process import frameworks

CLUSTERS = """
class ClusterEnv:
    _cluster_types = []
    def __init_subclass__(cls):
        cls._cluster_types.append(cls)

class KubernetesCluster(ClusterEnv):
    name = "k8s"
"""


@pytest.fixture
def jax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the private modules."""
    private = tmp_path / "jax" / "_src"
    private.mkdir(parents=True)
    (tmp_path / "jax" / "__init__.py").write_text("from jax import distributed\n")
    (tmp_path / "jax" / "distributed.py").touch()
    (private / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    installed = [name for name in sys.modules if name.partition(".")[0] == "jax"]
    for name in installed:
        monkeypatch.delitem(sys.modules, name)
    yield private
    for name in [name for name in sys.modules if name.partition(".")[0] == "jax"]:
        del sys.modules[name]


@pytest.mark.parametrize("is_preloaded", [True, False])
def test_a_rank_is_the_first_cluster_that_jax_asks(jax, monkeypatch, is_preloaded):
    (jax / "clusters.py").write_text(CLUSTERS)
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "10.0.0.9:777")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "6")
    monkeypatch.setenv("JAX_PROCESS_ID", "3")
    if is_preloaded:
        importlib.import_module("jax")
    frameworks.install_jax_cluster()
    importlib.import_module("jax")

    our_cluster, kubernetes_cluster = sys.modules["jax._src.clusters"].ClusterEnv._cluster_types

    assert (our_cluster.name, kubernetes_cluster.name) == ("kubetorch", "k8s")
    assert our_cluster.is_env_present()
    assert our_cluster.get_coordinator_address(timeout_secs=5) == "10.0.0.9:777"
    assert (our_cluster.get_process_count(), our_cluster.get_process_id()) == (6, 3)


def test_a_jax_that_knows_no_clusters_is_imported_all_the_same(jax):
    frameworks.install_jax_cluster()

    assert importlib.import_module("jax").distributed is not None
    assert "jax._src.clusters" not in sys.modules

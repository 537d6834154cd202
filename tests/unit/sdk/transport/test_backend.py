"""Which backend is meant, as far as that needs nobody to be asked."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from kubetorch.sdk import backend
from kubetorch.sdk.transport.session import Choice, ClusterSettings


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("KUBECONFIG", "KT_API_URL", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    backend.choose_anew()
    yield
    backend.choose_anew()


def test_this_machine_is_taken_at_its_word(monkeypatch):
    monkeypatch.setenv("KT_BACKEND", "local")
    assert backend.choose().cluster is None
    assert backend.choose("/some/kubeconfig").cluster is None


def test_a_cluster_is_what_settings_say(monkeypatch):
    monkeypatch.setenv("KT_BACKEND", "kubernetes")
    monkeypatch.setenv("KUBECONFIG", "/a:/b")
    monkeypatch.setenv("KT_INSTALL_NAMESPACE", "tools")

    assert backend.choose() == Choice(ClusterSettings("/a:/b", "tools", None), "KUBECONFIG")
    cluster = ClusterSettings("/other", "tools", None)
    assert backend.choose("/other") == Choice(cluster, "kubeconfig_path")


def test_without_a_kubeconfig_nothing_for_clusters_is_loaded(monkeypatch):
    monkeypatch.setenv("KT_BACKEND", "auto")
    loaded = {
        name for name in sys.modules if name.startswith("kubetorch.sdk.transport.cluster_session")
    }

    assert backend.choose() == Choice(None, "there is no kubeconfig")
    assert loaded == {
        n for n in sys.modules if n.startswith("kubetorch.sdk.transport.cluster_session")
    }


def test_a_kubeconfig_of_a_compute_or_an_api_url_means_a_cluster(monkeypatch):
    monkeypatch.setenv("KT_BACKEND", "auto")
    assert backend.choose("/mine").cluster is not None
    monkeypatch.setenv("KUBECONFIG", "/listed")
    assert backend.choose().cluster is not None
    monkeypatch.setenv("KT_API_URL", "https://kt.example.com")
    cluster = backend.choose().cluster
    assert cluster is not None
    assert cluster.api_url == "https://kt.example.com"


def test_in_a_pod_the_kubeconfig_of_another_machine_means_nothing(monkeypatch):
    monkeypatch.setenv("KT_BACKEND", "kubernetes")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")

    cluster = backend.choose("/home/somebody/.kube/config").cluster
    assert cluster is not None
    assert cluster.kubeconfig is None


def test_a_block_on_this_machine_is_one_of_its_own_thread_alone(monkeypatch):
    monkeypatch.setenv("KT_BACKEND", "kubernetes")
    with backend.on_this_machine():
        assert backend.choose("/mine").cluster is None
        with ThreadPoolExecutor() as pool:
            assert pool.submit(backend.choose).result().cluster is not None
    assert backend.choose().cluster is not None

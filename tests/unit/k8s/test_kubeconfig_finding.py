"""Which cluster is meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from kubetorch.errors import KubernetesCredentialsError
from kubetorch.k8s import kubeconfig

TEXT = """
current-context: {name}
contexts: [{{name: {name}, context: {{cluster: c}}}}, {{name: other, context: {{cluster: c}}}}]
clusters: [{{name: c, cluster: {{server: "https://{name}"}}}}]
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def write(path: Path, name: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(TEXT.format(name=name))
    return path


def test_a_path_stands_before_the_variable_and_that_before_the_home(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(home / ".kube/config", "home")
    assert kubeconfig.find().context == "home"
    monkeypatch.setenv("KUBECONFIG", f"{home}/gone:{write(home / 'listed', 'listed')}")
    assert kubeconfig.find().context == "listed"
    write(home / "named", "named")
    assert kubeconfig.find("~/named").context == "named"
    assert kubeconfig.find("~/named", context="other").context == "other"


def test_without_any_the_hint_says_what_to_do(home: Path) -> None:
    with pytest.raises(KubernetesCredentialsError, match=r"\.kube/config does not exist") as caught:
        kubeconfig.find()
    assert "KT_BACKEND=local" in str(caught.value.hint)


def test_a_pod_is_its_service_account(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    assert kubeconfig.in_cluster(home) is None, "no token is mounted"
    (home / "token").write_text("t")
    (home / "namespace").write_text("team\n")
    access = kubeconfig.in_cluster(home)
    assert access is not None
    assert access.cluster.server == "https://[fd00::1]:443"
    assert access.cluster.authority.path == home / "ca.crt"
    assert access.user.token_file == home / "token"
    assert access.namespace == "team"
    assert access.context is None

from __future__ import annotations

from pathlib import Path

from kubetorch.config import namespaces


def test_a_pod_knows_its_own_namespace(tmp_path: Path) -> None:
    file = tmp_path / "namespace"
    assert namespaces.of_pod(file) is None
    file.write_text("team-ml\n")
    assert namespaces.of_pod(file) == "team-ml"
    file.write_text("")
    assert namespaces.of_pod(file) is None

"""Who a pod is that no variable tells."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from kubetorch.pod import identity


def token(claims: object) -> str:
    payload = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()
    return f"head.{payload}.signature"


def test_a_token_names_the_pod_that_it_is_bound_to(tmp_path: Path) -> None:
    file = tmp_path / "token"
    name = "service-00001-deployment-6d8f-" + "x" * 50
    file.write_text(token({"kubernetes.io": {"pod": {"name": name, "uid": "u"}}}))
    assert identity.name_in(str(file)) == name


def test_a_token_that_is_none_names_no_pod(tmp_path: Path) -> None:
    for text in ("", "a", "a.b.c", token({}), token([]), token({"kubernetes.io": None})):
        file = tmp_path / "token"
        file.write_text(text)
        assert identity.name_in(str(file)) == ""
    assert identity.name_in(str(tmp_path / "absent")) == ""


def test_what_the_variables_say_stands() -> None:
    environ = {
        "KT_POD_NAME": "web-1",
        "KT_POD_HOST": "10.0.0.7",
        "KT_POD_CONTROLLER_URL": "http://c",
    }
    environ["KT_POD_WORKING_DIR"] = "/srv"
    assert identity.complete(environ) == environ
    assert identity.complete({"KT_POD_NAME": "web-1"}) == {"KT_POD_NAME": "web-1"}


def test_a_pod_works_where_its_container_began_when_it_is_not_told_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    environ = {
        "KT_POD_NAME": "web-1",
        "KT_POD_HOST": "10.0.0.7",
        "KT_POD_CONTROLLER_URL": "http://c",
    }
    assert identity.complete(environ) == {**environ, "KT_POD_WORKING_DIR": str(tmp_path)}

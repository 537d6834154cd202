"""What credential plugins are told, and what they print."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from kubetorch.errors import KubernetesCredentialsError
from kubetorch.k8s import credentials
from kubetorch.k8s.kubeconfig import Cluster, Pem, Plugin

V1 = "client.authentication.k8s.io/v1"
PLUGIN = Plugin("login", api_version=V1)
CLUSTER = Cluster(
    "https://a", authority=Pem(data=b"CA"), tls_name="b", proxy="http://p", config={"x": 1}
)


def printed(**changes: Any) -> bytes:
    document = {"apiVersion": V1, "kind": "ExecCredential", "status": {"token": "t"}}
    return json.dumps({**document, **changes}).encode()


def test_a_plugin_is_told_about_the_cluster_only_if_it_wants_to_be() -> None:
    assert credentials.exec_info(PLUGIN, CLUSTER, interactive=False) == {
        "apiVersion": V1,
        "kind": "ExecCredential",
        "spec": {"interactive": False},
    }
    wanting = Plugin("login", api_version=V1, wants_cluster=True)
    assert credentials.exec_info(wanting, CLUSTER, interactive=True)["spec"] == {
        "interactive": True,
        "cluster": {
            "server": "https://a",
            "tls-server-name": "b",
            "certificate-authority-data": base64.b64encode(b"CA").decode(),
            "proxy-url": "http://p",
            "config": {"x": 1},
        },
    }


def test_a_token_or_a_certificate_is_taken() -> None:
    assert credentials.parse_credential(PLUGIN, printed()) == credentials.Credential("t")
    status = {
        "clientCertificateData": "C",
        "clientKeyData": "K",
        "expirationTimestamp": "1970-01-01T00:01:00Z",
    }
    credential = credentials.parse_credential(PLUGIN, printed(status=status))
    assert credential == credentials.Credential(None, Pem(data=b"C"), Pem(data=b"K"), 60.0)


@pytest.mark.parametrize("fraction", ["", ".5", ".123", ".123456789"])
def test_the_time_of_expiry_may_have_a_fraction_of_any_length(fraction: str) -> None:
    status = {"token": "t", "expirationTimestamp": f"1970-01-01T00:01:00{fraction}Z"}
    expires = credentials.parse_credential(PLUGIN, printed(status=status)).expires
    assert expires is not None
    assert int(expires) == 60


@pytest.mark.parametrize(
    "output",
    [
        b"",
        b"[]",
        b"null",
        printed(kind="Secret"),
        printed(apiVersion="client.authentication.k8s.io/v1beta1"),
        printed(status=None),
        printed(status={}),
        printed(status={"clientCertificateData": "C"}),
        printed(status={"token": "t", "expirationTimestamp": "tomorrow"}),
        printed(status={"token": ["t"]}),
    ],
)
def test_anything_else_is_refused(output: bytes) -> None:
    with pytest.raises(KubernetesCredentialsError, match="login printed no credential"):
        credentials.parse_credential(PLUGIN, output)

"""TLS settings from certificates and keys."""

from __future__ import annotations

import ssl
import tempfile
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from kubetorch.errors import KubernetesCredentialsError
from kubetorch.k8s import credentials
from kubetorch.k8s.kubeconfig import ABSENT, Cluster, Pem

CA = trustme.CA()
CA_PEM = CA.cert_pem.bytes()
ISSUED = CA.issue_cert("client.example")
CERTIFICATE = ISSUED.cert_chain_pems[0].bytes()
KEY = ISSUED.private_key_pem.bytes()
ENCRYPTED = serialization.load_pem_private_key(KEY, None).private_bytes(
    serialization.Encoding.PEM,
    serialization.PrivateFormat.PKCS8,
    serialization.BestAvailableEncryption(b"nobody knows it"),
)


def test_a_named_authority_is_the_only_one_that_is_trusted() -> None:
    context = credentials.tls_context(
        Cluster("https://a", authority=Pem(data=CA_PEM)), ABSENT, ABSENT
    )
    assert len(context.get_ca_certs()) == 1
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2


def test_an_insecure_cluster_is_not_checked() -> None:
    context = credentials.tls_context(Cluster("https://a", is_insecure=True), ABSENT, ABSENT)
    assert context.verify_mode is ssl.CERT_NONE


def test_a_client_certificate_leaves_no_file_behind(tmp_path: Path) -> None:
    (tmp_path / "credentials.crt").write_bytes(CERTIFICATE)
    cluster = Cluster("https://a", authority=Pem(data=CA_PEM))
    before = _temporary_files()
    credentials.tls_context(cluster, Pem(path=tmp_path / "credentials.crt"), Pem(data=KEY))
    assert _temporary_files() == before


def _temporary_files() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).iterdir()}


@pytest.mark.parametrize(
    ("certificate", "key"),
    [
        (Pem(data=b"nonsense"), Pem(data=KEY)),
        (Pem(data=CERTIFICATE), Pem(data=CA.issue_cert("x").private_key_pem.bytes())),
        (Pem(data=CERTIFICATE), Pem(data=ENCRYPTED)),
        (Pem(path=Path("/nowhere/credentials.crt")), Pem(data=KEY)),
    ],
)
def test_what_cannot_be_used_is_named(certificate: Pem, key: Pem) -> None:
    cluster = Cluster("https://a", authority=Pem(data=CA_PEM))
    with pytest.raises(KubernetesCredentialsError, match="client certificate"):
        credentials.tls_context(cluster, certificate, key)


def test_a_machine_without_a_place_for_the_file_of_openssl_is_an_error_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(KubernetesCredentialsError, match="No such file") as caught:
        credentials.tls_context(Cluster("https://a"), Pem(data=CERTIFICATE), Pem(data=KEY))
    assert "TMPDIR" in str(caught.value.hint)


def test_an_authority_that_is_none_is_named() -> None:
    with pytest.raises(KubernetesCredentialsError, match="certificate authority /nowhere"):
        credentials.tls_context(
            Cluster("https://a", authority=Pem(path=Path("/nowhere"))), ABSENT, ABSENT
        )
    with pytest.raises(KubernetesCredentialsError, match="certificate authority cannot be used"):
        credentials.tls_context(Cluster("https://a", authority=Pem(data=b"x")), ABSENT, ABSENT)


def test_the_signature_changes_with_the_content(tmp_path: Path) -> None:
    file = tmp_path / "ca.crt"
    assert credentials.pem_signature(Pem(path=file)) == (None,)
    file.write_bytes(b"one")
    first = credentials.pem_signature(Pem(path=file), Pem(data=b"d"))
    assert credentials.pem_signature(Pem(path=file), Pem(data=b"d")) == first
    file.write_bytes(b"other")
    assert credentials.pem_signature(Pem(path=file), Pem(data=b"d")) != first
    assert credentials.pem_signature(Pem(path=file), Pem(data=b"e")) != first

"""TLS settings for a cluster, from files or inline data; the standard library's `ssl` only.

The context is made by hand, because `ssl.create_default_context` refuses, from Python 3.13 on,
certificate authorities without extensions that clusters in use do not have.
"""

from __future__ import annotations

import os
import ssl
import tempfile
from pathlib import Path

from kubetorch.errors import KubernetesCredentialsError
from kubetorch.k8s.access import Cluster, Pem


def signature(*materials: Pem) -> tuple[object, ...]:
    """Changes when the content of one of these does."""
    return tuple(_state(pem) for pem in materials)


def _state(pem: Pem) -> object:
    if pem.data is not None or pem.path is None:
        return pem.data
    try:
        found = pem.path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def context(cluster: Cluster, certificate: Pem, key: Pem) -> ssl.SSLContext:
    """What to trust and what to show.

    Args:
        cluster: Says who signs its certificate.
        certificate: The client's, with its chain.
        key: Of that certificate.

    Raises:
        KubernetesCredentialsError: A file is missing, or something is no certificate or key.
    """
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.set_alpn_protocols(["http/1.1"])
    if cluster.is_insecure:
        made.check_hostname = False
        made.verify_mode = ssl.CERT_NONE
    elif cluster.authority.is_given:
        _trust(made, cluster.authority)
    else:
        made.load_default_certs()
    if certificate.is_given:
        _show(made, certificate, key)
    return made


def _trust(made: ssl.SSLContext, authority: Pem) -> None:
    text = _read(authority, "certificate authority").decode("ascii", errors="replace")
    try:
        made.load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError) as error:
        raise _wrong("certificate authority", authority, error) from error


def _show(made: ssl.SSLContext, certificate: Pem, key: Pem) -> None:
    chain = _read(certificate, "client certificate") + b"\n" + _read(key, "client key")
    # The library reads files only; this one is the user's alone, and gone at once.
    descriptor, name = tempfile.mkstemp(prefix="kt-", suffix=".pem")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(chain)
        # An encrypted key is refused; without the password OpenSSL would ask on the terminal.
        made.load_cert_chain(name, password="")
    except (ssl.SSLError, ValueError) as error:
        raise _wrong("client certificate or key", certificate, error) from error
    finally:
        Path(name).unlink()


def _read(pem: Pem, what: str) -> bytes:
    if pem.data is not None or pem.path is None:
        return pem.data or b""
    try:
        return pem.path.read_bytes()
    except OSError as error:
        raise KubernetesCredentialsError(
            f"the {what} {pem.path} cannot be read: {error.strerror}",
            hint="correct the path in the kubeconfig",
        ) from error


def _wrong(what: str, pem: Pem, error: Exception) -> KubernetesCredentialsError:
    where = f" {pem.path}" if pem.data is None else ""
    return KubernetesCredentialsError(
        f"the {what}{where} cannot be used: {error}",
        hint="it should be unencrypted PEM, with the certificate and the key belonging together",
    )

"""What a controller reads from its environment, and from the Secret of its installation."""

from __future__ import annotations

import asyncio
import base64
from typing import cast

import pytest

from kubetorch.controller.cluster.service import Settings, installation_secret
from kubetorch.errors import ConfigError, KubernetesConflictError, KubernetesNotFoundError
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import Object, Ref

CHART = {"POD_NAME": "controller-0", "KT_RUNTIME_IMAGE": "runtime", "KT_DEFAULT_IMAGE": "python"}


def test_pods_find_the_controller_at_its_service_unless_an_address_is_given() -> None:
    assert Settings.read(CHART).runtime.controller_url == (
        "http://kubetorch-controller.kubetorch.svc.cluster.local:8080"
    )
    elsewhere = {**CHART, "KT_INSTALL_NAMESPACE": "ours"}
    assert "kubetorch-controller.ours." in Settings.read(elsewhere).runtime.controller_url
    environment = {**CHART, "KT_CONTROLLER_URL": "http://there:1"}
    assert Settings.read(environment).runtime.controller_url == "http://there:1"


@pytest.mark.parametrize("name", CHART)
def test_a_variable_that_is_missing_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is not set"):
        Settings.read({**CHART, name: ""})


def test_a_port_that_is_none_is_refused() -> None:
    assert Settings.read({**CHART, "KT_LISTEN_PORT": "81"}).port == 81
    with pytest.raises(ConfigError, match="KT_LISTEN_PORT is '8x'; it must be a number"):
        Settings.read({**CHART, "KT_LISTEN_PORT": "8x"})


def test_an_engine_that_is_none_is_refused() -> None:
    assert Settings.read(CHART).engine == "auto"
    assert Settings.read({**CHART, "KT_AUTOSCALING_ENGINE": "knative"}).engine == "knative"
    with pytest.raises(ConfigError, match="is 'keda'; it must be one of auto, kubetorch, knative"):
        Settings.read({**CHART, "KT_AUTOSCALING_ENGINE": "keda"})


def test_apps_have_hosts_of_their_own_only_below_an_ingress() -> None:
    environment = {**CHART, "KT_PER_SERVICE_HOSTS": "true", "KT_APP_HOSTS": "A.example, b.example"}
    assert not Settings.read(environment).hosts.are_per_service
    hosts = Settings.read({**environment, "KT_INGRESS_HOST": "KT.example"}).hosts
    assert hosts.are_per_service
    assert hosts.ingress == "kt.example"
    assert hosts.app_hosts[:2] == ("a.example", "b.example")
    assert not Settings.read({**CHART, "KT_INGRESS_HOST": "kt.example"}).hosts.are_per_service


@pytest.mark.parametrize("text", ["[]", '{"a": 1}', "a=b"])
def test_annotations_that_are_no_texts_are_refused(text: str) -> None:
    name = "KT_SERVICE_ACCOUNT_ANNOTATIONS"
    assert Settings.read({**CHART, name: '{"a": "b"}'}).account_annotations == {"a": "b"}
    assert Settings.read(CHART).account_annotations == {}
    with pytest.raises(ConfigError, match=f"{name} is .*it must be a JSON object of texts"):
        Settings.read({**CHART, name: text})


def test_blobs_have_the_room_that_is_said() -> None:
    assert Settings.read(CHART).blobs_quota is None
    assert Settings.read({**CHART, "KT_BLOBS_QUOTA": "2Gi"}).blobs_quota == 2 * 1024**3


class Secrets:
    """An API server with one Secret, or none; another controller may be faster to make it."""

    def __init__(
        self, stored_secret: Object | None = None, *, competing_secret: Object | None = None
    ) -> None:
        self.stored_secret, self._competing_secret = stored_secret, competing_secret

    async def get(self, ref: Ref) -> Object:
        if self.stored_secret is None:
            raise KubernetesNotFoundError("no such Secret")
        return self.stored_secret

    async def create(self, manifest: Object) -> Object:
        if self._competing_secret is not None:
            self.stored_secret = self._competing_secret
            raise KubernetesConflictError("it exists")
        self.stored_secret = manifest
        return manifest


def read(secrets: Secrets) -> bytes:
    return asyncio.run(installation_secret(cast("Client", secrets), "kubetorch"))


def secret(value: bytes) -> Object:
    return {"data": {"secret": base64.b64encode(value).decode()}}


def test_the_secret_of_an_installation_is_made_once() -> None:
    secrets = Secrets()
    secret_bytes = read(secrets)
    assert len(secret_bytes) == 32
    assert read(secrets) == secret_bytes
    assert read(Secrets()) != secret_bytes


def test_of_two_controllers_that_make_the_secret_one_is_faster() -> None:
    assert read(Secrets(competing_secret=secret(b"ab" * 32))) == b"\xab" * 32


@pytest.mark.parametrize(
    ("stored_secret", "message"),
    [
        ({}, "has no 'secret' that can be read"),
        (secret(b"no hexadecimal digits"), "has no 'secret' that can be read"),
        (secret(b"ab" * 31), "has 31 bytes; 32 are needed"),
    ],
)
def test_a_secret_that_is_none_is_refused(stored_secret: Object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(Secrets(stored_secret))

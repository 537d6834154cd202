"""What a controller reads from its environment."""

from __future__ import annotations

import pytest

from kubetorch.controller.cluster.service import Settings
from kubetorch.errors import ConfigError

CHART = {"POD_NAME": "controller-0", "KT_RUNTIME_IMAGE": "runtime", "KT_DEFAULT_IMAGE": "python"}


def test_pods_find_the_controller_at_its_service_unless_an_address_is_given() -> None:
    assert Settings.read(CHART).runtime.controller_url == (
        "http://kubetorch-controller.kubetorch.svc.cluster.local:8080"
    )
    elsewhere = {**CHART, "KT_INSTALL_NAMESPACE": "ours"}
    assert "kubetorch-controller.ours." in Settings.read(elsewhere).runtime.controller_url
    given = {**CHART, "KT_CONTROLLER_URL": "http://there:1"}
    assert Settings.read(given).runtime.controller_url == "http://there:1"


@pytest.mark.parametrize("name", CHART)
def test_a_variable_that_is_missing_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is not set"):
        Settings.read({**CHART, name: ""})

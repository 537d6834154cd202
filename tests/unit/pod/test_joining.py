import socket

import pytest

from kubetorch.errors import ConfigError
from kubetorch.pod import identity
from kubetorch.pod.identity import Options
from kubetorch.wire.podenv import PodEnv

CONTAINER_ENVIRON = {"POD_NAMESPACE": "team", "POD_IP": "10.0.0.7", "KT_POD_TOKEN": "secret"}


TRAIN = Options("train")


def pod(options: Options = TRAIN, **environ: str) -> PodEnv:
    return PodEnv.read(identity.environ_of(options, {**CONTAINER_ENVIRON, **environ}))


def test_what_a_container_says_of_itself_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pod_env = pod(Options("train", port=4000), KT_POD_ROOT="/here")
    assert pod_env == PodEnv(
        namespace="team",
        workload="train",
        pod=socket.gethostname(),
        host="10.0.0.7",
        port=4000,
        root="/here",
        working_dir=str(tmp_path),
        environments="/here/environments",
        backend="kubernetes",
        controller_url="http://kubetorch-controller.kubetorch.svc.cluster.local:8080",
        token="secret",
        listen="0.0.0.0",
        is_joined=True,
    )


def test_the_command_line_goes_first():
    environ = {"KT_SERVICE": "other", "KT_CONTROLLER_URL": "http://there:1", "POD_NAME": "train-7"}
    assert pod(Options(), **environ).workload == "other"
    pod_env = pod(Options("train", "http://here:2", "::"), **environ)
    assert (pod_env.workload, pod_env.controller_url, pod_env.listen) == (
        "train",
        "http://here:2",
        "::",
    )
    assert pod_env.pod == "train-7"
    assert pod(Options("train"), **environ).controller_url == "http://there:1"


def test_the_controller_is_where_it_is_installed():
    url = pod(KT_INSTALL_NAMESPACE="ml").controller_url
    assert url == "http://kubetorch-controller.ml.svc.cluster.local:8080"


def test_what_is_missing_is_named_with_the_next_step():
    with pytest.raises(ConfigError, match="--workload"):
        identity.environ_of(Options(), CONTAINER_ENVIRON)
    with pytest.raises(ConfigError, match=r"metadata\.namespace"):
        identity.environ_of(Options("train"), {"KT_POD_TOKEN": "secret"})
    with pytest.raises(ConfigError, match="kubetorch-pod-token"):
        identity.environ_of(Options("train"), {"POD_NAMESPACE": "team"})

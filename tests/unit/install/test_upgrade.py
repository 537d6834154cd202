"""What an upgrade keeps, and what it refuses to do unasked."""

import pytest

from kubetorch.errors import ConfigError, InstallError
from kubetorch.install import apply, values
from kubetorch.install.chart import Chart
from kubetorch.install.releases import Release

OURS = str(Chart().about["version"])
OLD, NEWER = "0.1.0", "999.0.0"
DIGEST = "sha256:" + "a" * 64
MIRROR = "mirror.example.com/kubetorch"


def release(version=OLD, **set_values):
    return Release("team", version, set_values)


def test_a_newer_version_is_not_replaced_by_an_older_one_unasked():
    with pytest.raises(
        InstallError, match=f"Kubetorch {NEWER} is installed in namespace team"
    ) as e:
        apply.check_version(Chart(), release(NEWER))
    assert f"pip install kubetorch=={NEWER}" in e.value.hint
    assert "--downgrade" in e.value.hint
    for former in (OLD, OURS):
        apply.check_version(Chart(), release(former))


@pytest.mark.parametrize(
    ("image", "set_values", "command"),
    [
        ({"repository": MIRROR, "tag": OLD}, {}, f"--image {MIRROR}:{OURS} "),
        ({"repository": MIRROR, "tag": f"v{OLD}-cuda"}, {}, f"--image {MIRROR}:v{OURS}-cuda "),
        ({"repository": MIRROR, "digest": DIGEST}, {}, f"--image {MIRROR}:{OURS} "),
        ({"tag": OLD}, {}, f"--image ghcr.io/kubetorch/kubetorch:{OURS} "),
        ({"tag": OLD}, {"replicas": 2}, f"--image ghcr.io/kubetorch/kubetorch:{OURS} "),
        ({"tag": OLD}, {"image": {"repository": MIRROR}}, f"--image {MIRROR}:{OURS} "),
        # A digest stands before a tag.
        ({"digest": DIGEST}, {"image": {"tag": OURS}}, "--image ghcr.io/kubetorch/kubetorch:"),
    ],
)
def test_the_image_of_another_version_does_not_stay_unasked(image, set_values, command):
    with pytest.raises(InstallError, match=f"was given to the installed {OLD}") as caught:
        apply.keep(Chart(), release(image=image), set_values)
    assert caught.value.hint.startswith("kt upgrade -n team --image ")
    assert command in caught.value.hint
    assert "--reset-values" in caught.value.hint


def test_an_image_of_pods_of_the_same_version_is_named_too():
    pods = {"repository": "mirror.example.com/pod", "tag": OLD}
    former = release(image={"repository": MIRROR, "tag": OLD}, podImage=pods)
    with pytest.raises(InstallError) as caught:
        apply.keep(Chart(), former, {})
    assert (
        f"--image {MIRROR}:{OURS} --pod-image mirror.example.com/pod:{OURS} " in caught.value.hint
    )


@pytest.mark.parametrize(
    ("version", "image", "set_values"),
    [
        (OURS, {"tag": OLD}, {}),
        (OLD, {}, {}),
        (OLD, {"repository": MIRROR}, {}),
        (OLD, {"repository": MIRROR, "tag": OURS}, {}),
        (OLD, {"tag": OLD}, {"image": values.parse(f"{MIRROR}:{OLD}")}),
        (OLD, {"digest": DIGEST}, {"image": values.parse(f"{MIRROR}:{OURS}")}),
        (OLD, {"tag": OLD}, {"image": {"tag": None}}),
    ],
)
def test_an_image_that_was_asked_for_is_taken(version, image, set_values):
    upgraded_values = apply.keep(Chart(), release(version, image=image), set_values)
    assert upgraded_values == values.layered({"image": image}, set_values)


def test_a_value_that_the_chart_knows_no_more_is_told_from_one_that_was_given_now():
    former = release(image={"tag": OURS}, logLevels="debug")
    with pytest.raises(ConfigError, match=f"given to the installed {OLD} cannot be used") as caught:
        apply.keep(Chart(), former, {"replica": 2})
    assert "logLevels is not a value of the chart" in caught.value.message
    assert "replica " not in caught.value.message
    assert "--reset-values" in caught.value.hint
    upgraded_values = apply.keep(Chart(), former, {"logLevels": None})
    assert Chart().values(upgraded_values)["logLevel"] == "info"


@pytest.mark.parametrize(
    "set_values",
    [{}, {"image": {"tag": "1"}}, {"image": {"digest": DIGEST, "tag": "1"}}],
)
def test_the_image_that_is_named_is_the_one_that_runs(set_values):
    objects = Chart().render(set_values, namespace="team")
    (deployment,) = (manifest for manifest in objects if manifest["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == Chart().image(set_values)

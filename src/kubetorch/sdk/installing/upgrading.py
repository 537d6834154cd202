"""What an upgrade keeps of the installation before it, and what it does not do unasked. Pure.

Values that were given before are kept. An image is the exception: its tag or digest is that of the
version before, which with the kind and the roles of another one is no version at all.
"""

from __future__ import annotations

from kubetorch.errors import ConfigError, InstallError
from kubetorch.sdk.installing import references, values
from kubetorch.sdk.installing.chart import Chart
from kubetorch.sdk.installing.releases import Release
from kubetorch.sdk.installing.values import Values
from kubetorch.wire import versions


def check_version(chart: Chart, former: Release) -> None:
    """Refuse to put an older version in the place of a newer one.

    Raises:
        InstallError: What is installed is newer than the chart.
    """
    ours = str(chart.about["version"])
    if versions.is_newer(former.version, ours):
        raise InstallError(
            f"Kubetorch {former.version} is installed in namespace {former.namespace}, and this "
            f"package is of the older version {ours}",
            hint=f"pip install kubetorch=={former.version}; kt upgrade --downgrade makes the "
            "controller and the kind older, for everybody",
        )


def keep(chart: Chart, former: Release, given: Values) -> Values:
    """Values over those that were given before.

    Args:
        chart: What is to be installed.
        former: What is installed.
        given: The values of this command.

    Raises:
        ConfigError: The chart knows a value no more that was given before.
        InstallError: The image would stay that of another version.
    """
    found = values.layered(former.values, given)
    now = set(chart.faults(given))
    if kept := [one for one in chart.faults(found) if one not in now]:
        raise ConfigError(
            f"values that were given to the installed {former.version} cannot be used by "
            f"{chart.about['version']}:\n  " + "\n  ".join(kept),
            hint=f"kt upgrade -n {former.namespace} --set KEY=null forgets one of them, "
            "--reset-values all values that were given before",
        )
    _check_image(chart, former, given)
    return found


def _check_image(chart: Chart, former: Release, given: Values) -> None:
    """Refuse to leave an installation of one version with the image of another."""
    if former.version == chart.about["version"]:
        return
    ours = str(chart.about["appVersion"])
    found = values.merged(chart.defaults, values.layered(former.values, given))["image"]
    decides = "digest" if found.get("digest") else "tag"
    if decides in (given.get("image") or {}) or found.get(decides) in (None, "", ours):
        return
    present = references.written(found, ours)
    raise InstallError(
        f"the image {present} was given to the installed {former.version}; Kubetorch {ours} needs "
        "its own",
        hint=f"kt upgrade -n {former.namespace} {_images(chart, former, given)} once that is "
        f"there, or --reset-values for the chart's own; --image {present} keeps the present one",
    )


def _images(chart: Chart, former: Release, given: Values) -> str:
    """The options that name the images of the new version where the old ones were."""
    ours = str(chart.about["appVersion"])
    found: list[str] = []
    for option, key in (("--image", "image"), ("--pod-image", "podImage")):
        image = {**chart.defaults[key], **(former.values.get(key) or {}), **(given.get(key) or {})}
        tag = str(image["tag"] or "")
        is_of_version = former.version in tag
        # An image for pods may be anything; one with Kubetorch's version in its tag is Kubetorch's.
        if key == "image" or (is_of_version and key not in given):
            new = tag.replace(former.version, ours) if is_of_version else ours
            found.append(f"{option} {image['repository']}:{new}")
    return " ".join(found)

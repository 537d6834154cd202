"""Whose an object is."""

import pytest

from kubetorch.errors import InstallError
from kubetorch.install import releases
from kubetorch.install.releases import Item, Release


def labelled_service(annotations=None, **labels):
    names = {"by": "app.kubernetes.io/managed-by", "of": "kubetorch.com/install-namespace"}
    metadata = {"name": "n", "labels": {names[key]: value for key, value in labels.items()}}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {**metadata, "annotations": annotations or {}},
    }


def test_an_object_is_ours_with_both_labels_only():
    assert releases.is_of(labelled_service(by="kubetorch", of="a"), "a")
    assert not releases.is_of(labelled_service(by="kubetorch", of="b"), "a")
    assert not releases.is_of(labelled_service(by="Helm", of="a"), "a")
    assert not releases.is_of(labelled_service(), "a")


def test_what_helm_made_is_left_to_helm():
    notes = {"meta.helm.sh/release-name": "kt", "meta.helm.sh/release-namespace": "ns"}
    with pytest.raises(InstallError, match="helm release kt") as raised:
        releases.check(labelled_service(notes, by="Helm", of="a"), "a", verb="uninstall")
    assert raised.value.hint == "use helm uninstall kt --namespace ns"
    for verb in ("install", "upgrade"):
        with pytest.raises(InstallError) as raised:
            releases.check(labelled_service(notes, by="Helm", of="a"), "a", verb=verb)
        assert "use helm upgrade kt CHART" in raised.value.hint


def test_what_another_installation_made_is_left_to_it():
    with pytest.raises(InstallError, match="belongs to the Kubetorch in namespace b"):
        releases.check(labelled_service(by="kubetorch", of="b"), "a", verb="install")


def test_what_nobody_has_marked_may_be_taken():
    releases.check(labelled_service(), "a", verb="install")


def test_an_item_of_another_version_is_the_same_object():
    release = Release("a", "1", items=(Item("policy/v1", "PodDisruptionBudget", "a", "n"),))
    former = [
        Item("policy/v1beta1", "PodDisruptionBudget", "a", "n"),
        Item("v1", "Service", "a", "n"),
    ]
    assert release.without(former) == [former[1]]
    assert release.with_former(former).items == (*release.items, former[1])

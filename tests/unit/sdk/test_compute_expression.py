"""What a compute prints makes it again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kubetorch as kt
from kubetorch.specs.autoscaling import AutoscalingSpec
from kubetorch.specs.compute import ComputeSpec, Toleration
from kubetorch.specs.distribution import DistributionSpec
from kubetorch.specs.endpoint import Endpoint
from kubetorch.specs.image import ImageSpec
from kubetorch.specs.secret import SecretRef
from kubetorch.specs.volume import VolumeSpec
from unit.manifests.users import manifests
from unit.specs.strategies import SETTINGS

NAMES = {
    public_class.__name__: public_class
    for public_class in (
        kt.Compute,
        kt.LoggingConfig,
        ComputeSpec,
        Toleration,
        AutoscalingSpec,
        DistributionSpec,
        Endpoint,
        ImageSpec,
        SecretRef,
        VolumeSpec,
    )
}


@pytest.mark.parametrize(
    "compute",
    [
        kt.Compute(),
        kt.Compute(gpus=1, tolerations=[{"key": "a", "operator": "Exists"}], queue="batch"),
        kt.Compute(volumes=["data"], secrets=["token"], selector={"app": "x"}, cpus=1),
        kt.Compute(service_template={"spec": {"paused": True}}, namespace="there"),
        kt.Compute(selector={"app": "x"}, endpoint=Endpoint(selector={"role": "head"})),
        kt.Compute(cpus=2).autoscale(min_scale=0, target=5, target_burst_capacity=7),
        kt.Compute(cpus=2).autoscale(
            min_scale={"0 8 * * 1-5": 4, "0 20 * * *": 0}, timezone="Europe/Berlin", buffer=2
        ),
        kt.Compute(cpus=2).autoscale(metric="queue", target=5, panic_window_percentage=5.5),
        kt.Compute(cpus=2).distribute("ray", workers=3, port=1234),
        kt.Compute.from_manifest(manifests()["Job"]),
    ],
    ids=repr,
)
def test_its_repr_makes_it_again(compute):
    assert eval(repr(compute), NAMES) == compute


#: Settings that users can say in these words; no toleration of every taint is among them.
SAYABLE = {name: values for name, values in SETTINGS.items() if name != "tolerations"}


@given(st.fixed_dictionaries({}, optional=SAYABLE).map(lambda fields: ComputeSpec(**fields)))
def test_the_repr_of_a_spec_makes_it_again(spec):
    compute = kt.Compute.from_spec(spec)
    if compute.image is None and spec.image is None and not spec.secrets:
        assert eval(repr(compute), NAMES) == compute

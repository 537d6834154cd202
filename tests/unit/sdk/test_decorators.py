"""`@kt.compute` and its like: any order, the same declaration."""

import itertools

import pytest

import kubetorch as kt

AUTOSCALED = [
    lambda target: kt.compute(cpus="0.5", name="jobs")(target),
    lambda target: kt.autoscale(min_scale=2, max_scale=3)(target),
    kt.async_,
]
DISTRIBUTED = [
    lambda target: kt.compute(cpus="0.5", name="jobs")(target),
    lambda target: kt.distribute("pytorch", workers=2, num_proc=4)(target),
    kt.async_,
]


def train(steps):
    return steps


class Counter:
    def add(self, k):
        return k


def decorated(target, decorators):
    for decorator in decorators:
        target = decorator(target)
    return target


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("target", [train, Counter])
def test_any_order_of_decorators_declares_the_same(order, target):
    scaled = decorated(target, [AUTOSCALED[number] for number in order])
    spread = decorated(target, [DISTRIBUTED[number] for number in order])

    kind = kt.Cls if target is Counter else kt.Fn
    for handle in (scaled, spread):
        assert isinstance(handle, kind)
        assert handle.is_decorated
        assert handle.async_
        assert handle.name == handle.compute.service_name == "jobs"
        assert handle.__wrapped__ is target
    assert scaled.compute == kt.Compute(cpus="0.5").autoscale(min_scale=2, max_scale=3)
    assert spread.compute == kt.Compute(cpus="0.5").distribute("pytorch", workers=2, num_proc=4)


def test_a_service_is_called_like_the_function_unless_a_name_is_given():
    assert kt.compute(cpus=1)(train).name == "train"
    assert kt.compute(cpus=1)(Counter).name == "counter"


def test_what_decorators_say_of_deploys_is_kept():
    handle = kt.compute(True, "bob", cpus=1)(train)

    assert handle._takes_existing
    assert handle.reload_prefixes == ["bob"]
    assert handle.service_name == "train"


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)])
def test_autoscaled_and_distributed_at_once_is_refused_in_any_order(order):
    decorators = [
        kt.compute(cpus=1),
        kt.autoscale(min_scale=1),
        kt.distribute("pytorch"),
    ]

    with pytest.raises(kt.SpecError, match="exclude each other"):
        decorated(train, [decorators[number] for number in order])


def test_what_is_impossible_is_refused_at_its_own_line():
    with pytest.raises(kt.SpecError, match="did you mean pytorch"):
        kt.distribute("pytroch")
    with pytest.raises(kt.AutoScalingError, match="min_scale"):
        kt.autoscale(min_scale=2, max_scale=1)
    with pytest.raises(kt.SpecError, match="cpus is '2x'"):
        kt.compute(cpus="2x")(train)
    with pytest.raises(TypeError, match="gpuz"):
        kt.compute(gpuz=1)(train)


def test_decorators_without_their_parentheses_are_refused():
    with pytest.raises(TypeError, match=r"@kt.compute\(cpus=1\)"):
        kt.compute(train)
    with pytest.raises(TypeError, match=r"@kt.distribute\(\)"):
        kt.distribute(train)
    with pytest.raises(TypeError):
        kt.autoscale(train)


def test_without_compute_it_is_a_part_that_cannot_be_called():
    part = kt.autoscale(max_scale=2)(kt.async_(train))

    assert part._kt_partial_module
    assert part.__wrapped__ is train
    with pytest.raises(kt.SpecError, match=r"train .*@kt.compute"):
        part(1)
    assert kt.fn(part).__wrapped__ is train


def test_a_handle_is_not_decorated_again_and_can_be_deployed_elsewhere():
    handle = kt.compute(cpus=1)(train)

    with pytest.raises(kt.SpecError, match="twice"):
        kt.compute(cpus=2)(handle)
    with pytest.raises(kt.SpecError, match="no compute"):
        kt.distribute("pytorch")(kt.fn(train))
    other_handle = kt.fn(handle, name="other")
    assert (other_handle.__wrapped__, other_handle.compute) == (train, None)


def test_what_is_no_function_is_refused():
    for decorator in (kt.async_, kt.autoscale(max_scale=2), kt.compute(cpus=1)):
        with pytest.raises(TypeError):
            decorator(5)


def test_a_program_can_switch_decorators_off():
    kt.globals.disable_decorators = True
    try:
        assert decorated(train, AUTOSCALED) is train
    finally:
        kt.globals.disable_decorators = False

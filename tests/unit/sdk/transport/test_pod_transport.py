"""URLs of pods behind a controller."""

from kubetorch.sdk.transport import pod_transport


def test_a_pod_behind_a_controller_is_named_in_a_header_and_not_in_what_is_sent():
    url = pod_transport.relay_url("https://kt.example.com/base/", "team", "train", "train-0")

    assert url == "https://kt.example.com/base/team/train#train-0"
    assert pod_transport.pod_headers(url) == {"X-Kubetorch-Pod": "train-0"}
    assert pod_transport.pod_headers("https://kt.example.com/team/train") == {}

"""The token of a notebook, which goes into a page of this machine."""

import json

import pytest

from kubetorch.cli.notebook import _token
from kubetorch.errors import StartupError

TOKEN = "aB3_-" * 8


def test_the_token_is_that_of_the_file_of_jupyter():
    assert _token(json.dumps({"token": TOKEN, "port": 8888}), "p") == TOKEN


@pytest.mark.security
@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"token": "a"}{"token": "b"}',
        "[]",
        "[" * 100_000,
        '["token"]',
        "{}",
        '{"token": null}',
        '{"token": ""}',
        json.dumps({"token": f'{TOKEN}"><script>'}),
        json.dumps({"token": f"{TOKEN}\n"}),
        json.dumps({"token": TOKEN * 6}),
    ],
)
def test_what_can_be_no_token_of_jupyter_is_refused(text):
    with pytest.raises(StartupError, match="in p names no token"):
        _token(text, "p")

"""Handles that are made without the callable know which options its signature takes for itself."""

import pytest

from kubetorch.sdk.deploys.source import Placement, Source


def export(n, workers=1, *, async_=False, other=2):
    """A function with options of its own."""


class Base:
    def inherited(self, debug):
        """A method with one, too."""


class Trainer(Base):
    limit = 3

    @staticmethod
    def still(serialization):
        """None of an instance."""

    @classmethod
    def made(cls, pdb):
        """None of an instance."""

    def plain(self, x):
        """Nothing special."""

    def _private(self, workers):
        """Cannot be called."""

    def __call__(self, stream_logs):
        """The instance itself."""


@pytest.mark.parametrize(
    ("kind", "callable_object", "expected"),
    [
        ("fn", export, {None: {"workers", "async_"}}),
        (
            "cls",
            Trainer,
            {
                "still": {"serialization"},
                "made": {"pdb"},
                "inherited": {"debug"},
                "plain": set(),
                "limit": set(),
                "_private": set(),
                None: {"stream_logs"},
                "__call__": {"stream_logs"},
            },
        ),
    ],
)
def test_a_deploy_says_which_options_the_signatures_declare(kind, callable_object, expected):
    ref = Source(kind, callable_object, Placement(sync_dir=False)).ref()
    assert {method: set(ref.options_of(method)) for method in expected} == expected

"""A name says what it holds: few are pronouns and participles, such as `found` and `one`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import words

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("folders", "most"), [(("src",), 0.5), (("tests", "benchmarks", "examples", "tools"), 1.0)]
)
def test_few_names_are_riddles(folders: tuple[str, ...], most: float) -> None:
    share = words.measure(words.files_of(ROOT / folder for folder in folders))
    worst = "\n".join(f"{count} {file}" for file, count in share.riddles.most_common(5))
    assert share.percent <= most, f"python tools/words.py shows where\n{worst}"


@pytest.mark.parametrize("name", ["found", "_one", "Wanted", "otherOne"])
def test_a_name_of_such_words_alone_is_a_riddle(name: str) -> None:
    assert words.is_riddle(name)


@pytest.mark.parametrize("name", ["found_pods", "is_known", "PodPlace", "_", "x1"])
def test_a_name_with_a_noun_is_none(name: str) -> None:
    assert not words.is_riddle(name)

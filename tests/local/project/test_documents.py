"""The blocks of the documents run, in a folder and with a service of their own for each page."""

import contextlib
import random
import time

import pytest

import documents
import shared

#: What a sample takes at most in all workers together, in seconds; `KT_TEST_WHOLE=1` runs all.
SAMPLE = 20.0
PAGES = [page for page in documents.PAGES if any(map(documents.runs_here, documents.blocks(page)))]
# Another sample for other documents.
random.Random(sum(page.stat().st_size for page in PAGES)).shuffle(PAGES)


@contextlib.contextmanager
def counted():
    """Add the time of a block to that of all; false if all had theirs."""
    spent = shared.FOLDER / "documents.seconds"
    with shared.turn("documents"):
        before = sum(map(float, spent.read_text().split())) if spent.exists() else 0.0
    began = time.monotonic()
    yield shared.WHOLE or before < SAMPLE
    with shared.turn("documents"), spent.open("a") as file:
        file.write(f"{time.monotonic() - began}\n")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(documents.ROOT)) for p in PAGES])
def test_the_blocks_of_a_page_run_in_their_order(page, service_home, tmp_path):
    for block in documents.blocks(page):
        with counted() as is_wanted:
            if not is_wanted:
                pytest.skip(f"the sample had its {SAMPLE:g} s before {block}")
            block.run(tmp_path)

"""Cells of a notebook use what other cells define, in pods of a cluster."""

from __future__ import annotations

from pathlib import Path

import notebooks
from cluster.conftest import Installed


def test_a_function_uses_what_other_cells_define(tmp_path: Path, installed: Installed) -> None:
    shown = notebooks.run(
        tmp_path,
        notebooks.DEPLOY,
        "import os, decimal\nfrom dataclasses import dataclass",
        "@dataclass\nclass Price:\n    amount: decimal.Decimal\n",
        "price = Price(decimal.Decimal('1.10'))",
        "def doubled():\n    return str(2 * price.amount)\n",
        "def f():\n    return [doubled(), os.environ['POD_NAME']]\n",
        "before = deployed(f)()",
        "price = Price(decimal.Decimal('1.20'))",
        "after = deployed(f)()",
        "before[0], after[0], before[1] == after[1]",
        **installed.environ,
    )

    assert shown[-1] == "('2.20', '2.40', True)"

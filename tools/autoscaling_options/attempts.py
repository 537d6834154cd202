"""A program of a user who tries options: attempts ENGINE PROJECT JOBS RESULTS OPTION..."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.autoscaling_options.engine import Engine
from tools.autoscaling_options.options import OPTIONS, Option


def main() -> None:
    """Try these options, or all, and write what they did into the file of results."""
    engine_name, project, jobs, results_file, *names = sys.argv[1:]
    unknown = {*names} - {option.name for option in OPTIONS}
    if unknown:
        known = "\n".join(option.name for option in OPTIONS)
        raise SystemExit(f"no option {', '.join(unknown)}; there are\n{known}")
    sys.path.insert(0, project)
    engine = Engine(engine_name)

    def attempt(option: Option) -> dict[str, object]:
        try:
            observation, is_right = option.on(engine), True
        except Exception as error:  # noqa: BLE001  # whatever a user would get
            observation, is_right = f"{type(error).__name__}: {error}", False
        sign = "ok" if is_right else "NO"
        sys.stdout.write(f"{sign} {engine.name} {option.name} · {observation}\n")
        sys.stdout.flush()
        return {
            "name": option.name,
            "expectation": option.expectation,
            "is_right": is_right,
            "observation": observation,
        }

    with ThreadPoolExecutor(int(jobs)) as pool:
        options = [option for option in OPTIONS if not names or option.name in names]
        results = list(pool.map(attempt, options))
    Path(results_file).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()

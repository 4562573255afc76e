"""``python -m benchmarks quantize|gemm [--cases NAME,...] [--json OUT]``"""

import argparse
import json
import pathlib
from collections.abc import Callable
from typing import Any

from . import bench_gemm, bench_quantize
from .timing import environment

SUITES: dict[str, Callable[[list[str] | None], list[dict[str, Any]]]] = {
    "quantize": bench_quantize.run,
    "gemm": bench_gemm.run,
}


def table(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(k for row in rows for k in row))
    lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
    lines += [" | ".join(str(row.get(c, "")) for c in columns) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("suite", choices=sorted(SUITES))
    parser.add_argument("--cases", help="comma-separated case names; all that fit the device by default")
    parser.add_argument("--json", type=pathlib.Path, help="where to write the result")
    parser.add_argument("--commit", help="what to record as the commit, outside a git checkout")
    args = parser.parse_args()
    rows = SUITES[args.suite](args.cases.split(",") if args.cases else None)
    print(table(rows))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(
            json.dumps({"suite": args.suite, "environment": environment(args.commit), "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()

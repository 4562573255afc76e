"""``python -m benchmarks`` and a suite, ``plot``, ``compare`` or ``tables``; see benchmarks/README.md."""

import argparse
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

from . import results, tables
from .compare import compare, regressions

SHAPES = {
    "quantize": "MxK or a name of tests/cases.py",
    "grouped": "TOKENS:GxNxK",
    "attention": "SEQUENCESxTOKENS",
    "sharding": "PARTxWHOLE",
    "stats": "MICROBATCHESxSEQUENCES",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    commands = parser.add_subparsers(dest="command", required=True)
    for suite in ("quantize", "gemm", "products", "grouped", "linear", "steps", "attention", "sharding", "stats"):
        command = commands.add_parser(suite, help=f"time the {suite} suite")
        shape = SHAPES.get(suite, "MxNxK")
        command.add_argument("--cases", type=_names, help=f"comma-separated: {shape}; all that suit the device")
        command.add_argument("--json", type=pathlib.Path, help="where to write the result")
        command.add_argument("--commit", help="what to record as the commit, outside a git checkout")
        if suite == "quantize":
            command.add_argument("--ops", type=_names, help="comma-separated: operations; the defaults of each case")
            command.add_argument("--no-naive", action="store_true", help="leave out the naive jnp quantizers")
        if suite in ("quantize", "attention"):
            command.add_argument("--peers", action="store_true", help="also other libraries, where installed")
        if suite in ("products", "grouped"):
            command.add_argument("--every", action="store_true", help="also the kernels that are not planned")
    command = commands.add_parser("checkpoint", help="time the conversion of a checkpoint")
    command.add_argument("--gigabytes", type=float, default=2.0, help="of the checkpoint, 2 by default")
    command.add_argument("--folder", type=pathlib.Path, help="where to make it: room for twice as much")
    command.add_argument("--json", type=pathlib.Path, help="where to write the result")
    command.add_argument("--commit", help="what to record as the commit, outside a git checkout")
    command = commands.add_parser("plot", help="draw a result")
    command.add_argument("result", type=pathlib.Path)
    command.add_argument("png", type=pathlib.Path)
    command = commands.add_parser("compare", help="exit with 1 if a result has slowed down")
    command.add_argument("new", type=pathlib.Path)
    command.add_argument("old", type=pathlib.Path, nargs="?", help="default: the committed one of the same hardware")
    command.add_argument("--tolerance", type=float, default=0.05, help="of the median, 0.05 by default")
    command = commands.add_parser("tables", help="write the tables of the pages from benchmarks/results")
    command.add_argument("--check", action="store_true", help="write nothing, exit with 1 if a page differs")
    return parser


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _run(args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Yields rows when they are measured."""
    # Not for plot, compare and tables, which need no JAX.
    from . import (
        bench_attention,
        bench_checkpoint,
        bench_gemm,
        bench_grouped,
        bench_linear,
        bench_products,
        bench_quantize,
        bench_sharding,
        bench_stats,
        bench_steps,
    )

    if args.command == "gemm":
        yield bench_gemm.run(args.cases)
    if args.command == "products":
        yield from bench_products.run(args.cases, args.every)
    if args.command == "grouped":
        yield from bench_grouped.run(args.cases, args.every)
    if args.command == "steps":
        yield from bench_steps.run(args.cases)
    if args.command == "attention":
        yield from bench_attention.run(args.cases, args.peers)
    if args.command == "stats":
        yield from bench_stats.run(args.cases)
    if args.command == "sharding":
        yield from bench_sharding.run(args.cases)
    if args.command == "checkpoint":
        yield bench_checkpoint.run(args.gigabytes, args.folder)
    if args.command == "linear":
        yield bench_linear.run(args.cases)
    if args.command == "quantize":
        yield bench_quantize.run(args.cases, args.ops, baselines=not args.no_naive, with_peers=args.peers)


def _bench(args: argparse.Namespace) -> None:
    from .timing import environment

    rows: list[dict[str, Any]] = []
    result = {"suite": args.command, "environment": environment(args.commit), "rows": rows}
    for found in _run(args):
        rows += found
        if args.json:
            results.save(result, args.json)
    print(results.table(rows))
    missed = [f"{row['case']}: {row['op']}" for row in rows if not row.get("met", True)]
    print(f"clock: {', '.join(results.clocks(result))}")
    if missed:
        print(f"{len(missed)} of {sum('met' in row for row in rows)} targets missed:", *missed, sep="\n  ")


def _compare(args: argparse.Namespace) -> int:
    new = results.load(args.new)
    old_path = args.old or results.committed(new)
    rows = compare(new, results.load(old_path), args.tolerance)
    print(results.table(rows))
    slower = regressions(rows)
    print(f"{len(slower)} of {len(rows)} rows more than {args.tolerance:.0%} slower than in {old_path}")
    return 1 if slower else 0


def _tables(args: argparse.Namespace) -> int:
    found = tables.stale(write=not args.check)
    print(*(f"{page}: tables {'differ from the results' if args.check else 'written'}" for page in found), sep="\n")
    return 1 if found and args.check else 0


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        if args.command == "compare":
            return _compare(args)
        if args.command == "tables":
            return _tables(args)
        if args.command == "plot":
            from .plot import plot

            plot(results.load(args.result), args.png)
        else:
            _bench(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

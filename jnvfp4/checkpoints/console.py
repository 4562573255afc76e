"""Shows a person the progress of a conversion on stderr, and tables of plans and checkpoints."""

import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from ._convert.plan import Plan
from ._convert.shards import OnProgress
from ._files.safetensors import JSON
from ._layouts.loaders import VERSIONS
from ._layouts.names import module_of, split_role
from .compare import Difference
from .convert import Result
from .rules import RULES, Finding
from .verify import SUSPICIOUS, Record

SECONDS = 10.0  # between two lines, if stderr is no terminal
_WIDEST = 100  # characters of a column
_MOST_LINES = 10  # about what one rule found
_NUMBER = re.compile(r"(?<=\.)(0|[1-9][0-9]*)(?=[.:,]|$)")  # a part of a name


def say(value: object, stream: TextIO, indent: int | None = None) -> None:
    """Prints text, or another value as JSON. Characters that the stream cannot encode are escaped.

    What stderr does not take is lost: it changes neither what a command does nor its exit code.
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"  # text in memory has none
    text = value if isinstance(value, str) else json.dumps(value, indent=indent, ensure_ascii=False)
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        escaped = text.encode(encoding, "backslashreplace").decode(encoding)
        text = escaped if isinstance(value, str) else json.dumps(value, indent=indent)
    try:
        print(text, file=stream, flush=True)
    except OSError:
        if stream is not sys.stderr:
            raise
        discard(stream)


def discard(stream: TextIO) -> None:
    """Discards what a stream has buffered and is given later, since Python would write it again at the end."""
    with suppress(OSError), open(os.devnull, "wb") as nothing:  # text in memory has no descriptor
        os.dup2(nothing.fileno(), stream.fileno())


@contextmanager
def progress(total: int, *, quiet: bool = False) -> Iterator[OnProgress]:
    """Shows how many of ``total`` bytes are done: on a terminal by a bar, else by a line every ten seconds."""
    if quiet:
        yield lambda name, done: None
    elif sys.stderr.isatty() and find_spec("tqdm"):
        from tqdm import tqdm  # type: ignore[import-untyped]

        with tqdm(total=total, unit="B", unit_scale=True, file=sys.stderr) as bar:

            def show(name: str, done: int) -> None:
                bar.set_postfix_str(name, refresh=False)
                bar.update(done)

            yield show
    else:
        yield _lines(total)


def _lines(total: int) -> OnProgress:
    done, begun = 0, time.monotonic()
    last = begun

    def show(name: str, nbytes: int) -> None:
        nonlocal done, last
        done += nbytes
        if (now := time.monotonic()) - last < SECONDS:
            return
        last, rate = now, done / max(now - begun, 1e-9)
        left = (total - done) / rate if rate else float("inf")
        text = f"{done / 1e9:.2f} of {total / 1e9:.2f} GB, {rate / 1e9:.2f} GB/s, {left:.0f} s left"
        say(f"{text}: {name}", sys.stderr)

    return show


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Formats rows as columns of text, with numbers on the right of their column. A long cell moves those after it."""
    cells = [list(header), *([str(c) for c in row] for row in rows)]
    widths = [min(_WIDEST, max(len(row[i]) for row in cells)) for i in range(len(header))]
    right = [all(c[i].replace(".", "", 1).isdigit() for c in cells[1:]) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        return "  ".join(padded).rstrip()

    return "\n".join(map(line, cells))


def plan_as_json(plan: Plan) -> JSON:
    """Describes what a conversion would do, as JSON values."""
    groups = {plan.weights[m].name: list(g.members) for g in plan.groups for m in g.members}
    return {
        "format": plan.options.layout,
        "ignore": list(plan.ignore),
        "tensors": [
            {
                "name": name,
                "action": "quantize" if item.choice.quantizes else "keep",
                "reason": item.choice.reason or None,
                "group": groups.get(name),
                "bytes": item.nbytes,
            }
            for name, item in sorted(plan.items.items())
        ],
        "bytes": plan.nbytes,
        "with_hessian": len(plan.with_hessian),
        "warnings": list(plan.warnings),
    }


def plan_table(plan: JSON) -> str:
    """Formats the result of ``plan_as_json``, one line per tensor."""
    rows = []
    for t in plan["tensors"]:
        others = (m.rpartition(".")[2] for m in t["group"] or () if m != module_of(t["name"]))
        rows.append((t["name"], t["action"], t["reason"] or "", t["bytes"], ", ".join(others)))
    text = table(("tensor", "action", "reason", "bytes", "shares its global with"), rows)
    total = f"{plan['bytes']} bytes in all; ignore list: {', '.join(plan['ignore'])}"
    if plan["with_hessian"]:
        total += f"\n{plan['with_hessian']} weights have a hessian, by which GPTQ rounds them"
    return "\n".join([text, total, *_warnings(plan)])


def _warnings(description: JSON) -> list[str]:
    return [f"warning    {w}" for w in description["warnings"]]


def records_table(records: Sequence[Record]) -> str:
    """Formats what a verification measured, one line per quantized weight."""
    header: tuple[str, ...] = ("weight", "relative error", "SNR, dB", "largest error", "codes 6, -6", "codes 0")
    rows = [
        (r.name, f"{e.relative_error:.4f}", "" if e.snr_db is None else f"{e.snr_db:.1f}", f"{e.max_abs_error:.3g}",
         f"{e.largest_code_share:.4f}", f"{e.zero_code_share:.4f}")
        for r in records if (e := r.error)
    ]  # fmt: skip
    loaded = [r for r in records if r.reason or r.error_as_loaded is not None]
    if not loaded:
        return table(header, rows)
    header, errors = (header[0], "as stored", "as loaded", "reason"), {row[0]: row[1] for row in rows}
    as_loaded = ("none" if r.error_as_loaded is None else f"{r.error_as_loaded:.4f}" for r in loaded)
    lines = ((r.name, errors.get(r.name, ""), e, r.reason) for r, e in zip(loaded, as_loaded, strict=True))
    return table(header, lines)


def verdict(records: Sequence[Record], failures: Sequence[str]) -> str:
    """Says in one line how a verification ended."""
    if failures:
        more = f", and {len(failures) - 1} more" if len(failures) > 1 else ""
        return f"NOT VERIFIED: {failures[0]}{more}"
    if records and not any(r.sha256 for r in records):
        return f"verified: {len(records)} weights are loaded as they are stored, by names and scales alone"
    errors = {r.name: r.error.relative_error for r in records if r.error}
    kept = f"{len(records) - len(errors)} other tensors are unchanged"
    if not errors:
        return f"verified: {kept}"
    worst = max(errors, key=lambda name: errors[name])
    odd = sum(e > SUSPICIOUS for e in errors.values())
    suspicious = f"; {odd} are above {SUSPICIOUS}, which is unusual" if odd else ""
    mean = sum(errors.values()) / len(errors)
    measured = f"{mean:.4f} on average and {errors[worst]:.4f} at most ({worst})"
    return f"verified: {len(errors)} weights have a relative error of {measured}{suspicious}; {kept}"


def result_as_json(result: Result) -> JSON:
    """Describes what a conversion has done, as JSON values."""
    return {
        "quantized": len(result.amaxes),
        "by_gptq": len(result.by_gptq),
        "kept": sum(not item.choice.quantizes for item in result.plan.items.values()),
        "bytes_before": result.bytes_before,
        "bytes_after": result.bytes_after,
        "inexact_blocks": dict(result.inexact_blocks),
        "warnings": list(result.warnings),
    }


def conversion_table(result: Result) -> str:
    """Formats what a conversion has done."""
    r = result_as_json(result)
    ratio = f", {r['bytes_after'] / r['bytes_before']:.3f} of the source" if r["bytes_before"] else ""
    by_gptq = f", of which {r['by_gptq']} by GPTQ" if result.plan.hessians is not None else ""
    lines = [
        f"quantized  {r['quantized']} weights{by_gptq}",
        f"kept       {r['kept']} tensors",
        f"bytes      {r['bytes_after']}{ratio}",
    ]
    if inexact := result.inexact_blocks:
        lines.append(f"MXFP4      {sum(inexact.values())} blocks of 16 in {len(inexact)} weights have other values")
    return "\n".join(lines)


def difference_table(found: Difference) -> str:
    """Formats the result of ``diff``, one line per tensor or entry that differs."""
    if found.same:
        return "no difference"
    rows = []
    for kind, values in vars(found).items():
        counts = values if isinstance(values, dict) else dict.fromkeys(values, "")
        rows += [(kind.replace("_", " "), name, count) for name, count in counts.items()]
    return table(("difference", "tensor or entry", "count"), rows)


def findings_as_json(found: Sequence[Finding], done: Mapping[str, str]) -> JSON:
    """Describes what ``lint`` found and what ``fix_checkpoint`` did before, as JSON values."""
    rules = {f.rule: RULES[f.rule] for f in found}
    about = {name: {"finds": r.finds, "breaks": r.breaks, "do": r.do} for name, r in rules.items()}
    return {"fixed": dict(done), "findings": [vars(f) for f in found], "rules": about}


def findings_table(found: Sequence[Finding], done: Mapping[str, str], output: Path | None) -> str:
    """Formats what ``lint`` found by rule, and what ``fix_checkpoint`` did before; of a rule at most ten lines."""
    lines = _some([f"fixed  {where}: {what}" for where, what in done.items()])
    if output and not done:
        lines.append(f"nothing to fix without other codes: {output} is not written")
    for name in dict.fromkeys(f.rule for f in found):
        rule, of_rule = RULES[name], [f for f in found if f.rule == name]
        lines += ["", f"{'note: ' if all(f.note for f in of_rule) else ''}{name}: {rule.finds}"]
        lines += _some([f"  {f.where} {f.found}{' (--fix)' if f.fixable else ''}" for f in of_rule])
        lines += [f"  breaks: {rule.breaks}", f"  do: {rule.do}"]
    count, fixable = sum(not f.note for f in found), sum(f.fixable for f in found)
    what = f"findings: {count}, of which --fix mends {fixable}" if count else "no finding"
    read = (
        ["", f"loaders as of {', '.join(f'{name} {version}' for name, version in VERSIONS.items())}"] if found else []
    )
    return "\n".join([*lines, *read, "", what]).lstrip("\n")


def _some(lines: list[str]) -> list[str]:
    return lines if len(lines) <= _MOST_LINES else [*lines[:_MOST_LINES], f"  and {len(lines) - _MOST_LINES} more"]


def inspect_table(checkpoint: JSON) -> str:
    """Formats the result of ``inspect``."""
    c = checkpoint
    lines = [
        f"layout     {c['layout'] or 'none: nothing is quantized'}",
        f"tensors    {c['tensors']} in {len(c['files'])} files, {c['bytes']} bytes",
        *(f"{tag:<10} {nbytes} bytes" for tag, nbytes in c["dtypes"].items()),
    ]
    if c["layout"]:
        lines.append(f"quantized  {len(c['quantized'])} weights, {c['ratio_to_16_bits']:.3f} of the bytes at 16 bits")
        named = [f"FP8        {module}, {granularity}" for module, granularity in c["fp8"].items()]
        named += [f"AWQ        {name}, multiplies the activations" for name in c["pre_quant_scales"]]
        named += [f"KV scale   {name}" for name in c["kv_scales"]]
        named += [f"kept       {name}" for name in c["kept"]]
        named += [f"group      {_in_one(group)}" for group in c["groups"]]
        lines += _merged(named)
    return "\n".join([*lines, *_warnings(checkpoint)])


def _in_one(modules: Sequence[str]) -> str:
    """Names the modules of a group, and their parent once if they have the same: layers.0.mlp: gate_proj, up_proj."""
    parents, roles = zip(*map(split_role, modules), strict=True)
    return f"{parents[0][:-1]}: {', '.join(roles)}" if parents[0] and len({*parents}) == 1 else ", ".join(modules)


def _merged(lines: list[str]) -> list[str]:
    """Merges lines that differ in one number, that of a layer or an expert, into one with all its values: {0-11}."""
    for place in reversed(range(max((len(_NUMBER.findall(line)) for line in lines), default=0))):
        values: dict[tuple[str, str], set[int]] = {}  # by what is before and after the number
        for line in lines:
            parts = _NUMBER.split(line, place + 1)
            number = {int(parts.pop(-2))} if len(parts) == 2 * place + 3 else set()
            values.setdefault(("".join(parts[:-1]), parts[-1]), set()).update(number)
        lines = [f"{before}{_ranges(numbers)}{after}" for (before, after), numbers in values.items()]
    return lines


def _ranges(numbers: set[int]) -> str:
    first, last = (sorted(n for n in numbers if n + step not in numbers) for step in (-1, 1))
    ranges = ",".join(f"{a}-{b}" if a < b else str(a) for a, b in zip(first, last, strict=True))
    return f"{{{ranges}}}" if len(numbers) > 1 else ranges

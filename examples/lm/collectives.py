"""Lists the collectives of a compiled program: kind, dtype, bytes, and how often a loop runs them."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

KINDS = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
COLLECTIVE = re.compile(rf" = (\S+|\(.+?\)) ({KINDS})(-start)?\(")
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
LOOP = re.compile(r" while\(.*body=%?([\w.-]+).*?\"known_trip_count\":\{\"n\":\"(\d+)\"")
CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.-]+)")
SHAPE = re.compile(r"([a-z]+\d+\w*|pred)\[([\d,]*)\]")


@dataclass(frozen=True)
class Collective:
    """Holds one collective of a compiled program.

    Attributes:
      kind: its name in HLO, such as "all-gather".
      dtype: of its elements, such as "u8" or "bf16".
      shapes: of its results on one device.
      nbytes: size of its results on one device.
      times: how often a step runs it, more than once in the loop over layers.
    """

    kind: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    nbytes: int
    times: int


def collectives(compiled: Any) -> list[Collective]:
    """Returns the collectives of ``jax.jit(f).lower(...).compile()``, those of loops with their trip counts."""
    bodies: dict[str, list[str]] = {}
    for line in compiled.as_text().splitlines():
        if match := COMPUTATION.match(line):
            current = bodies.setdefault(match[1], [])
        elif bodies:
            current.append(line)
    times = _times(bodies)
    return [found for name, lines in bodies.items() for line in lines for found in _of_line(line, times[name])]


def _times(bodies: dict[str, list[str]]) -> Counter[str]:
    """How often each computation runs: once, or as often as the loops around it."""
    times = Counter(dict.fromkeys(bodies, 1))
    calls = {
        name: [(m[1], int(m[2])) for line in lines for m in LOOP.finditer(line)]
        + [(m[1], 1) for line in lines for m in CALLED.finditer(line)]
        for name, lines in bodies.items()
    }

    def scale(name: str, by: int) -> None:
        for called, trips in calls.get(name, ()):
            times[called] *= by * trips
            scale(called, trips * by)

    called_ones = {called for found in calls.values() for called, _ in found}
    for name in bodies:
        if name not in called_ones:
            scale(name, 1)
    return times


def _of_line(line: str, times: int) -> Iterator[Collective]:
    if match := COLLECTIVE.search(line):
        shapes = SHAPE.findall(match[1])
        if match[3] and match[1].startswith("(("):  # a tuple of operands, then the results
            shapes = SHAPE.findall(match[1][match[1].index(")") :])
        elif match[3] and match[2] in ("all-gather", "collective-permute"):  # an operand, then the result
            shapes = shapes[1:2]
        dims = tuple(tuple(int(d) for d in shape.split(",") if d) for _, shape in shapes)
        yield Collective(match[2], shapes[0][0], dims, _nbytes(shapes[0][0]) * sum(map(math.prod, dims)), times)


def _nbytes(dtype: str) -> int:
    return 1 if dtype == "pred" else max(1, int(re.search(r"\d+", dtype)[0]) // 8)  # type: ignore[index]


def table(compiled: Any) -> dict[tuple[str, str], tuple[int, int]]:
    """Returns for each kind and dtype how many collectives a step runs and how many bytes they result in."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for c in collectives(compiled):
        count, nbytes = found.get((c.kind, c.dtype), (0, 0))
        found[c.kind, c.dtype] = count + c.times, nbytes + c.times * c.nbytes
    return dict(sorted(found.items()))

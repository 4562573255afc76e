"""Writes the tables of figures in docs/ and README.md from the files in results/.

A table follows the comment ``<!-- table: NAME -->`` and ends before the first line that is no row. The text around it
is written by hand.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

from .results import RESULTS

ROOT = RESULTS.parent.parent
MARKED = re.compile(r"(<!-- table: (\w+) -->\n)((?:\|.*\n)*)")
Cells = Sequence[str]
Rows = Callable[[], Iterable[Cells]]


@dataclass(frozen=True)
class Table:
    """One table: the line of headings, a function that makes the rows, and its page."""

    heads: str
    rows: Rows
    page: str = "docs/results.md"

    def text(self) -> str:
        rule = "| --- " * (self.heads.count("|") + 1)
        return f"| {self.heads} |\n{rule}|\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in self.rows())


@functools.cache
def load(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


# ---------------------------------------------------------------- suites of benchmarks
FORMATS: dict[str, Callable[[float], str]] = {
    "median_us": lambda us: f"{us:.1f}" if us < 100 else f"{us:.0f}",
    "milliseconds": "{:.1f}".format,
    "GB/s": "{:.0f}".format,
}


def cell(file: str, case: str, op: str, *fields: str) -> str:
    """Returns the fields of a row of a suite, all but the first in parentheses; of ratios, two decimals."""
    (row,) = (row for row in load(file)["rows"] if (row["case"], row["op"]) == (case, op))
    row = {**row, "milliseconds": row["median_us"] / 1e3}
    first, *rest = (FORMATS.get(field, "{:.2f}".format)(row[field]) if field in row else "" for field in fields)
    return first + (f" ({', '.join(rest)})" if rest else "")


def operations(file: str, case: str, names: dict[str, str], *fields: str) -> Rows:
    """A row for each operation, a column for each field."""
    return lambda: [[name, *(cell(file, case, op, field) for field in fields)] for op, name in names.items()]


def cases(file: str, names: Cells, *columns: tuple[str, ...]) -> Rows:
    """A row for each case, and a column for each operation with its fields."""
    return lambda: [[*shape(case).split(":"), *(cell(file, case, *column) for column in columns)] for case in names]


def shape(case: str) -> str:
    return case.replace("x", " x ")


QUANTIZERS = {
    "copy by memcpy": "copy by memcpy (4 bytes per element)",
    "nvfp4": "`quantize`, `NVFP4`",
    "nvfp4 amax included": "`quantize`, `NVFP4`, amax included",
    "nvfp4 transposed": "`quantize`, `NVFP4`, transposed",
    "nvfp4_2d": "`quantize`, `NVFP4_2D`",
    "row_scaled amax found": "`quantize`, `ROW_SCALED`, amax found",
    "window64": "`quantize`, `WINDOW64`, amax found",
    "nvfp4_sr": "`quantize`, `NVFP4_SR`",
    "nvfp4_rht transposed": "`quantize`, `NVFP4_RHT`, transposed",
    "4over6 mae": '`quantize`, `four_over_six("mae")`',
    "4over6 mae fast": '`quantize`, `four_over_six("mae", fast=True)`',
    "nvfp4 pair": "`quantize_pair`, `NVFP4` both ways",
    "pretrain x pair": "`quantize_pair`, x of `recipes.pretrain()`",
    "pretrain dy pair": "`quantize_pair`, dy of `recipes.pretrain()`",
    "dequantize to bf16": "`dequantize` to bfloat16",
}
ON_CPU = {op: QUANTIZERS[op] for op in ("nvfp4", "nvfp4 transposed", "nvfp4_sr", "4over6 mae", "4over6 mae fast")}
LAYERS = ("14336x4096", "4096x14336", "8192x8192")
EXPERTS = [f"{tokens}:{of}" for of in ("8x14336x4096", "64x2048x7168") for tokens in (16, 128, 1024, 32768)]
GROUPED = (
    *((f"bf16 {of}", "median_us") for of in ("loop", "ragged_dot")),
    *((op, "median_us", "speed of loop") for op in ("w4a4", "w4a16", "w4a4 pinned")),
)
LAYER_STEPS = ("8192x8192x8192", "16384x14336x4096", "4096x4096x4096")
LAYER_RECIPES = [
    (f"linear {of}", "median_us", "time of bf16", "steady time of bf16")
    for of in ("pretrain", "row_scaled", "four_over_six", "window64")
]


def products() -> Iterable[Cells]:
    ops = (("bf16", "median_us"), *((op, "median_us", "speed of bf16") for op in ("w4a4", "w4a16")))
    for m in (1, 8, 16, 32, 64, 128, 512, 2048):
        yield [str(m), *(cell("h200_products", f"{m}x{layer}", *op) for layer in LAYERS for op in ops)]
    yield ["8192", *[""] * 6, *(cell("h200_products", "8192x8192x8192", *op) for op in ops)]


def steady() -> Iterable[Cells]:
    ops = [(op, "steady speed of bf16", "speed of bf16") for op in ("w4a4", "w4a16")]
    for m in (128, 256, 512, 1024):
        yield [str(m), *(cell("h200_products", f"{m}x{layer}", *op) for layer in LAYERS for op in ops)]
    yield ["8192", *[""] * 4, *(cell("h200_products", "8192x8192x8192", *op) for op in ops)]


def sharded_layers() -> Iterable[Cells]:
    """Microseconds; of layers, the share in which collectives alone run, and the speed of bfloat16, also steady."""
    rows = {(row["case"], row["op"]): row for row in load("h200x4_sharding")["rows"]}

    def of(op: str, count: int) -> dict[str, Any]:
        (found,) = (row for (case, name), row in rows.items() if name == op and case.endswith(f" on {count}"))
        return found

    def layer(op: str, count: int) -> str:
        row = of(op, count)
        waits = max(0.0, row["collectives_us"] - row["hidden_us"]) / row["median_us"]
        speeds = f"; {row['speed of bf16']:.2f}, {row['steady speed of bf16']:.2f}" if "pretrain" in op else ""
        return f"{row['median_us']:.0f} ({waits:.0%}{speeds})"

    for count in (1, 2, 4):
        gathers = (
            [f"{of(f'gather {op}', count)['median_us']:.0f}" for op in ("bf16", "packed")] if count > 1 else ["", ""]
        )
        layers = [layer(f"{kind} {op}", count) for kind in ("fsdp", "tensor parallel") for op in ("bf16", "pretrain")]
        yield [str(count), *gathers, *layers]


# ---------------------------------------------------------------- results of examples
def rates(groups: dict[str, Any], names: Cells) -> Iterable[list[str]]:
    """Tokens per second, and the speedup over bfloat16."""
    for batch in filter(groups.get, ("1", "8", "16", "64")):
        rate = {name: of["tokens_per_second"] for name, of in groups[batch].items()}
        faster = [f"{rate[name]:.0f} ({rate[name] / rate['bf16']:.2f})" if name in rate else "" for name in names]
        yield [batch, f"{rate['bf16']:.0f}", *faster]


def training_steps() -> Iterable[Cells]:
    seconds = [run["seconds_per_step"] for run in load("h200_train_lm")["runs"].values()]
    yield "seconds per step", *(f"{time:.4f}" for time in seconds)
    yield "slowdown", *(f"{time / seconds[0]:.2f}" for time in seconds)


ARMS = (
    "bf16", "plain", "pretrain", "pretrain_unbiased", "pretrain_4over6", "4over6_ends_bf16", "4over6_ends_bf16_ending",
    "rl", "backward_only", "pretrain_no_rht", "pretrain_no_sr", "row_scaled", "pretrain_ends_bf16",
)  # fmt: skip
METHODS = {  # by arm, what it is, and the part of the gap that its paper says it closes
    "pretrain_4over6": "",
    "pretrain_4over6_as_w4a16": "x in bfloat16 in validation alone",
    "w4a16_ending": "x in bfloat16 in validation and in the last tenth of the steps",
    "two_tensors_ending": "x as two NVFP4 tensors in validation and in the last tenth of the steps",
    "requantized": "gradients of the quantized x and w (`requantize=True`)",
    "requantized_as_w4a16": "`requantized`, x in bfloat16 in validation alone",
    "requantized_ending": "`requantized`, x in bfloat16 in validation and in the last tenth of the steps",
    "requantized_ends_bf16": "`requantized`, first and last block in bfloat16",
    "requantized_ends_bf16_as_bf16": "`requantized_ends_bf16`, all in bfloat16 in validation alone",
    "requantized_ends_bf16_ending": "the same in validation, `fprop=None` in the last tenth of the steps",
    "eden": "gradients by MS-EDEN ([Quartet II](https://arxiv.org/abs/2601.22813): 20 % with its forward pass)",
    "hot_16": "16 channels in bfloat16 ([CHON](https://arxiv.org/abs/2602.02047): 38 % with its other methods)",
    "hot_64": "64 channels in bfloat16",
    "mean_of_sequence": "x without its mean over each sequence",
    "mean_of_batch": "x without its mean over the batch ([Averis](https://arxiv.org/abs/2603.10444): 42, 26 %)",
    "search_x": "block scales of x searched",
    "search_w": "block scales of w searched",
    "search_both": "block scales of both searched",
    "row_x_search_w": "x row-scaled 4over6, block scales of w searched",
    "resets": "OsciReset of [TetraJet-v2](https://arxiv.org/abs/2510.27527): 51 % with its other methods",
}  # fmt: skip


def runs(arm: str, file: str = "metrics") -> list[dict[str, Any]]:
    return [run for run in load(f"pretrain_lm/{file}")["runs"] if run["arm"] == arm]


def losses(arm: str, file: str = "metrics") -> dict[int, float]:
    return {run["seed"]: run["val"][-1] for run in runs(arm, file)}


def percent(arm: str, other: str = "bf16", file: str = "metrics") -> list[float]:
    """How far the loss of an arm lies above that of another, by pair."""
    ours, theirs = losses(arm, file), losses(other, file)
    return [100 * (ours[seed] / theirs[seed] - 1) for seed in ours if seed in theirs]


def spread(values: list[float]) -> str:
    return f"± {stdev(values) / len(values) ** 0.5:.2f}" if values[1:] else "one seed"


def nats(arm: str) -> float:
    return fmean(loss - losses("bf16")[seed] for seed, loss in losses(arm).items())


def above(arm: str, other: str, file: str = "metrics") -> str:
    values = percent(arm, other, file)
    return "" if arm == other else f"{fmean(values):+.2f} {spread(values)}"


def pretraining() -> Iterable[Cells]:
    for arm in ARMS:
        loss = list(losses(arm).values())
        in_nats = "" if arm == "bf16" else f"{nats(arm):+.4f}"
        step = f"{median(1e3 * run['seconds'] / run['timed_steps'] for run in runs(arm)):.1f}"
        yield arm, str(len(loss)), f"{fmean(loss):.4f}", above(arm, "bf16"), in_nats, above(arm, "pretrain"), step


def methods() -> Iterable[Cells]:
    base, plain = losses("bf16", "methods"), losses("pretrain_4over6", "methods")
    steps: dict[str, str] = {}
    for run in load("steps_86m")["runs"]:
        times = {name: median(values) for name, values in run["milliseconds"].items()}
        for arm in filter(times.__contains__, METHODS):
            steps.setdefault(arm, f"{times[arm] / times['bf16']:.2f}")
    for arm, what in METHODS.items():
        loss, larger, longer = (losses(arm, file) for file in ("methods", "methods_12m", "methods_60"))
        closed = [100 * (plain[seed] - of_seed) / (plain[seed] - base[seed]) for seed, of_seed in loss.items()]
        of_arm = (above(arm, other, "methods") for other in ("bf16", "pretrain_4over6"))
        shown = "" if arm == "pretrain_4over6" else f"{fmean(closed):.1f} ± {stdev(closed) / len(closed) ** 0.5:.1f}"
        seeds = f"{len(loss)}; {len(larger)}" if larger else str(len(loss))
        of_larger = above(arm, "pretrain_4over6", "methods_12m") if larger else ""
        of_longer = above(arm, "pretrain_4over6", "methods_60") if longer else ""
        yield arm, what, seeds, *of_arm, shown, of_larger, of_longer, steps.get(arm, "")


def quantized_cells(rows: Sequence[Mapping[str, Any]]) -> Iterable[Cells]:
    """Rows of ``quantize_trained``: by size the loss above bfloat16 and the part of the gap that is closed."""

    def shown(value: Sequence[float | None] | None, form: str) -> str:
        if value is None:
            return ""
        mean, error = value
        return f"{mean:{form}}" + ("" if error is None else f" ± {error:{form.lstrip('+')}}")

    for row in rows[1:]:
        above, closed = row["gap_percent"], row.get("closed_percent", {})
        of_sizes = (cell for size in above for cell in (shown(above[size], "+.3f"), shown(closed.get(size), ".1f")))
        yield [row["quantized"], row["method"], *of_sizes, shown(closed.get("all"), ".1f")]


# Rows whose names begin with these are in the file alone.
UNSHOWN = ("16x16", "window64", "row-scaled 4over6 x by squares", "row-scaled 4over6 x, weighted", "search, squares")


def quantized_models() -> Iterable[Cells]:
    for cells in quantized_cells(load("pretrain_lm/quantized")["rows"]):
        unlike = cells[0] == "activations" and cells[1] in ("row-scaled", "row-scaled 4over6")
        if not unlike and not cells[1].startswith(UNSHOWN):
            yield cells


PEERS = ("bf16 cudnn", "bf16 torch cudnn", "bf16 torch flash")
KV4 = ("W4A16", "W4A4", "W4A16 KV4", "W4A4 KV4")


def caches() -> Iterable[Cells]:
    for file in ("h200_serve", "h200_serve_head", "h200_serve_lengths"):
        head = ", head too" if load(file)["head"] == "nvfp4" else ""
        for tokens, groups in load(file)["prompts"].items():
            for batch, *of in rates(groups, KV4):
                yield f"{batch}{head}", f"{int(tokens):,}", *of
    yield "perplexity", "", *(f"{of['perplexity']:.3f}" for of in load("cpu_serve_small")["text"].values())


def attention() -> Iterable[Cells]:
    """Microseconds; of ours, the speed of the fastest bfloat16 attention, and GB/s."""
    rows: dict[str, dict[str, Any]] = {}
    for row in load("h100_attention")["rows"]:
        rows.setdefault(row["case"], {})[row["op"]] = row
    for case, of in rows.items():
        if case.endswith("x2048") and case != "1x2048":
            continue
        peers = [f"{of[op]['median_us']:.1f}" if op in of else "" for op in PEERS]
        ours = [
            f"{row['median_us']:.1f} ({row['speed of the fastest bf16']:.2f})"
            for row in (of["nvfp4"], of["nvfp4 paged"])
        ]
        yield *(f"{int(n):,}" for n in case.split("x")), *peers, *ours, str(of["nvfp4"]["GB/s"])


def summary() -> Iterable[Cells]:
    """The first figures that a reader of README.md sees."""
    of_gemm = [row for row in load("h200_products")["rows"] if row["op"] in ("w4a4", "w4a16")]

    def faster(least: int, most: int) -> str:
        speeds = [row["speed of bf16"] for row in of_gemm if least <= int(row["case"].split("x")[0]) <= most]
        return f"{min(speeds):.1f} to {max(speeds):.1f}x"

    quantizer = float(cell("h200_quantize", "large", "nvfp4", "times naive"))
    decoding = load("h200_serve")["prompts"]["128"]["1"]["W4A16"]["times_bf16"]
    with_cache = load("h200_serve_lengths")["prompts"]["32704"]["8"]["W4A16 KV4"]["times_bf16"]
    _, (_, _, slower, *_) = training_steps()  # of pretrain
    gemm = f"{faster(1, 8)}; {faster(16, 64)}; {faster(128, 8192)} as fast"
    yield "memory of weights", f"{2 / 0.5625:.1f}x smaller: 0.5625 bytes per value"
    yield "GEMM with 4-bit weights, M up to 8; 16 to 64; 128 and more", gemm
    yield "`quantize`, 16384 x 6144", f"{quantizer:.1f}x as fast as the same in jitted `jax.numpy`"
    yield (
        "decoding Llama 3 8B sizes, 4-bit weights: one sequence; 8 of 32k tokens, NVFP4 KV cache too",
        f"{decoding:.1f}x; {with_cache:.1f}x as fast",
    )
    yield "training step, 86M parameters", f"{slower}x slower: Hopper has no FP4 tensor cores"


# ---------------------------------------------------------------- all tables
TABLES = {
    "summary": Table(" | ", summary, "README.md"),
    "quantize": Table(
        "16384 x 6144 bfloat16, amax given unless said otherwise | microseconds | GB/s | speedup over jitted jnp",
        operations("h200_quantize", "large", QUANTIZERS, "median_us", "GB/s", "times naive"),
    ),
    "gemm": Table("M | " + " | ".join(f"{shape(of)}: bfloat16 | W4A4 | W4A16" for of in LAYERS), products),
    "steady": Table("M | " + " | ".join(f"{shape(of)}: W4A4 | W4A16" for of in LAYERS), steady),
    "grouped": Table(
        "tokens | experts G x N x K | loop | `ragged_dot` | W4A4 | W4A16 | W4A4 pinned",
        cases("h200_grouped", EXPERTS, *GROUPED),
    ),
    "layers": Table(
        "M x N x K | bfloat16 | `pretrain` | `row_scaled` | `four_over_six` | `window64`",
        cases("h200_steps", LAYER_STEPS, ("linear bf16", "median_us"), *LAYER_RECIPES),
    ),
    "cpu": Table(
        "2048 x 4096 bfloat16, amax given | milliseconds | speedup over jitted jnp",
        operations("cpu_epyc_2cores_quantize", "cpu", ON_CPU, "milliseconds", "times naive"),
    ),
    "pretraining": Table(
        "arm | seeds | validation loss | above bf16, % | in nats | above pretrain, % | ms a step", pretraining
    ),
    "methods": Table(
        "arm | what it is; in its paper | seeds, 4.8; 12.4 M | above bf16, % | above pretrain_4over6, % | gap closed, %"
        " | 12.4 M: above pretrain_4over6, % | 60 tokens per parameter: above pretrain_4over6, %"
        " | 86 M: step over bf16's (of endings: one of the ending)",
        methods,
    ),
    "quantized": Table(
        "quantized | method | 4.8 M: above bf16, % | closed, % | 12.4 M: above bf16, % | closed, % | both: closed, %",
        quantized_models,
    ),
    "attention": Table(
        "sequences | tokens | bfloat16: cuDNN by JAX | by PyTorch | flash by PyTorch | NVFP4 | in pages | GB/s",
        attention,
    ),
    "caches": Table("sequences | tokens | bfloat16 | W4A16 | W4A4 | W4A16 KV4 | W4A4 KV4", caches),
    "sharded": Table(
        "GPUs | all-gather: bfloat16 | packed | FSDP: bfloat16 | NVFP4 | tensor parallel: bfloat16 | NVFP4",
        sharded_layers,
        "docs/sharding.md",
    ),
    "step": Table(" | bf16 | pretrain | pretrain_unbiased | pretrain_4over6 | rl", training_steps, "docs/training.md"),
}


def written(page: str, text: str) -> str:
    """Returns the text of a page with its tables written anew.

    Raises:
      ValueError: the comments of the page are not those of ``TABLES``, each once.
    """
    names = [name for _, name, _ in MARKED.findall(text)]
    wanted = [name for name, table in TABLES.items() if table.page == page]
    if sorted(names) != sorted(wanted):
        raise ValueError(f"{page} must have the tables {wanted}, each once, got {names}")
    return MARKED.sub(lambda found: found[1] + TABLES[found[2]].text(), text)


def stale(write: bool = False) -> list[str]:
    """Returns the pages whose tables differ from the results, after writing them anew if asked to."""
    found = []
    for page in sorted({table.page for table in TABLES.values()}):
        old = (ROOT / page).read_text()
        if (new := written(page, old)) != old:
            found.append(page)
            if write:
                (ROOT / page).write_text(new)
    return found

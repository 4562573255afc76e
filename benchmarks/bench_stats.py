"""The training step of examples/train_lm.py without statistics of its FP4 tensors, and with them in every layer.

Programs take turns, and a time is that of a step among some that run one after another, by the wall clock.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jnvfp4 import recipes

sys.path.append(str(Path(__file__).parents[1] / "examples"))  # for lm, the language model of the examples

STEPS, ROUNDS = 10, 6
MOST = 1.03  # times the step without statistics, on a GPU


def programs(case: str, size: str) -> dict[str, Callable[[], Any]]:
    """Returns functions that take a step, by what it collects, for a case MICROBATCHESxSEQUENCES."""
    from lm.model import init_params, make_probes, quantized_linear
    from lm.sharded import SIZES
    from lm.train import init_optimizer, make_train_step

    config, recipe = SIZES[size], recipes.pretrain()
    try:
        parts, sequences = map(int, case.split("x"))
    except ValueError:
        raise ValueError(f"a case must be MICROBATCHESxSEQUENCES, got {case!r}") from None
    batch = np.random.default_rng(0).integers(0, 256, (parts * sequences, config.seq + 1)).astype(np.uint8)
    step = make_train_step(quantized_linear(recipe), config, 0, recipe, parts)

    def run(probes: Any) -> Callable[[], Any]:
        params = init_params(jax.random.key(0), config)
        held = [params, init_optimizer(params, recipe)]

        def take() -> Any:
            held[0], held[1], loss, found = step(held[0], held[1], jnp.asarray(batch), probes)
            return loss, found

        return take

    return {"none": run(None), "on": run(make_probes(config))}


def measure(case: str, size: str) -> list[dict[str, Any]]:
    steps = programs(case, size)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(ROUNDS + 1):
        for name, take in steps.items():
            begin = time.perf_counter()
            for _ in range(STEPS):
                last = take()
            jax.block_until_ready(last)
            if turn:  # the first compiles
                times[name].append((time.perf_counter() - begin) / STEPS)
    rows = []
    for name, of in times.items():
        ratio = statistics.median(of) / statistics.median(times["none"])
        row = {"case": case, "op": f"statistics {name}", "median_us": round(1e6 * statistics.median(of), 1)}
        row |= {"clock": "wall", "time of none": round(ratio, 4)}
        judged = name == "on" and size == "gpu"
        rows.append(row | ({"target": MOST, "met": ratio <= MOST} if judged else {}))
    return rows


def run(cases: list[str] | None) -> Iterator[list[dict[str, Any]]]:
    """Yields the rows of a case when they are measured: of the 86 M preset on a GPU, of the small one on a CPU."""
    size = "cpu" if jax.default_backend() == "cpu" else "gpu"
    for case in cases or (["1x16"] if size == "cpu" else ["1x32", "4x8"]):
        yield measure(case, size)

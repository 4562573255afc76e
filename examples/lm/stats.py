"""Statistics of the FP4 tensors of the linear layers over the steps of a run: a JSON and a picture."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from jnvfp4 import stats
from lm.model import PROJECTIONS, Tree

NUMBERS = {"underflow_share": "nonzero elements that became 0, %", "relative_error": "relative error, %"}
OPERANDS = {"x": "x (fprop)", "w": "w (fprop)", "dy": "dy (dgrad)"}


def summary(found: dict[int, Tree]) -> dict[str, Any]:
    """Returns the contents of a JSON: steps, layers, and by operand and number a list [steps, layers].

    ``found`` holds gradients of probes by step. A layer is the number of its block and the name of its weights; layers
    stand in the order of the model.
    """
    # [steps, blocks, names, 3, 7]
    gradients = np.stack([np.stack([np.asarray(of[name]) for name in PROJECTIONS], 1) for of in found.values()])
    blocks = gradients.shape[1]
    read = stats.read(gradients.reshape(len(found), -1, *gradients.shape[-2:]))
    return {
        "steps": list(found),
        "layers": [f"{block}/{name}" for block in range(blocks) for name in PROJECTIONS],
        **{operand: {k: v.tolist() for k, v in asdict(of).items()} for operand, of in read._asdict().items()},
    }


def plot(path: Path, title: str, summary: dict[str, Any]) -> None:
    """Draws heat maps of layers and steps: a row for each number, a column for each operand, one color scale a row."""
    steps, layers = summary["steps"], summary["layers"]
    size = 13, 1 + max(3.0, 0.09 * len(layers)) * len(NUMBERS)
    figure, rows = plt.subplots(len(NUMBERS), len(OPERANDS), figsize=size, sharey=True, layout="constrained")
    for (number, label), row in zip(NUMBERS.items(), rows, strict=True):
        values = {operand: 100 * np.array(summary[operand][number]).T for operand in OPERANDS}
        calls = {operand: np.array(summary[operand]["calls"]).T for operand in OPERANDS}
        most = max(np.nanmax(v, initial=0, where=calls[operand] > 0) for operand, v in values.items())
        for (operand, name), axes in zip(OPERANDS.items(), row, strict=True):
            shown = np.where(calls[operand] > 0, values[operand], np.nan)
            image = axes.imshow(
                shown, aspect="auto", interpolation="nearest", origin="upper", cmap="viridis", vmin=0, vmax=most or 1
            )
            axes.set_title(name if np.isfinite(shown).any() else f"{name}: not quantized")
            ticks = np.unique(np.linspace(0, len(steps) - 1, min(6, len(steps))).astype(int))
            axes.set_xticks(ticks, [steps[i] for i in ticks])
            axes.set_xlabel("step")
        row[0].set_yticks(range(len(layers)), layers, fontsize=6 if len(layers) > 12 else 9)
        figure.colorbar(image, ax=list(row), label=label)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)

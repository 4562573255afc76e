"""The sizes of a language model and of its training."""

import argparse
from dataclasses import dataclass
from typing import Literal, NamedTuple


class RotaryScaling(NamedTuple):
    """Says how Llama 3.1 and later stretch rotary positions ("llama3" in their configs).

    Attributes:
      factor: what the slowest angles are divided by.
      low, high: how often an angle turns in ``positions`` tokens: at most ``low`` it is divided, from ``high`` on it is
        not, and between them in part.
      positions: tokens of the sequences that the model was first trained on.
    """

    factor: float
    low: float
    high: float
    positions: float


@dataclass(frozen=True)
class Config:
    """Holds the sizes of a transformer and of its training.

    Attributes:
      layers: number of transformer blocks.
      width: size of the residual stream.
      heads: number of query heads.
      seq: tokens in a sequence.
      batch: sequences in a training step.
      steps: number of training steps.
      peak_lr: the largest learning rate, reached after the warmup.
      val_batches: number of batches that a validation loss is the mean of.
      kv_heads: number of key and value heads; each serves heads / kv_heads query heads.
      mlp_width: size of the hidden layer of the MLP.
      architecture: "gpt" has learned positions and a GELU MLP, "llama" rotary positions and a SwiGLU MLP.
      vocabulary: number of tokens: bytes, or those of a tokenizer.
      last_lr: where the learning rate ends, as a fraction of its peak.
      rotary_base: of the angles by which rotary positions turn.
      norm_epsilon: what norms add to the mean square.
      rotary_scaling: of the angles, if any.
      head_size: elements of a head, if they are not width / heads.
      tied: whether the embedding is the output head, too.
    """

    layers: int
    width: int
    heads: int
    seq: int
    batch: int
    steps: int
    peak_lr: float
    val_batches: int
    kv_heads: int
    mlp_width: int
    architecture: Literal["gpt", "llama"] = "gpt"
    vocabulary: int = 256
    last_lr: float = 0.1
    rotary_base: float = 10_000.0
    norm_epsilon: float = 1e-6
    rotary_scaling: RotaryScaling | None = None
    head_size: int | None = None
    tied: bool = False

    @property
    def head_dim(self) -> int:
        return self.head_size or self.width // self.heads

    @property
    def log_every(self) -> int:
        """Steps between two points of the training curve."""
        return max(1, self.steps // 50)

    @property
    def val_every(self) -> int:
        """Steps between two points of the validation curve."""
        return 5 * self.log_every


def step_count(value: str) -> int:
    """Reads an argument that counts, such as --steps."""
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more, got {value}")
    return int(value)

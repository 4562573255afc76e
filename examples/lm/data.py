"""Batches of bytes from the source code of Python's standard library: text that every machine has."""

import sysconfig
from pathlib import Path

import numpy as np

from lm.config import Config


def stdlib_text() -> tuple[np.ndarray, np.ndarray]:
    """Returns the bytes of the standard library's sources: of the first 95% of the files, and of the rest."""
    root = Path(sysconfig.get_paths()["stdlib"])
    excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    names = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    names = [name for name in names if not excluded.intersection(name.parts)]
    texts = [(root / name).read_bytes() for name in names]
    split = len(texts) * 95 // 100
    train, val = (np.frombuffer(b"".join(part), np.uint8) for part in (texts[:split], texts[split:]))
    return train, val


def windows(text: np.ndarray, starts: np.ndarray, seq: int) -> np.ndarray:
    """Cuts [batch, seq + 1] bytes out of the text: inputs and, one to the right, targets."""
    return text[starts[:, None] + np.arange(seq + 1)]


def train_batch(text: np.ndarray, config: Config, seed: int, step: int) -> np.ndarray:
    """Draws [batch, seq + 1] bytes. They depend on the seed and the step alone, so all runs see the same batches."""
    starts = np.random.default_rng((seed, step)).integers(len(text) - config.seq, size=config.batch)
    return windows(text, starts, config.seq)


def spread(text: np.ndarray, count: int, length: int) -> np.ndarray:
    """Cuts [count, length] bytes or tokens, evenly spaced over the text.

    Raises:
      ValueError: the text is shorter than one of them.
    """
    if len(text) < length:
        raise ValueError(f"the text must have {length} tokens or more, got {len(text)}")
    return windows(text, np.linspace(0, len(text) - length, count).astype(int), length - 1)


def val_batches(text: np.ndarray, config: Config) -> np.ndarray:
    """Cuts [val_batches, batch, seq + 1] bytes or tokens, evenly spaced over the validation text.

    Raises:
      ValueError: the text is shorter than a sequence and its last target.
    """
    sequences = spread(text, config.val_batches * config.batch, config.seq + 1)
    return sequences.reshape(config.val_batches, config.batch, -1)

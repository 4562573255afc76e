"""Small checkpoints that several test modules share, and what becomes of a bad one."""

import json
import os
import re
import struct
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

from jnvfp4.checkpoints._files.safetensors import TAGS, Planned, writing
from jnvfp4.cli import main

GOLDEN = Path(__file__).parent / "data" / "checkpoints"
TE_MODELOPT = GOLDEN / "llama" / "te_modelopt"
INDEX = "model.safetensors.index.json"
GATE, UP, DOWN = (f"model.layers.0.mlp.{role}_proj.weight" for role in ("gate", "up", "down"))
COMMAND = (sys.executable, "-c", "import sys; from jnvfp4.cli import main; sys.exit(main())")


def environment() -> dict[str, str]:
    """For a process that converts: the platform it uses, and not the eight devices of the tests."""
    return {name: v for name, v in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}


def draw_nothing(monkeypatch) -> None:
    """Reports have no picture from now on, which takes long."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


def write(path, tensors, metadata=None):
    """One file; tensors are (safetensors dtype, array) by name."""
    plan = [Planned(n, t, np.shape(a)) for n, (t, a) in tensors.items()]
    with writing(path, plan, metadata or {"format": "pt"}) as out:
        for name, (_, a) in tensors.items():
            out.put(name, np.asarray(a))


def write_model(directory, shards, config=None) -> Path:
    """A directory of files, of which each is tensors by name; an index where they are several."""
    directory.mkdir(parents=True)
    for name, tensors in shards.items():
        write(directory / name, tensors)
    config = {"model_type": "llama", "num_hidden_layers": 1} if config is None else config
    (directory / "config.json").write_text(json.dumps(config))
    if len(shards) > 1:
        places = {tensor: name for name, tensors in shards.items() for tensor in tensors}
        (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return directory


def model_of(directory, tensors, config=None) -> Path:
    """A model in one file; tensors are arrays, or (safetensors dtype, array), by name."""
    pairs = {name: t if isinstance(t, tuple) else (TAGS[t.dtype], t) for name, t in tensors.items()}
    return write_model(directory, {"model.safetensors": pairs}, config)


def weight(rows, k, seed=0):
    rng = np.random.default_rng(seed)
    return "BF16", rng.normal(size=(rows, k)).astype(np.float32).astype(ml_dtypes.bfloat16)


def array(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(ml_dtypes.bfloat16)


def same(a, b) -> None:
    """Trees of the same structure with the same bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def files_of(directory) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir()}


def header_of(data: bytes) -> tuple[dict, bytes]:
    """The header of a file, and its data."""
    n = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + n]), data[8 + n :]


def with_header(text: str | bytes, data: bytes) -> bytes:
    body = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(body)) + body + data


def damaged_header(path, change):
    """`change` alters the header in place, or returns the text to put there."""
    header, data = header_of(path.read_bytes())
    text = change(header)
    path.write_bytes(with_header(json.dumps(header) if text is None else text, data))


def refused(directory, tmp_path, text, code, *arguments, capsys, out=None) -> str:
    """The command ends with this code and a line that matches `text`, and leaves no output."""
    out = tmp_path / "out" if out is None else out
    capsys.readouterr()
    assert main(["convert", str(directory), str(out), *arguments]) == code
    error = capsys.readouterr().err
    line, *hint = error.rstrip("\n").split("\n")
    assert line.startswith("error: ")
    assert not hint or (len(hint) == 1 and hint[0].startswith("hint: ")), error
    assert re.search(text, error), error
    assert not out.is_dir() or not list(out.iterdir())
    return error

"""Conversion of a checkpoint made for the purpose: rate, memory, and what the disk alone would allow; verification.

Each conversion is a process of its own, whose peak memory is its own. The files that are verified by names and scales
alone have holes in place of all else, and take little room.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import accumulate
from statistics import median
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jnvfp4.checkpoints import ConvertOptions, verify_checkpoint
from jnvfp4.checkpoints._convert.plan import make_plan
from jnvfp4.checkpoints._files.safetensors import Planned, header_bytes, writing
from jnvfp4.checkpoints._files.source import open_source

HIDDEN, MLP = 4096, 14336  # of an 8 B Llama
LAYERS, EXPERTS, EXPERT = 48, 128, (2048, 1408)  # of what is verified: 18,624 weights, 30 GB in NVFP4
SHARD_BYTES = 5_000_000_000
CHUNK = 64 << 20

_CHILD = """
import json, resource, sys, time
import jax
from benchmarks.device_time import profile_calls
from jnvfp4.checkpoints import convert_checkpoint
source, output, platform, profile = sys.argv[1:]
device = jax.devices(platform)[0]
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.perf_counter()
def convert():
    return convert_checkpoint(source, output, device=device, workers=4 if platform == "cuda" else 2) and None
out = {}
if profile == "1":
    call = profile_calls([convert])[0]
    out["device_s"] = call.busy_us / 1e6
else:
    convert()
out |= {"s": time.perf_counter() - began, "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base}
print(json.dumps(out))
"""


def run(gigabytes: float, folder: pathlib.Path | None) -> list[dict[str, Any]]:
    """Rows as the other suites have them; the checkpoint is made in `folder` and removed."""
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        root = pathlib.Path(directory)
        case, source = f"{gigabytes:g} GB", root / "source"
        nbytes = make(source, gigabytes)
        rows = [_row(case, "write to disk", nbytes, _write(root, nbytes))]
        _forget(source)
        rows.append(_row(case, "read, cold", nbytes, _read(source)))
        rows.append(_row(case, "read, warm", nbytes, _read(source)))
        for platform in ("cpu", *(["cuda"] if jax.default_backend() == "gpu" else [])):
            for profile in (False, True) if platform == "cuda" else (False,):
                out = _convert(source, root / "out", platform, profile)
                op = f"convert, {platform}, warm" + (", profiled" if profile else "")
                row = _row(case, op, nbytes, out["s"])
                row["peak RSS over start, MB"] = round(out["rss"] / 1e3)
                if "device_s" in out:
                    row["share of time on the device, copies included"] = round(out["device_s"] / out["s"], 4)
                rows.append(row)
        rows.append(_verify(root))
        return rows


def _row(case: str, op: str, nbytes: int, seconds: float) -> dict[str, Any]:
    return {
        "case": case,
        "op": op,
        "median_us": round(seconds * 1e6, 1),
        "clock": "wall",
        "bytes": nbytes,
        "GB/s": round(nbytes / seconds / 1e9, 2),
    }


# ---------------------------------------------------------------- a checkpoint
def _layer(i: int) -> dict[str, tuple[int, ...]]:
    prefix, kv = f"model.layers.{i}", HIDDEN // 4
    attention = {"q_proj": HIDDEN, "k_proj": kv, "v_proj": kv, "o_proj": HIDDEN}
    return {
        **{f"{prefix}.self_attn.{role}.weight": (n, HIDDEN) for role, n in attention.items()},
        f"{prefix}.mlp.gate_proj.weight": (MLP, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": (MLP, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": (HIDDEN, MLP),
        f"{prefix}.input_layernorm.weight": (HIDDEN,),
    }


def make(directory: pathlib.Path, gigabytes: float) -> int:
    """Writes a Llama of about so many bytes in bfloat16, of random numbers; returns how many."""
    each = sum(2 * int(np.prod(s)) for s in _layer(0).values())
    layers = max(1, round(gigabytes * 1e9 / each))
    tensors = {name: shape for i in range(layers) for name, shape in _layer(i).items()}
    rng = np.random.default_rng(0)
    noise = (0.02 * rng.standard_normal(1 << 24, np.float32)).astype(ml_dtypes.bfloat16)
    directory.mkdir()
    shards = list(_shards(tensors))
    places: dict[str, str] = {}
    for n, names in enumerate(shards):
        file = f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors"
        with writing(directory / file, [Planned(k, "BF16", tensors[k]) for k in names], {"format": "pt"}) as out:
            for name in names:
                first = int(rng.integers(1 << 20))
                out.put(name, np.resize(noise[first:], tensors[name]))
        places |= dict.fromkeys(names, file)
    total = layers * each
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"model_type": "llama", "num_hidden_layers": layers, "hidden_size": HIDDEN, "intermediate_size": MLP}
    (directory / "config.json").write_text(json.dumps(config))
    return total


def _shards(tensors: dict[str, tuple[int, ...]]) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, shape in tensors.items():
        names.append(name)
        size += 2 * int(np.prod(shape))
        if size > SHARD_BYTES:
            yield names
            names, size = [], 0
    if names:
        yield names


# ---------------------------------------------------------------- verification by names and scales
def _verify(root: pathlib.Path) -> dict[str, Any]:
    """Times a verification of a mixture of experts as vLLM loads it, three times."""
    source, output = root / "experts", root / "experts-nvfp4"
    (hidden, mlp), shapes = EXPERT, dict[str, tuple[int, ...]]()
    for i in range(LAYERS):
        shapes |= {f"model.layers.{i}.self_attn.{role}_proj.weight": (hidden, hidden) for role in "qkvo"}
        for parent in (f"model.layers.{i}.mlp.experts.{e}" for e in range(EXPERTS)):
            shapes |= {f"{parent}.{role}_proj.weight": (mlp, hidden) for role in ("gate", "up")}
            shapes[f"{parent}.down_proj.weight"] = (hidden, mlp)
    _sparse(source, [Planned(name, "BF16", shape) for name, shape in shapes.items()])
    (source / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_hidden_layers": LAYERS}))
    plan = make_plan(open_source(source), ConvertOptions())
    _sparse(output, [p for items in plan.shards.values() for item in items for p in item.outputs])
    for name, value in plan.files.items():
        (output / name).write_text(json.dumps(value))
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        assert len(verify_checkpoint(source, output, loader="vllm", scales_only=True)) == len(shapes)
        seconds.append(time.perf_counter() - began)
    case = f"{plan.nbytes / 1e9:.0f} GB, {len(shapes)} weights"
    return {
        "case": case,
        "op": "verify --as vllm --scales-only",
        "median_us": round(1e6 * median(seconds), 1),
        "clock": "wall",
    }


def _sparse(directory: pathlib.Path, tensors: Iterable[Planned]) -> None:
    """Writes one file of tensors that are holes, but for numbers in float32, which are 1."""
    tensors = sorted(tensors, key=lambda t: t.name)
    head = header_bytes(tensors, {"format": "pt"})
    *begins, end = accumulate((t.nbytes for t in tensors), initial=len(head))
    directory.mkdir()
    with open(directory / "model.safetensors", "wb") as file:
        file.write(head)
        file.truncate(end)
        for tensor, begin in zip(tensors, begins, strict=True):
            if tensor.tag == "F32":
                file.seek(begin)
                file.write(np.ones(tensor.shape, np.float32).tobytes())


# ---------------------------------------------------------------- what the disk allows
def _write(directory: pathlib.Path, nbytes: int) -> float:
    """Seconds to write so many bytes to a file and to the disk."""
    data, path = np.random.default_rng(0).bytes(CHUNK), directory / "file"
    began = time.perf_counter()
    with open(path, "wb") as file:
        for _ in range(-(-nbytes // CHUNK)):
            file.write(data)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    path.unlink()
    return seconds * nbytes / (-(-nbytes // CHUNK) * CHUNK)


def _forget(directory: pathlib.Path) -> None:
    """Asks the system to drop what its page cache has of the files."""
    for path in directory.iterdir():
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(directory: pathlib.Path) -> float:
    buffer = memoryview(bytearray(CHUNK))
    began = time.perf_counter()
    for path in sorted(directory.glob("*.safetensors")):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - began


def _convert(source: pathlib.Path, out: pathlib.Path, platform: str, profile: bool) -> dict[str, float]:
    paths = (str(p.absolute()) for p in (source, out))
    command = [sys.executable, "-c", _CHILD, *paths, platform, str(int(profile))]
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    root = pathlib.Path(__file__).parents[1]  # where the child finds this package
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env, cwd=root)
    shutil.rmtree(out)
    return json.loads(done.stdout.splitlines()[-1])

"""Damaged headers and index files by the thousand: a result or one of our errors, in time, and nothing left behind."""

import collections
import json
import random
import shutil
import signal
import tempfile
import tracemalloc
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from checkpoints import DOWN, GATE, INDEX, UP, files_of, header_of, weight, with_header, write_model

from jnvfp4.checkpoints import CheckpointError, ConvertOptions, convert_checkpoint, fix_checkpoint, lint
from jnvfp4.checkpoints._files.safetensors import DTYPES, Planned
from jnvfp4.checkpoints.compare import inspect
from jnvfp4.checkpoints.rewrite import dequantize_checkpoint
from jnvfp4.checkpoints.verify import verify_checkpoint

ROUNDS = 150  # of the short ones
SLOWEST = 20  # seconds of one case, on a machine that does something else too
A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
EXPERTS = "model.layers.0.mlp.experts.down_proj"
Files = dict[str, bytes]


# ---------------------------------------------------------------- what is damaged
def sources(directory: Path) -> list[Files]:
    """A model of two shards with an index, and what it becomes in every layout."""
    shards = {
        A: {GATE: weight(16, 32), UP: weight(16, 32, 1), EXPERTS: ("F32", np.ones((2, 16, 32), np.float32))},
        B: {
            DOWN: weight(32, 16, 2),
            "model.norm.weight": ("F64", np.ones(32)),
            "model.empty": ("F16", np.ones((0, 3), np.float16)),
            "lm_head.weight": weight(3, 5),
        },
    }
    model = write_model(directory / "in", shards, {"model_type": "qwen3_moe", "num_hidden_layers": 1})
    found = [files_of(model)]
    for f in ("modelopt", "compressed-tensors", "te"):
        ignore = (EXPERTS,) if f == "compressed-tensors" else ()
        convert_checkpoint(model, directory / f, ConvertOptions(layout=f, ignore=ignore))
        found.append(files_of(directory / f))
    return found


# ---------------------------------------------------------------- damage
NASTY: list[Any] = [
    None, True, -1, 0, 1, 15, 16, 17, 1 << 31, 1 << 40, (1 << 61) - 1, 1 << 62, 1 << 63, 1 << 64, 10**400, 0.5, 1e308,
    "", "x", "..", "../x", "/etc/passwd", "a/b", "\0", "\n", "\ud800", "é", "x" * 300, "*", "re:(", A, B, "config.json",
    INDEX, GATE, DOWN, EXPERTS, "model.layers." + "9" * 5000 + ".mlp.down_proj.weight", "__metadata__", ".weight",
    [], {}, [[]], [0] * 100, [1 << 61] * 40, {"a": {"b": []}}, *DTYPES, "F4", "bf16",
]  # fmt: skip
BYTES = [b"", b"\0", b"\xff", b'"', b"{", b"}", b"[" * 3000, b"]", b",", b":", b"-", b"9" * 20, b"\\ud800", b"e", b" "]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container of a JSON value with each of its keys."""
    out: list[tuple[Any, Any]] = []
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        out += [(value, key), *places(value[key])]
    return out


def damage_json(value: Any, rng: random.Random) -> None:
    """Replaces, removes, renames or moves something in it."""
    container, key = rng.choice(places(value) or [(value, "x")])
    kind = rng.randrange(6)
    if kind == 0:
        container.pop(key, None) if isinstance(container, dict) else container.pop(key)
    elif kind == 1 and isinstance(container, dict):
        container[str(rng.choice(NASTY))] = container.pop(key, None)
    elif kind == 2:
        _, other = rng.choice(places(value) or [(None, None)])
        copied = [v[k] for v, k in places(value) if k == other and not isinstance(v[k], dict | list)]
        container[key] = rng.choice(copied or NASTY)
    elif kind == 3 and isinstance(container, dict) and isinstance(container.get(key), int):
        container[key] += rng.choice([-2, -1, 1, 2])
    elif kind == 4 and isinstance(container, list):
        container[key] = rng.choice([n + d for n in container if isinstance(n, int) for d in (-1, 0, 1)] or [0])
    else:
        container[key] = rng.choice(NASTY)


def damage_bytes(data: bytes, rng: random.Random, most: int | None = None) -> bytes:
    """Changes, inserts, removes or cuts off a few bytes, the first of them before `most`."""
    at = rng.randrange(max(1, min(len(data), most or len(data))))
    kind = rng.randrange(5)
    if kind == 0:
        return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    if kind == 1:
        return data[:at] + rng.choice(BYTES) + data[at:]
    if kind == 2:
        return data[:at] + data[at + rng.choice([1, 2, 8, 100]) :]
    if kind == 3:
        return data[:at]
    end = at + rng.randrange(40)
    return data[:end] + data[at:end] + data[end:]


def damage(files: Files, rng: random.Random) -> Files:
    """The files with one to three things changed."""
    files = dict(files)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        name = rng.choice([n for n in files if n.endswith(".safetensors") or n == INDEX] or list(files))
        data, kind = files[name], rng.randrange(10)
        if kind == 0:
            files[name] = damage_bytes(data, rng)
        elif kind == 1:
            files[rng.choice([A, B, INDEX, "config.json", "other.safetensors"])] = files.pop(name)
        elif kind == 2 and len(data) > 8:
            length = rng.choice([*(n for n in NASTY if type(n) is int and 0 <= n < 1 << 64), len(data), len(data) - 8])
            files[name] = length.to_bytes(8, "little") + data[8:]
        elif kind < 5:
            files[name] = damage_bytes(data, rng, 1000)
        else:
            files[name] = damaged_text(name, data, rng)
    return files


def damaged_text(name: str, data: bytes, rng: random.Random) -> bytes:
    try:
        value, rest = (json.loads(data), None) if name == INDEX else header_of(data)
    except (ValueError, RecursionError):
        return damage_bytes(data, rng)
    if not isinstance(value, dict):
        return damage_bytes(data, rng)
    damage_json(value, rng)
    text = json.dumps(value).encode()
    return text if rest is None else with_header(text, rest)


# ---------------------------------------------------------------- what comes of it
@contextmanager
def time_limit(seconds: int):
    def stop(*_):
        raise AssertionError(f"takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def convert(src: Path, out: Path) -> None:
    convert_checkpoint(src, out, ConvertOptions(expert_layout="nk"))
    verify_checkpoint(src, out, float("inf"))


def read(src: Path, out: Path) -> None:
    inspect(src)
    dequantize_checkpoint(src, out)


def mend(src: Path, out: Path) -> None:
    """A checkpoint that is mended opens for `lint`; one that needs nothing is not written."""
    lint(out if fix_checkpoint(src, out, warn=lambda text: None) else src)
    out.mkdir(exist_ok=True)


def error_of(run: Callable[[Path, Path], None], src: Path, out: Path) -> CheckpointError | None:
    try:
        run(src, out)
    except CheckpointError as e:
        return e
    return None


def outcome(files: Files, run: Callable[[Path, Path], None]) -> str:
    """`success`, or the code of the error; anything else is raised. Of an error no output is left."""
    folder = Path(tempfile.mkdtemp())
    src, out = folder / "in", folder / "out"
    try:
        src.mkdir()
        for name, data in files.items():
            (src / name).write_bytes(data)
        with time_limit(SLOWEST):
            error = error_of(run, src, out)
        if error is not None:
            assert not out.exists() or not list(out.iterdir()), f"left behind: {list(out.iterdir())}"
            assert len(str(error).split("\n")) <= 2
            assert len(str(error)) < 2100
            return error.code.name
        assert not [p.name for p in out.iterdir() if ".tmp-" in p.name or p.name.startswith(".")]
        return "success"
    finally:
        shutil.rmtree(folder)


EXPECTED = {"success", "BAD_INPUT", "IO"}


def fuzz(found: list[Files], seed: int) -> str:
    """One case, which the seed is all of."""
    rng = random.Random(seed)
    files = rng.choice([found[0], rng.choice(found)])
    run = convert if files is found[0] else read
    got = outcome(damage(files, rng), run)
    assert got in EXPECTED or (run is convert and got == "USAGE"), got  # which is that nothing is left to quantize
    return f"{run.__name__}: {got}"


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[Files]:
    return sources(tmp_path_factory.mktemp("fuzz"))


def test_files_as_they_are(found):
    assert outcome(found[0], convert) == "success"
    assert [outcome(files, read) for files in found[1:]] == ["success"] * 3


def test_damaged_files(found):
    counts = collections.Counter(fuzz(found, seed) for seed in range(ROUNDS))
    for run in ("convert", "read"):
        assert counts[f"{run}: BAD_INPUT"] > counts[f"{run}: success"] > 0, counts


def test_damaged_files_are_linted(found):
    """Configs in turn with other files."""
    counts = collections.Counter[str]()
    for seed in range(2 * ROUNDS):
        rng = random.Random(seed)
        files = dict(rng.choice(found[1:]))
        name = rng.choice([n for n in files if n.endswith("config.json")])
        config = json.loads(files[name])
        damage_json(config, rng)
        files = {**files, name: json.dumps(config).encode()} if seed % 2 else damage(files, rng)
        counts[outcome(files, mend)] += 1
    assert counts.keys() <= EXPECTED
    assert min(counts["success"], counts["BAD_INPUT"]) > ROUNDS / 3


@pytest.mark.long
def test_damaged_files_for_long(found):
    for seed in range(ROUNDS, 20 * ROUNDS):
        fuzz(found, seed)


# Bits of a signaling NaN, infinity, the largest number and the smallest, of which processors warn in different ways.
ODD_BITS = {
    "F64": (0x7FF << 52 | 1, 0x7FF << 52, (0x7FF << 52) - 1, 1),
    "F32": (0x7F800001, 0x7F800000, 0x7F7FFFFF, 1),
    "BF16": (0x7F81, 0x7F80, 0x7F7F, 1),
    "F16": (0x7C01, 0x7C00, 0x7BFF, 1),
    "F8_E4M3": (0x7F, 0xFF, 0x7E, 1),
}


@pytest.mark.parametrize("kind", range(4), ids=["signaling NaN", "infinity", "largest", "smallest"])
def test_odd_values_raise_no_warning(found, kind):
    """The first value of each tensor in turn, in weights, scales and what is copied."""
    counts = collections.Counter[str]()
    for files in found:
        for name in [n for n in files if n.endswith(".safetensors")]:
            for entry in header_of(files[name])[0].values():
                if ODD_BITS.get(entry.get("dtype")) and np.prod(entry["shape"]):
                    begin, size = entry["data_offsets"][0], DTYPES[entry["dtype"]].itemsize
                    at = len(files[name]) - len(header_of(files[name])[1]) + begin
                    value = ODD_BITS[entry["dtype"]][kind].to_bytes(size, "little")
                    damaged = {**files, name: files[name][:at] + value + files[name][at + size :]}
                    counts.update(outcome(damaged, run) for run in ([convert] if files is found[0] else [read, mend]))
    assert counts.keys() <= {*EXPECTED, "VERIFICATION"}
    assert counts["success"] > 30


# ---------------------------------------------------------------- headers of any kind
numbers = st.one_of(st.integers(-2, 40), st.sampled_from([n for n in NASTY if isinstance(n, int)]))
texts = st.one_of(st.text(max_size=8), st.sampled_from([n for n in NASTY if isinstance(n, str)]))
anything = st.recursive(
    st.one_of(st.none(), numbers, st.floats(), texts),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "F5"]) | anything,
        "shape": st.lists(st.sampled_from([0, 1, 2, 16, 32]), max_size=4) | st.lists(numbers, max_size=4) | anything,
        "data_offsets": st.tuples(numbers, numbers).map(list) | anything,
    }
)
names = st.sampled_from([GATE, UP, DOWN, EXPERTS, "__metadata__"]) | texts
headers = anything | st.dictionaries(names, entries | anything, max_size=4)
indices = anything | st.fixed_dictionaries({"weight_map": st.dictionaries(names, texts | st.just(A), max_size=4)})


def consistent(shapes: dict[str, tuple[str, list[int]]]) -> bytes:
    """A file of zeros with these tensors one after the other."""
    header, offset = {}, 0
    for name, (tag, shape) in shapes.items():
        size = Planned("", tag, tuple(shape)).nbytes
        header[name] = {"dtype": tag, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    return with_header(json.dumps(header), bytes(offset))


small = st.lists(st.sampled_from([0, 1, 2, 3, 16, 32]), max_size=4)
valid = st.dictionaries(
    names.filter(lambda n: n not in ("__metadata__", "\ud800")),
    st.tuples(st.sampled_from(list(DTYPES)), small), min_size=1, max_size=5,
)  # fmt: skip

short = hypothesis.settings(max_examples=40, deadline=None, derandomize=True, database=None)


@short
@hypothesis.given(headers, st.binary(max_size=40))
def test_headers_of_any_kind(header, data):
    files = {"model.safetensors": with_header(json.dumps(header), data)}
    assert outcome(files, convert) in EXPECTED
    assert outcome(files, read) in EXPECTED


@short
@hypothesis.given(indices)
def test_index_files_of_any_kind(index):
    files = {A: consistent({DOWN: ("F32", [16, 32])}), INDEX: json.dumps(index).encode()}
    assert outcome(files, convert) in EXPECTED


@short
@hypothesis.given(valid)
def test_tensors_of_any_kind(shapes):
    shapes = {"x.o_proj.weight": ("F32", [16, 32]), **shapes}
    assert outcome({"model.safetensors": consistent(shapes)}, convert) in EXPECTED


# ---------------------------------------------------------------- memory
ABSURD = {
    "header length": (1 << 62).to_bytes(8, "little") + b"{}",
    "header length, nearly accepted": (99_999_999).to_bytes(8, "little") + b"{}",
    "shape": with_header('{"a":{"dtype":"F32","shape":[1099511627776,16],"data_offsets":[0,4]}}', bytes(4)),
    "empty shape": with_header('{"a.weight":{"dtype":"F32","shape":[0,1099511627776],"data_offsets":[0,0]}}', b""),
    "axes": with_header('{"a":{"dtype":"F32","shape":[%s1],"data_offsets":[0,4]}}' % ("1," * 200_000), bytes(4)),
    "offsets": with_header('{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,9999999999999]}}', b""),
    "nesting": with_header('{"a":' * 200_000, b""),
    "number": with_header('{"a":%s}' % ("9" * 1_000_000), b""),
}


@pytest.mark.parametrize("case", ABSURD)
def test_absurd_headers_take_little_memory(case):
    files = {"model.safetensors": ABSURD[case]}
    tracemalloc.start()
    try:
        got = outcome(files, convert)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert got == ("USAGE" if case == "empty shape" else "BAD_INPUT")
    assert peak < 40e6

"""Makes the vectors of jnvfp4/conformance, and records what other libraries give for them.

python -m benchmarks.conformance make
python -m benchmarks.conformance qwix --out qwix.npz && python jnvfp4/conformance qwix.npz
"""

import argparse
import importlib.metadata
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jnvfp4.conformance import __main__ as conformance
from jnvfp4.conformance.__main__ import BLOCK, E2M1, E4M3, VECTORS, Arrays, Case, F, pack, run, widened

DATA = Path(__file__).parent.parent / "tests" / "data"
VERSION = "1"
PLAIN = {
    "transpose": False,
    "scope": "tensor",
    "block_rows": 1,
    "rht": False,
    "select": "max6",
    "error_math": "fp32",
    "e4m3_max": 448,
    "rounding": "nearest",
    "headroom": False,
}


# ---------------------------------------------------------------- vectors
def beside(numbers: np.ndarray) -> np.ndarray:
    """Numbers, their neighbours in float32, and the negatives of all."""
    numbers = np.asarray(numbers, F)
    near = np.concatenate([numbers, np.nextafter(numbers, F(np.inf)), np.nextafter(numbers, F(0))])
    return np.concatenate([near, -near])


def middles(table: np.ndarray) -> np.ndarray:
    return (table[1:].astype(np.float64) + table[:-1]).astype(F) / F(2)


def odd_numbers() -> np.ndarray:
    return np.array([0.0, -0.0, 1e-45, -1e-45, 1e-38, 3e38, np.inf, -np.inf, np.nan, -np.nan], F)


def element_casts() -> Iterator[tuple[str, Case]]:
    yield "1 elements/grid", {"x": np.concatenate([beside(E2M1), beside(middles(E2M1)), odd_numbers()])}
    scales = np.abs(
        np.concatenate([beside(E4M3), beside(middles(E4M3)), odd_numbers(), np.array([448.1, 464, 1e9], F)])
    )
    yield "2 scales/grid", {"x": scales}
    yield "3 packing/all", {"code": np.arange(256, dtype=np.uint8).reshape(8, 32) * 7 % 16}
    for e in (448, 256):
        powers = np.ldexp(F(1), np.arange(-149, 128, 7)).astype(F)
        some = np.random.default_rng(1).standard_normal(64).astype(F) ** 2
        amax = np.concatenate([powers, some, np.array([0, 1e-40, 3.4e38, np.inf, np.nan, 6 * e, 0.1, 1 / 3], F)])
        yield f"4 tensor scale/{e}", {"amax": amax, "e4m3_max": e}


def quantized(inputs: Arrays) -> Iterator[tuple[str, Case]]:
    """The cases of ``quantize``: a spec each, of inputs whose bytes show a wrong order of operations."""

    def cases(rule: str, names: str, **spec: object) -> Iterator[tuple[str, Case]]:
        for name in names.split():
            label = "-".join(
                str(v) for k, v in spec.items() if k not in ("amax", "words", "block_rows", "scope", "rht")
            )
            yield f"{rule}/{'-'.join(filter(None, (name, label)))}", PLAIN | spec | {"x": inputs[name]}

    mined = "mined_scale_a_fp32 mined_scale_b_fp32"
    yield from cases(
        "5 blocks", f"normal_bf16 normal_fp16 ties_e2m1_fp32 ties_e4m3_fp32 zeros_fp32 negzero_bf16 {mined}"
    )
    yield from cases("5 blocks", "zero_blocks_bf16 max_fp32 subnormal_fp32 tiny_amax_fp32 spike_bf16 wide_fp32")
    yield from cases("5 blocks", "normal_bf16 wide_bf16", transpose=True)
    for amax in (0.5, 100.0, 0.0, 1e-38, 3e38):
        yield from cases("6 given amax", "spike_mild_fp32", amax=np.asarray(amax, F), label=f"{amax:g}")
    yield from cases("7 not finite", "inf_fp32 nan_bf16 inf_bf16")
    yield from cases("7 not finite", "nan_bf16 inf_fp32", amax=np.asarray(4, F), label="amax 4")
    yield from cases("8 tiles 16x16", f"normal_bf16 mined_2d_fp32 wide_bf16 zero_blocks_bf16 {mined}", block_rows=BLOCK)
    yield from cases("9 rows", f"normal_bf16 wide_bf16 zero_blocks_bf16 {mined}", scope="row")
    yield from cases("10 windows", f"normal_bf16 wide_fp32 zero_blocks_bf16 {mined}", scope="window64")
    for e, select, math in itertools.product((448, 256), ("mae", "mse"), ("fp32", "fp16")):
        spec = {"e4m3_max": e, "select": select, "error_math": math}
        yield from cases("11 4over6", f"mined_4over6_bf16 mined_4over6_fp32 zero_blocks_bf16 wide_fp32 {mined}", **spec)
        yield from cases("12 4over6 16x16", "mined_4over6_bf16 mined_2d_fp32", block_rows=BLOCK, **spec)
    spec = {"e4m3_max": 256, "select": "mae", "scope": "row"}
    yield from cases("11 4over6", "mined_4over6_bf16", **spec, label="rows")
    for name in ("normal_bf16", "wide_bf16", "grid_bf16"):
        yield f"13 rotation/{name}", {"x": inputs[name]}
        most = np.asarray(np.abs(conformance.rotated(widened(inputs[name]).T)).max())
        case = PLAIN | {"x": inputs[name], "rht": True, "transpose": True, "amax": most}
        yield f"14 rotated blocks/{name}", case


def random_cases(inputs: Arrays) -> Iterator[tuple[str, Case]]:
    golden = np.load(DATA / "sr_software.npz")
    v, r = np.meshgrid(golden["value"][::3], golden["rbits"][::5], indexing="ij")
    yield "15 stochastic cast/grid", {"v": np.ascontiguousarray(v), "r": np.ascontiguousarray(r)}
    key = np.array([7, 11], np.uint32)  # of Threefry, for implementations in JAX; others begin with the words
    words = np.asarray(jax.random.bits(jax.random.wrap_key_data(jnp.asarray(key)), (2,), np.uint32))
    index = np.concatenate([np.arange(32), np.arange(4) + (1 << 32) - 2, [1 << 40]]).astype(np.uint64)
    for transpose in (False, True):
        yield f"16 random bytes/{transpose}", {"words": words, "index": index, "transpose": transpose}
        case = (
            PLAIN
            | {"x": inputs["normal_bf16"], "rounding": "stochastic", "words": words, "key": key}
            | {"transpose": transpose}
        )
        yield f"17 stochastic blocks/normal_bf16-{transpose}", case
    yield "17 stochastic blocks/normal_bf16-headroom", case | {"transpose": False, "headroom": True}


def products(inputs: Arrays) -> Iterator[tuple[str, Case]]:
    def operand(name: str, rows: int, **spec: object) -> Case:
        return conformance.quantize(PLAIN | {"x": inputs[name][:rows]} | spec)

    every = {
        "data": np.arange(256, dtype=np.uint8).reshape(-1, 8),
        "scale": np.arange(32, dtype=np.uint8)[:, None] * 4 % 127,
    }
    for dtype, amax in itertools.product(("float32", "bfloat16", "float16"), (2.5, 1e-38, 3e38)):
        case = every | {"amax": np.asarray(amax, F), "scope": "tensor", "e4m3_max": 448, "dtype": dtype}
        yield f"18 dequantize/{dtype}-{amax:g}", case
    for scope in ("row", "window64"):
        format: Case = {"scope": scope, "e4m3_max": 256 if scope == "row" else 448}
        yield f"18 dequantize/{scope}", operand("wide_bf16", 16, **format) | format | {"dtype": "float32"}
    bias = np.random.default_rng(2).standard_normal(24).astype(F)
    for a_scope, b_scope in itertools.product(("tensor", "row", "window64"), repeat=2):
        e = 448 if b_scope == "window64" else 256
        a, b = operand("heavy_bf16", 20, scope=a_scope), operand("normal_bf16", 24, scope=b_scope, e4m3_max=e)
        case = {f"a_{k}": v for k, v in a.items()} | {f"b_{k}": v for k, v in b.items()}
        case |= {"a_e4m3_max": 448, "b_e4m3_max": e, "dtype": "float32"}
        rule = "20 product of windows" if "window64" in (a_scope, b_scope) else "19 product"
        yield f"{rule}/{a_scope}-{b_scope}", case
        if a_scope == b_scope:
            yield f"{rule}/{a_scope}-bias", case | {"bias": bias, "dtype": "bfloat16"}
    for scope in ("tensor", "row"):
        b = {f"b_{k}": v for k, v in operand("heavy_bf16", 24, scope=scope).items()}
        case = b | {"a": inputs["normal_bf16"][:9], "b_e4m3_max": 448, "dtype": "float32"}
        yield f"21 product of 16-bit rows/{scope}", case
    for rows, cols in ((128, 4), (130, 9), (16, 1)):
        yield (
            f"22 order of scales/{rows}x{cols}",
            {"scale": (np.arange(rows * cols) % 127).astype(np.uint8).reshape(rows, cols)},
        )


def all_cases() -> dict[str, Case]:
    inputs = dict(np.load(DATA / "inputs.npz")) | dict(np.load(DATA / "inputs_nonfinite.npz"))
    makers = (element_casts(), quantized(inputs), random_cases(inputs), products(inputs))
    return dict(itertools.chain(*makers))


def make(path: Path) -> None:
    """Writes the cases and what the rules give for them; the same file in every run."""
    arrays: Arrays = {}
    named: dict[tuple, str] = {}
    cases: dict[str, dict[str, object]] = {}
    for name, case in all_cases().items():
        cases[name] = {}
        for key, value in case.items():
            if not isinstance(value, np.ndarray):
                if key != "label":
                    cases[name][key] = value
                continue
            same = (value.dtype.str, value.shape, value.tobytes())
            named.setdefault(same, f"in/{len(named)}")
            arrays[named[same]] = np.array(value, order="C")
            cases[name][key] = f"@{named[same]}"
        arrays |= run(name, case)
    arrays["suite"] = np.array(json.dumps({"version": VERSION, "cases": cases}))
    np.savez_compressed(path, **dict[str, Any](arrays))


# ---------------------------------------------------------------- peers: their outputs of a case, {} for what they lack
def _is_plain(name: str, case: Case) -> bool:
    plain = name.split("/")[0] in ("5 blocks", "6 given amax", "7 not finite")
    return plain and not case["transpose"]


def _amax(case: Case) -> np.ndarray:
    return np.asarray(case.get("amax", np.abs(widened(case["x"])).max()), F)


def jax_nn(name: str, case: Case) -> Arrays:
    """The quantizer of ``jax.nn.scaled_dot_general``, of float32 values."""
    from jax._src.cudnn import scaled_matmul_stablehlo

    if name == "1 elements/grid":
        return {"code": _codes_of_jax(jnp.clip(case["x"], -6, 6).astype(jnp.float4_e2m1fn))}
    if not _is_plain(name, case):
        return {}

    @jax.jit
    def quantize(x: jax.Array, amax: jax.Array) -> tuple[jax.Array, jax.Array]:
        return scaled_matmul_stablehlo.quantize(x, jax.nn.get_scaled_dot_general_config("nvfp4", amax / (6 * 448)))

    q, scale = quantize(widened(case["x"]), _amax(case))
    return {"data": pack(_codes_of_jax(q)), "scale": np.asarray(scale).view(np.uint8)}


def _codes_of_jax(q: jax.Array) -> np.ndarray:
    return np.asarray(q).view(np.uint8) & 15


def qwix(name: str, case: Case) -> Arrays:
    """Qwix's qtype "nvfp4", which has no second level of scales."""
    from qwix._src.core import qarray

    if not _is_plain(name, case) or "amax" in case:
        return {}
    how = qarray.HowToQuantize(qtype="nvfp4", channelwise_axes=(0,), tiled_axes={1: BLOCK})
    q = jax.jit(lambda x: qarray.quantize(x, how))(jnp.asarray(widened(case["x"])))
    scale = np.asarray(q.scale.astype(jnp.float8_e4m3fn)).view(np.uint8)
    return {"data": pack(_codes_of_jax(q.qvalue)), "scale": scale}


def compressed_tensors(name: str, case: Case) -> Arrays:
    """Its preset NVFP4 of weights, as llm-compressor uses it."""
    import torch
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

    if not _is_plain(name, case):
        return {}
    weights, x = preset_name_to_scheme("NVFP4", ["Linear"]).weights, torch.from_numpy(widened(case["x"]).copy())
    amax = torch.from_numpy(_amax(case).reshape(1).copy())
    blocks = x.unflatten(-1, (-1, BLOCK))
    global_scale = generate_gparam(-amax, amax)
    scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), weights, global_scale)
    q = quantize(x, scale, zero, weights, global_scale=global_scale)
    return {"data": pack_fp4_to_uint8(q).numpy(), "scale": scale.to(torch.float8_e4m3fn).view(torch.uint8).numpy()}


def torchao(name: str, case: Case) -> Arrays:
    import torch
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    if not _is_plain(name, case):
        return {}
    x, amax = torch.from_numpy(widened(case["x"]).copy()), torch.from_numpy(_amax(case).copy())
    scale, data = nvfp4_quantize(x, BLOCK, per_tensor_amax_to_scale(amax))
    return {"data": data.view(torch.uint8).numpy(), "scale": scale.view(torch.uint8).numpy()}


def modelopt(name: str, case: Case) -> Arrays:
    import torch
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    if not _is_plain(name, case):
        return {}
    x, amax = torch.from_numpy(widened(case["x"]).copy()), torch.from_numpy(_amax(case).copy())
    q, scale, _ = NVFP4QTensor.quantize(x, BLOCK, weights_scaling_factor_2=amax / (6 * 448))
    return {"data": q._quantized_data.numpy(), "scale": scale.view(torch.uint8).numpy()}


def ejkernel(name: str, case: Case) -> Arrays:
    """Its mode "nvfp4", which has no second level of scales."""
    from ejkernel.quantization import quantize

    if not _is_plain(name, case) or "amax" in case:
        return {}
    data, scale = quantize(jnp.asarray(widened(case["x"])), mode="nvfp4", axis="col")
    return {"data": np.asarray(data).view(np.uint8), "scale": np.asarray(scale)}


PEERS: dict[str, tuple[Callable[[str, Case], Arrays], str]] = {  # and the distribution that has a version
    "jax.nn": (jax_nn, "jax"),
    "qwix": (qwix, "qwix"),
    "compressed-tensors": (compressed_tensors, "compressed-tensors"),
    "torchao": (torchao, "torchao"),
    "modelopt": (modelopt, "nvidia-modelopt"),
    "ejkernel": (ejkernel, "ejkernel"),
}


def results_of(peer: str) -> Arrays:
    """Computes what a peer offers."""
    function, distribution = PEERS[peer]
    found: Arrays = {}
    for name, case in conformance.load().cases.items():
        found |= {f"{name}/{output}": np.array(array) for output, array in function(name, case).items()}
    meta = {"implementation": peer, "version": importlib.metadata.version(distribution)}
    return found | {"meta": np.array(json.dumps(meta))}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conformance", description=__doc__)
    parser.add_argument("what", choices=("make", *PEERS))
    parser.add_argument("--out", type=Path, help="a file .npz; by default the vectors, or PEER.npz")
    arguments = parser.parse_args()
    if arguments.what == "make":
        make(arguments.out or VECTORS)
    else:
        np.savez_compressed(arguments.out or f"{arguments.what}.npz", **dict[str, Any](results_of(arguments.what)))


if __name__ == "__main__":
    main()

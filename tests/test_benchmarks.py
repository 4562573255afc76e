"""The benchmarks: what they cover, what they make of a profile and of results, and that every command runs."""

import json
import pathlib
import re
import shlex
import sys
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case
from helpers import assert_same_tensor

import jnvfp4
from jnvfp4 import spec as specs

ROOT = pathlib.Path(__file__).parent.parent
sys.path.append(str(ROOT))  # last, so that the installed jnvfp4 is the one tested

from benchmarks import (  # noqa: E402
    bench_attention,
    bench_checkpoint,
    bench_grouped,
    bench_linear,
    bench_products,
    bench_quantize,
    bench_sharding,
    bench_stats,
    bench_steps,
    device_time,
    naive,
    results,
    tables,
    timing,
)
from benchmarks.__main__ import _parser, main  # noqa: E402
from benchmarks.compare import compare, regressions  # noqa: E402
from benchmarks.ops import BY_NAME, OPS  # noqa: E402
from benchmarks.plot import SHOWN, SIZES  # noqa: E402
from benchmarks.targets import judge  # noqa: E402

NAMED = [s for s in vars(specs).values() if isinstance(s, jnvfp4.QuantSpec)]


# What is measured


def test_every_named_recipe_is_measured_each_way_it_is_used():
    """Quantized, and as each pair that one kernel makes."""
    quantized = {s for op in OPS if op.what == "quantize" for s in op.specs}
    assert len(NAMED) == 9
    assert quantized >= set(NAMED)
    pairs = {op.specs for op in OPS if op.what == "quantize" and None not in op.specs}
    assert pairs >= {pair for pair in specs.FUSED_PAIRS if pair[0].select == "max6"}
    assert len(BY_NAME) == len(OPS)


def test_what_an_operation_reads_and_writes_and_takes():
    fits = {"nvfp4": (17, 48), "nvfp4 transposed": (48, 17), "window64 pair": (128, 64)}
    misfits = {"nvfp4": (16, 40), "nvfp4 pair": (17, 48), "nvfp4_2d": (24, 48), "window64 pair": (64, 48)}
    assert all(BY_NAME[name].fits(shape) for name, shape in fits.items())
    assert not any(BY_NAME[name].fits(shape) for name, shape in misfits.items())
    floors = {"nvfp4": 2.5625, "row_scaled amax found": 2.5625, "nvfp4 amax included": 4.5625, "nvfp4 pair": 3.125}
    floors |= {"window64 pair": 3.25, "dequantize to bf16": 2.5625, "transpose nvfp4_2d": 1.125}
    assert {name: BY_NAME[name].bytes_per_element(2) for name in floors} == floors


ROUNDED = [
    jnvfp4.NVFP4_2D,
    jnvfp4.WINDOW64,
    jnvfp4.spec.four_over_six("mae"),
    jnvfp4.spec.four_over_six("mse", block_rows=16),
]


@pytest.mark.parametrize("spec", ROUNDED, ids=specs.name_of)
def test_naive_code_does_the_real_work(spec):
    x = jnp.asarray(Case("naive", (32, 128)).make())
    data, scale, _ = naive.quantize(x, spec)
    exact = jnvfp4.quantize(x, spec)
    assert np.mean(np.asarray(data) == np.asarray(exact.data)) > 0.99
    assert np.mean(np.asarray(scale == exact.scale)) > 0.99
    np.testing.assert_allclose(naive.dequantize(exact, jnp.float32), jnvfp4.dequantize(exact, jnp.float32), rtol=1e-5)
    if spec is jnvfp4.NVFP4_2D:
        q = jnvfp4.transpose(exact)
        assert_same_tensor(naive.transpose(exact, spec), (q.data, q.scale, q.amax))


@pytest.mark.parametrize("spec", [jnvfp4.NVFP4_SR, jnvfp4.NVFP4_RHT], ids=specs.name_of)
def test_naive_code_that_draws_or_rotates_keeps_the_values(spec):
    x = jnp.asarray(Case("naive", (64, 128), "fp32").make())
    key = jax.random.key(1) if spec.rounding == "stochastic" else None
    tensor = jnvfp4.NVFP4Tensor(*jax.jit(naive.quantize, static_argnums=1)(x, spec, key=key), spec.format)
    error = naive.dequantize(tensor, jnp.float32) - x
    assert jnp.sqrt(jnp.mean(error**2)) < 0.2
    assert abs(jnp.mean(error)) < 0.01


@pytest.mark.parametrize(("name", "error"), [("same46", "mae"), ("even46", "mse")])
def test_adversarial_blocks_are_ties(name, error):
    """Both candidates err alike, so that every block takes the scale of map-to-6: 1, as the encode scale is."""
    x = Case("ties", (32, 64), "fp32", name).make()
    scale = jnvfp4.quantize(x, jnvfp4.spec.four_over_six(error)).scale.reshape(-1)[1:]
    np.testing.assert_array_equal(np.asarray(scale, np.float32), 1)


# Time


def event(name, begin, end):
    """In microseconds; profiles have nanoseconds."""
    return SimpleNamespace(name=name, start_ns=1e3 * begin, duration_ns=1e3 * (end - begin))


def profile(marks, streams, other=()):
    """Annotated calls, and on the device streams with events and a line that repeats them, in microseconds."""

    def line(name, events):
        return SimpleNamespace(name=name, events=events)

    host = [*(event(f"{device_time.MARK}{i}", *mark) for i, mark in enumerate(marks)), event("noise", 0, 9e6)]
    lines = [line(f"Stream #{i}(Compute)", [event("kernel", *k) for k in of]) for i, of in enumerate(streams)]
    lines.append(line("XLA Modules", [event("module", *module) for module in other]))
    planes = {"/host:CPU": [line("python", host)], "/device:GPU:0": lines}
    return SimpleNamespace(planes=[SimpleNamespace(name=name, lines=of) for name, of in planes.items()])


def test_a_profile_is_split_into_its_calls():
    first, second = [(1010, 1030), (1032, 1040)], [(2005, 2025), (2020, 2035), (2030, 2034)]
    two = profile([(1000, 1050), (2000, 2050)], [first + second[:1], second[1:]], [(1000, 2050)])
    found = device_time.split_calls(two, 2)
    assert found == [device_time.Call(28, 30, 2), device_time.Call(30, 30, 3)]


def test_clocks_that_disagree_by_less_than_half_a_pause_do_not_matter():
    for shift in (-90, 90):
        kernels = [(start + shift, start + shift + 40) for start in (1005, 1255, 1505)]
        marks = [(start, start + 50) for start in (1000, 1250, 1500)]
        assert [c.kernels for c in device_time.split_calls(profile(marks, [kernels]), 3)] == [1, 1, 1]


def test_a_call_without_kernels_has_no_time():
    found = device_time.split_calls(profile([(0, 50), (250, 300), (500, 550)], [[(10, 20), (510, 520)]]), 3)
    assert [call is None for call in found] == [False, True, False]


@pytest.mark.parametrize(
    ("marks", "streams", "message"),
    [([(0, 1)], [[]], "no GPU stream"), ([(0, 1)], [[(0, 1)]], "1 of 2 annotated calls")],
)
def test_a_profile_that_lacks_something_is_refused(marks, streams, message):
    with pytest.raises(device_time.NoDeviceTimeError, match=message):
        device_time.split_calls(profile(marks, streams), 2)


def test_a_cpu_profile_is_refused():
    with jax.default_device(jax.devices("cpu")[0]):
        f = jax.jit(jnp.sin)
        if jax.default_backend() != "cpu":
            pytest.skip("the profile of a machine with a GPU has its stream")
        with pytest.raises(device_time.NoDeviceTimeError, match="no GPU stream"):
            device_time.profile_calls([lambda: f(1.0)] * 3)


def test_no_device_time_is_said(monkeypatch, capsys):
    """On a GPU whose profiler shows nothing the wall clock is used, and result and output say so."""
    monkeypatch.setattr(timing.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(timing, "profile_calls", lambda calls: [None] * len(calls))
    (taken,) = timing.time_jobs([timing.Job(jnp.sin, [(1.0,)])])
    assert taken.json()["clock"] == "wall"
    assert "wall clock instead" in capsys.readouterr().out

    def refuse(calls):
        raise device_time.NoDeviceTimeError("nothing there")

    monkeypatch.setattr(timing, "profile_calls", refuse)
    (taken,) = timing.time_jobs([timing.Job(jnp.sin, [(1.0,)])])
    assert taken.clock == "wall"
    assert "nothing there" in capsys.readouterr().out


def test_device_time_goes_to_its_job_without_the_warm_up(monkeypatch):
    each = timing.WARM_UP + timing.CALLS
    first_ones = [device_time.Call(0, 0, 9)] * timing.WARM_UP
    calls = [*first_ones, *(device_time.Call(10 + i, 20 + i, 2) for i in range(timing.CALLS))]
    made = []
    monkeypatch.setattr(timing.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(timing, "profile_calls", lambda todo: made.extend(call() for call in todo) or 2 * calls)
    inputs = [(float(i),) for i in range(3)]
    first, second = timing.time_jobs([timing.Job(jnp.negative, inputs), timing.Job(jnp.sin, inputs[:1])])
    assert first == second == timing.Timing(24.5, 15.8, 33.2, "cupti", 34.5, 2)
    assert np.array_equal(made, [-float(i % 3) for i in range(each)] + [0.0] * each)


def test_rotations_overflow_the_cache(monkeypatch):
    monkeypatch.setattr(timing.jax, "default_backend", lambda: "gpu")
    assert timing.rotations(400 << 20) == 2
    assert timing.rotations(32 << 20) * (32 << 20) > 3 * timing.CACHE_BYTES
    assert timing.rotations(1) == 16


# Targets


def row(case, op, median, **values):
    of_all = {"shape": "16384x6144", "dtype": "bf16", "share of copy": 1.0}
    return {"case": case, "op": op, "median_us": median, **of_all, **values}


def verdicts(*rows, platform="gpu"):
    return [r.get("met") for r in judge(list(rows), platform)]


def test_targets_are_judged():
    share = [row("large", "nvfp4", 60, **{"share of copy": of}) for of in (0.97, 0.96)]
    assert verdicts(*share) == [True, False]
    assert verdicts(row("large", "nvfp4_2d", 60), row("large", "naive nvfp4", 60)) == [None, None]
    assert verdicts(row("large", "nvfp4_2d", 60, **{"times naive": 0.9})) == [False]
    normal, ties = row("large", "4over6 mae", 100), row("even46", "4over6 mae", 160)
    assert verdicts(normal, ties, {**ties, "median_us": 161})[1:] == [True, False]
    assert verdicts(ties) == [None]
    times = {"empty kernel": 1.5, "nvfp4": 3.4, "nvfp4 amax included": 3.6}
    assert verdicts(*(row("decode", op, us, shape="16x4096") for op, us in times.items())) == [None, True, False]
    sizes = [
        row("2048x4096", "nvfp4", 9, shape="2048x4096"),
        row("4096x3584", "nvfp4 amax included", 9, shape="4096x3584", **{"share of copy": 0.74}),
        row("9x9", "nvfp4", 9, shape="4096x4096", **{"share of copy": 0.7}),
    ]
    assert verdicts(*sizes) == [None, False, True]
    assert verdicts(row("large_fp16", "nvfp4", 9, dtype="fp16", **{"share of copy": 0.84})) == [False]
    cpu = [row("cpu", op, 9, **{"times naive": 14}) for op in ("nvfp4", "4over6 mae")]
    assert verdicts(*cpu, platform="cpu") == [False, True]


# Results


def result(medians, suite="quantize", device="H200", clock="cupti", platform="gpu", cpus=16):
    environment = {"device": device, "platform": platform, "cpus": cpus, "jax": "0", "commit": "abc"}
    rows = [
        {"case": c, "op": o, "median_us": m, "clock": clock, "bytes": 100, "GB/s": 1 / m, "share of copy": 0.5}
        for (c, o), m in medians.items()
    ]
    return {"suite": suite, "environment": environment, "rows": rows}


OLD = result({("large", "copy by memcpy"): 99.0, ("large", "a"): 100.0, ("large", "b"): 10.0, ("small", "a"): 1.0})


def test_a_regression_is_seen():
    new = result({("large", "a"): 105.1, ("large", "b"): 10.4, ("small", "a"): 0.5, ("small", "new"): 7.0})
    rows = compare(new, OLD)
    found = {(r["case"], r["op"]): r["verdict"] for r in rows}
    assert found == {
        ("large", "a"): "regression",
        ("large", "b"): "same",
        ("small", "a"): "faster",
        ("small", "new"): "added",
        ("large", "copy by memcpy"): "removed",
    }
    assert [r["ratio"] for r in regressions(rows)] == [1.051]
    assert not regressions(compare(new, OLD, tolerance=0.06))


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"device": "H100"}, "hardware"),
        ({"suite": "gemm"}, "suite"),
        ({"clock": "wall"}, "clock"),
        ({"platform": "cpu", "cpus": 2}, "hardware"),
    ],
)
def test_results_that_do_not_compare_are_refused(other, what):
    with pytest.raises(ValueError, match=f"compare: both results must be of one {what}"):
        compare(result({("large", "a"): 1.0}, **other), result({("large", "a"): 1.0}))


def test_the_clock_of_a_row_that_only_one_result_has_does_not_matter():
    new = result({("large", "a"): 100.0})
    new["rows"] += result({("large", "peer"): 300.0}, clock="cuda events")["rows"]
    assert [r["verdict"] for r in compare(new, OLD)] == ["same", "added", "removed", "removed", "removed"]


def test_the_committed_result_of_the_same_hardware_is_found(tmp_path):
    """Not the result of a part of the suite, whose file is named by that."""
    others = {"gpu_gemm": result({}, suite="gemm"), "other_quantize": result({}, device="H100"), "gpu_transpose": OLD}
    for name, kept in {"gpu_quantize": OLD, **others}.items():
        results.save(kept, tmp_path / f"{name}.json")
    (tmp_path / "foreign_quantize.json").write_text("[]")
    assert results.committed(result({}), tmp_path) == tmp_path / "gpu_quantize.json"
    with pytest.raises(ValueError, match=r"must hold one quantize result of \('B200', None\), got \[\]; name one"):
        results.committed(result({}, device="B200"), tmp_path)
    results.save(OLD, tmp_path / "again_quantize.json")
    with pytest.raises(ValueError, match=r"got \['again_quantize.json', 'gpu_quantize.json'\]"):
        results.committed(result({}), tmp_path)


# The commands


def test_conversions_are_timed(tmp_path, monkeypatch):
    for name, value in (("HIDDEN", 64), ("MLP", 128), ("SHARD_BYTES", 40_000), ("CHUNK", 1 << 16), ("LAYERS", 2)):
        monkeypatch.setattr(bench_checkpoint, name, value)
    *rows, verified = bench_checkpoint.run(1e-4, tmp_path)
    assert (verified["case"], verified["median_us"] > 0) == ("1 GB, 776 weights", True)
    assert [r["op"] for r in rows[:4]] == ["write to disk", "read, cold", "read, warm", "convert, cpu, warm"]
    assert {r["bytes"] for r in rows} == {2 * 64 * (64 + 32 + 64 + 3 * 128) + 2 * 64}
    assert all(r["median_us"] > 0 for r in rows)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suite", ["quantize", "gemm", "linear", "grouped"])
def test_a_suite_runs_and_is_compared_and_drawn(suite, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_linear, "RECIPES", {"pretrain": bench_linear.RECIPES["pretrain"]})
    case = {"quantize": "32x64", "grouped": "16:4x32x64"}.get(suite, "16x32x64")
    chosen = ["--ops", "nvfp4,window64 pair,nvfp4_rht transposed"] if suite == "quantize" else []
    new, png = tmp_path / "out" / "new.json", tmp_path / "new.png"
    assert main([suite, "--cases", case, *chosen, "--json", str(new), "--commit", "abc"]) == 0
    printed = capsys.readouterr().out
    made = json.loads(new.read_text())
    assert made["environment"]["commit"] == "abc"
    assert {"device", "driver", "jax", "jnvfp4", "python", "date"} <= made["environment"].keys()
    clocks = {"wall"} if jax.default_backend() == "cpu" else {"cupti"}
    assert set(results.clocks(made)) == clocks
    assert f"clock: {clocks.pop()}" in printed
    spread = [r for r in made["rows"] if "p20_us" in r]  # chains of products on a GPU have a median alone
    assert all(0 < r["p20_us"] <= r["median_us"] <= r["p80_us"] for r in spread)
    assert all(r["median_us"] > 0 for r in made["rows"])
    assert spread or suite == "grouped"

    assert main(["compare", str(new), str(new)]) == 0
    for r in made["rows"]:
        r["median_us"] /= 1.06
    results.save(made, tmp_path / "faster.json")
    assert main(["compare", str(new), str(tmp_path / "faster.json")]) == 1
    assert main(["compare", str(new), str(tmp_path / "faster.json"), "--tolerance", "0.07"]) == 0
    assert main(["plot", str(new), str(png)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")


REFUSED = [
    ("products --cases 8x64x64", "cpu", 8, "products are timed by the profiler of a GPU"),
    ("steps --cases 8x64x64", "cpu", 8, "steps are timed by the profiler of a GPU"),
    ("attention", "cpu", 8, "timed by the profiler of a GPU"),
    ("attention --cases 8x100", "gpu", 1, "a case must be SEQUENCESxTOKENS, with tokens a multiple of 64, got '8x100'"),
    ("sharding --cases 8x64", "cpu", 8, "needs two GPUs or more"),
    ("sharding --cases 8x64", "gpu", 1, "needs two GPUs or more"),
    ("sharding --cases 8x64x64", "gpu", 8, "a case must be PARTxWHOLE, got '8x64x64'"),
    ("grouped", "cpu", 8, "name a small one"),
    ("quantize --cases nowhere", "cpu", 8, "a case must be MxK or one of"),
    ("quantize --ops nothing", "cpu", 8, r"an op must be one of .* got \['nothing'\]"),
    ("gemm --cases 16x16", "cpu", 8, "a case must be MxNxK, got '16x16'"),
    ("grouped --cases 8x64x64", "cpu", 8, "a case must be TOKENS:GxNxK, got '8x64x64'"),
    ("compare missing.json", "cpu", 8, "No such file"),
]


@pytest.mark.parametrize(("command", "backend", "count", "message"), REFUSED)
def test_commands_are_refused(monkeypatch, capsys, command, backend, count, message):
    found = jax.devices("cpu")[:count]
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "devices", lambda: found)
    assert main(command.split()) == 2
    assert re.search(message, capsys.readouterr().err)


def test_chains_of_products():
    """Each weight once, all of them more than a cache, and the chain of each kernel has the same product."""
    assert bench_products.length(8, 14336, 4096) == bench_products.MOST
    assert bench_products.length(8192, 8192, 8192) == 3
    assert set(bench_products.TARGETS) == {bench_products.parse(case)[0] for case in bench_products.CASES}
    chains = bench_products.chains("8x64x64", every=True)
    assert [name for name in chains if " " not in name] == ["bf16", "w4a4", "w4a16"]
    want, *others = (np.asarray(chain.multiply(chain.weights[0]), np.float32) for chain in chains.values())
    assert all(np.abs(got - want).max() < 0.3 * np.abs(want).max() for got in others)
    assert all(len(chain.weights) == bench_products.MOST for chain in chains.values())


@pytest.mark.parametrize("there", [True, False])
def test_steady_time_and_clocks(monkeypatch, tmp_path, there):
    """Of programs that take 5 ms, after a load that is not counted; clocks are those of their time, or None."""
    tool = tmp_path / "nvidia-smi"
    if there:
        tool.write_text("#!/bin/sh\necho '[N/A]'\nwhile :; do echo 1980; sleep 0.01; done\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if there else str(tmp_path))
    monkeypatch.setattr(bench_products, "LOAD_S", 0.1)
    monkeypatch.setattr(bench_products, "STEADY_S", 0.2)
    monkeypatch.setattr(bench_products, "bursts", lambda programs: [time.sleep(0.1) or 7.0 for _ in programs])
    made = []

    def program():
        time.sleep(0.005 if len(made) > 6 else 0.1)
        made.append(time.time())

    (speed,) = bench_products.burst_and_steady([program])
    assert 5000 <= speed.steady_us < 50000
    clock = 1980 if there else None
    assert speed._replace(steady_us=0) == (7.0, 0, clock, clock)
    assert speed.columns(2, speed)["median_us"] == 3.5
    assert made[-1] - made[0] >= 0.3


def test_sizes_of_groups():
    """Proportional to 1 / (i + 1), rounded down; the rest in group 0, and the last eighth empty."""
    assert bench_grouped.parse("4096:8x14336x4096").sizes.tolist() == [1584, 789, 526, 394, 315, 263, 225, 0]
    for case in map(bench_grouped.parse, bench_grouped.CASES):
        assert case.sizes.sum() == case.tokens
        assert 1 <= case.length <= bench_grouped.MOST
    assert set(bench_grouped.TARGETS) == set(bench_grouped.TOKENS)


def test_grouped_products_compute_the_same():
    case = bench_grouped.parse("40:8x32x64")
    chains, sizes = bench_grouped.chains(case, every=True), jnp.asarray(case.sizes)
    named = [bench_grouped.LOOP, bench_grouped.RAGGED, "w4a4", "w4a16", "w4a4 pinned"]
    assert [name for name in chains if name in named] == named
    results = [chain.multiply(chain.a, chain.weights[0], sizes) for chain in chains.values()]
    want = np.concatenate(results.pop(0)).astype(np.float32)
    for got in results:
        assert np.abs(np.asarray(got, np.float32) - want).max() < 0.3 * np.abs(want).max()


def test_the_targets_of_grouped_products():
    case = bench_grouped.parse("128:8x32x64")
    medians = {"bf16 loop": 20, "bf16 ragged_dot": 9.9, "w4a4": 10, "w4a16": 9}
    times = {op: {"median_us": t} for op, t in medians.items()}
    rows = {op: bench_grouped._judged(case, op, times, 1, {"TFLOP/s": 1.0}) for op in times}
    assert (rows["w4a4"]["speed of loop"], rows["w4a4"]["speed of ragged_dot"]) == (2.0, 0.99)
    assert (rows["w4a4"]["met"], rows["w4a16"]["met"]) == (False, True)
    assert "met" not in rows["bf16 loop"]
    case, medians = bench_grouped.parse("32768:8x32x64"), {"w4a4": 1.8, "w4a4 pinned": 2.2}
    times = {op: {"median_us": t * case.flops / 1e6} for op, t in medians.items()}
    met = {op: bench_grouped._judged(case, op, times, 1, {"TFLOP/s": 1.0})["met"] for op in times}
    assert met == {"w4a4": False, "w4a4 pinned": False}
    times["w4a4 pinned"]["median_us"] *= 0.9
    assert bench_grouped._judged(case, "w4a4 pinned", times, 1, {"TFLOP/s": 1.0})["met"]


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ('custom_call_target="__cublas$gemm"\n bf16[8,16,64]{2,1,0}', "__cublas$gemm of all rows for each of 8 groups"),
        ('"kind":"__cudnn$fusion" bf16[16,64]', "__cudnn$fusion"),
        ("%x = bf16[16,32] ragged-dot(%a)", "ragged-dot"),
        ("%x = bf16[16,512]{1,0} y\n%z = dot(%x) ", "dot of all rows for each of 8 groups"),
        ("nothing", "unknown"),
    ],
)
def test_the_path_of_ragged_dot(text, path):
    assert bench_grouped.path_of(text, bench_grouped.parse("16:8x32x64")) == path


def test_the_sharding_suite_gathers_what_it_says():
    programs = bench_sharding.gathers(bench_sharding.Case(32, 512, 8))
    for whole in jax.tree.leaves([program() for program in programs.values()]):
        assert whole.sharding.is_fully_replicated
    nbytes = {name: sum(x.nbytes for x in jax.tree.leaves(program())) for name, program in programs.items()}
    assert nbytes["packed"] / nbytes["bf16"] == 0.5625 / 2


@pytest.mark.parametrize(("layout", "name"), [("fsdp", "256x512x512 on 4"), ("tensor parallel", "512x256x512 on 4")])
def test_sharded_layers_have_their_results_where_the_layout_says(layout, name):
    case, (of_x, of_dy, of_w, _) = bench_sharding.Case(64, 512, 4), bench_sharding.LAYOUTS[layout]
    mesh, programs = case.mesh(), bench_sharding.layers(case, layout)
    assert case.name(layout) == name
    assert list(programs) == ["bf16", "pretrain"]
    for program in programs.values():
        results = program()
        assert len(results) == bench_sharding.CHAIN
        for found in results:
            for array, spec in zip(found, (of_dy, of_x, of_w), strict=True):
                assert array.sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh, spec), array.ndim)


def test_the_attention_suite_attends_alike(monkeypatch):
    """All operations but cuDNN's, to the same random numbers, and as many caches as a program should have."""
    monkeypatch.setattr(bench_attention, "MOST_BYTES", 3 << 20)
    found = {op: bench_attention.program(op, 2, 128)() for op in ("bf16 xla", "nvfp4", "nvfp4 paged")}
    assert {op: len(results) for op, results in found.items()} == {"bf16 xla": 4, "nvfp4": 11, "nvfp4 paged": 11}
    exact, nvfp4, paged = (np.asarray(results[0], np.float32) for results in found.values())
    assert (nvfp4 == paged).all()
    assert np.abs(nvfp4 - exact).max() < 0.2 * np.abs(exact).max()


def test_steps_have_both_gradients(monkeypatch):
    some = {name: bench_steps.RECIPES[name] for name in ("pretrain", "inference")}
    monkeypatch.setattr(bench_steps, "RECIPES", some)
    programs = bench_steps.layers("16x32x64")
    assert list(programs) == ["bf16", "pretrain", "rl pinned"]
    for program in programs.values():
        (y, (dx, dw)), *_ = chain = program()
        assert [a.shape for a in (y, dx, dw)] == [(16, 32), (16, 64), (32, 64)]
        assert [a.dtype for a in (y, dx, dw)] == ["bfloat16", "bfloat16", "float32"]
        assert len(chain) == bench_steps.CHAIN


def test_steps_with_statistics(monkeypatch):
    pytest.importorskip("tqdm", reason="needs the extra [examples]")
    monkeypatch.setattr(bench_stats, "STEPS", 1)
    monkeypatch.setattr(bench_stats, "ROUNDS", 1)
    taken = {name: take() for name, take in bench_stats.programs("2x2", "cpu").items()}
    collected = {name: [bool(v.any()) for v in jax.tree.leaves(found)] for name, (_, found) in taken.items()}
    assert collected == {"none": [], "on": 4 * [True]}
    assert len({float(loss) for loss, _ in taken.values()}) == 1
    with pytest.raises(ValueError, match="a case must be MICROBATCHESxSEQUENCES, got '8'"):
        next(bench_stats.run(["8"]))


def test_the_picture_names_operations_of_the_suite():
    assert set(SHOWN) <= set(BY_NAME)
    measured = {row["op"] for row in results.load(results.RESULTS / "h200_quantize.json")["rows"]}
    assert {*SHOWN, *(op for _, ops in SIZES.values() for op in ops)} <= measured


def test_the_pages_hold_the_tables_of_the_results():
    """README.md, docs/results.md and docs/training.md have exactly what ``python -m benchmarks tables`` writes."""
    assert tables.stale() == []


def test_a_table_with_another_figure_is_written_anew(tmp_path, monkeypatch, capsys):
    pages = {table.page: (ROOT / table.page).read_text() for table in tables.TABLES.values()}
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    for page, text in pages.items():
        (tmp_path / page).write_text(text.replace("1.15", "1.14"))
    assert main(["tables", "--check"]) == 1
    assert "docs/training.md: tables differ" in capsys.readouterr().out
    assert main(["tables"]) == 0
    assert main(["tables", "--check"]) == 0
    assert (tmp_path / "docs/training.md").read_text() == pages["docs/training.md"]
    (tmp_path / "README.md").write_text("no table")
    assert main(["tables"]) == 2
    assert "README.md must have the tables ['summary'], each once, got []" in capsys.readouterr().err


def test_peers_that_are_not_installed_are_named(capsys, monkeypatch):
    from benchmarks import peers

    monkeypatch.setitem(sys.modules, "qwix", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(peers, "PEERS", [p for p in peers.PEERS if p.name.startswith(("jax", "qwix", "torchao"))])
    rows = bench_quantize.run(["16x64"], ["nvfp4"], baselines=False, with_peers=True)
    assert "jax.nn's nvfp4, scale given" in [r["op"] for r in rows]
    printed = capsys.readouterr().out
    assert "peer skipped: qwix" in printed
    assert "peer skipped: torchao" in printed


def test_the_commands_of_the_readme_are_understood():
    page = (ROOT / "benchmarks" / "README.md").read_text()
    commands = [line.partition("#")[0] for line in page.splitlines() if line.startswith("python -m benchmarks ")]
    assert len(commands) >= 8
    for command in commands:
        args = _parser().parse_args(shlex.split(command)[3:])
        if args.command == "quantize":
            assert set(args.ops or ()) <= set(BY_NAME)
            assert all(map(bench_quantize.case_named, args.cases or ()))

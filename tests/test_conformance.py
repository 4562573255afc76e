"""The vectors of jnvfp4/conformance and their checker: equal to others' vectors, and to what this library gives."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import skip_or_fail

from jnvfp4._reports import conform
from jnvfp4.conformance import __main__ as checker

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))  # last, so that the installed jnvfp4 is the one tested

from benchmarks import conformance as maker  # noqa: E402

DATA = ROOT / "tests" / "data"
FOLDER = ROOT / "jnvfp4" / "conformance"
VECTORS = checker.load()
GOLDEN = sorted(DATA.glob("q_*.npz"))


def of_golden(kind: str) -> dict:
    """The arguments of a file such as q_4o6_2d_256_mse_fast."""
    spec = maker.PLAIN | {"rht": "rht" in kind, "block_rows": 16 if "2d" in kind.split("_") else 1}
    spec["scope"] = "row" if "rowscaled" in kind else "window64" if "1x64" in kind else "tensor"
    if kind.startswith("4o6"):
        *_, e4m3_max, select, math = kind.split("_")
        spec |= {"e4m3_max": int(e4m3_max), "select": select, "error_math": {"fast": "fp16", "strict": "fp32"}[math]}
    return spec


@pytest.mark.parametrize("file", GOLDEN, ids=lambda file: file.stem)
def test_the_checker_has_the_bytes_of_others(file):
    inputs, golden, spec, count = np.load(DATA / "inputs.npz"), np.load(file), of_golden(file.stem[2:]), 0
    for name in sorted({key.rpartition("__")[0] for key in golden.files} - {""}):
        x = golden[f"{name}__x"] if spec["rht"] else inputs[name]
        for transpose, end, side in ((False, "", "row"), (True, "_t", "col")):
            unit = 64 if spec["scope"] == "window64" else 16
            if f"{name}__data{end}" not in golden or x.ndim > 2 or x.shape[transpose - 1] % unit or x.shape[0] % 16:
                continue
            case = spec | {"x": x, "transpose": transpose, "rht": spec["rht"] and transpose}
            if spec["rht"]:  # the file's amax is of the rotated transpose
                case["amax"] = golden[f"{name}__amax_{side}"].reshape(())
            with np.errstate(all="ignore"):
                got = checker.quantize(case, checker.Dialect({"code of -0": "0 for -0.0"}))
            for field in ("data", "scale"):
                np.testing.assert_array_equal(got[field], golden[f"{name}__{field}{end}"], f"{name} {transpose}")
            count += 1
    assert count > 10


def test_the_vectors_are_what_the_rules_give(tmp_path):
    maker.make(tmp_path / "vectors.npz")
    made, kept = np.load(tmp_path / "vectors.npz"), np.load(checker.VECTORS)
    assert made.files == kept.files
    assert [name for name in kept.files if not checker.is_equal(made[name], kept[name])] == []
    assert {name.split("/")[0] for name in VECTORS.cases} == set(checker.RULES)
    assert checker.VECTORS.stat().st_size < 2 << 20


def results(dialect=checker.RULE, rule="") -> dict[str, np.ndarray]:
    """By the rule, but for those vectors that a dialect changes."""
    found = {} if dialect == checker.RULE else dict(by_the_rule())
    cases = {name: case for name, case in VECTORS.cases.items() if not found or name.startswith(f"{rule}/")}
    for name, case in cases.items():
        found |= checker.run(name, case, dialect)
    return found


by_the_rule = functools.cache(results)


def different(found: dict[str, np.ndarray]) -> set[str]:
    return {rule for rule, name in checker.first_differences(found, VECTORS).items() if name in found}


@pytest.mark.parametrize("choice", checker.CHOICES)
def test_a_dialect_is_named(choice):
    """By the first rule whose vectors show it."""
    for value in list(checker.CHOICES[choice])[1:]:
        rules = [rule for rule, (_, choices) in checker.RULES.items() if choice in choices]
        found = [results(checker.Dialect({choice: value}), rule) for rule in rules]
        rule, shown = next((rule, r) for rule, r in zip(rules, found, strict=True) if different(r) == {rule})
        assert checker.compare(shown, VECTORS)[rule].endswith(f"; dialect: {choice}: {value}")


# A mutation of one function of the rules, and the rules that it changes.
PRODUCTS = {"19 product", "20 product of windows", "21 product of 16-bit rows"}
MUTATIONS = {
    "E2M1 without 1.5": ("E2M1", lambda t: np.where(t == 1.5, 1, t), {"1 elements", "5 blocks"}),
    "E4M3 ends at 240": ("E4M3", lambda t: np.minimum(t, 240), {"2 scales"}),
    "E4M3 flushes subnormals": ("E4M3", lambda t: np.where(t < 2**-6, 0, t), {"2 scales"}),
    "fl(1/6) rounded down": ("SIXTH", lambda s: np.nextafter(s, np.float32(0)), {"5 blocks"}),
    "S_enc overflows": ("FLT_MAX", lambda _: np.float32(np.inf), {"4 tensor scale"}),
    "blocks of 32": ("of_tiles", lambda f: lambda rows, combine: rows, {"8 tiles 16x16", "12 4over6 16x16"}),
    "errors of a tile added in rows": ("tree", lambda f: lambda rows: np.add.accumulate(rows)[-1], {"12 4over6 16x16"}),
    "bfloat16 truncated": (
        "bf16",
        lambda f: lambda x: (x.view(np.uint32) & 0xFFFF0000).view(np.float32),
        {"13 rotation", "14 rotated blocks", "18 dequantize", "19 product", "20 product of windows"},
    ),
    "codes in big-endian order": (
        "unpack",
        lambda f: lambda data: f(data >> 4 | data << 4),
        {"18 dequantize", "21 product of 16-bit rows"},
    ),
    "Philox with seven rounds": (
        "philox",
        lambda f: lambda key, index, transposed: f(key ^ np.uint32(1), index, transposed),
        {"16 random bytes", "17 stochastic blocks"},
    ),
    "the same bits in both orientations": (
        "philox",
        lambda f: lambda key, index, transposed: f(key, index, False),
        {"16 random bytes", "17 stochastic blocks"},
    ),
    "32-bit block index": (
        "philox",
        lambda f: lambda key, index, transposed: f(key, index & np.uint64(0xFFFFFFFF), transposed),
        {"16 random bytes"},
    ),
    "stochastic rounding away from zero": (
        "stochastic",
        lambda f: lambda v, r: f(v, np.full_like(r, 255)),
        {"15 stochastic cast", "17 stochastic blocks"},
    ),
    "stochastic rounding of signed numbers": (
        "stochastic",
        lambda f: lambda v, r: f(v, np.where(v < 0, 255 - r, r)),
        {"15 stochastic cast", "17 stochastic blocks"},
    ),
    "an amax per tensor for rows": (
        "per_block",
        lambda f: (
            lambda amax, scope: np.broadcast_to(amax.max(), (*amax.shape, 1)) if scope == "row" else f(amax, scope)
        ),
        {"9 rows", "18 dequantize"},
    ),
    "windows of 32": (
        "per_block",
        lambda f: lambda amax, scope: np.roll(f(amax, scope), 2, -1) if scope == "window64" else f(amax, scope),
        {"10 windows"},
    ),
    "rotated without a sign": (
        "rotated",
        lambda f: lambda x, d=checker.RULE: -f(x, d),
        {"13 rotation", "14 rotated blocks"},
    ),
    "a block's scale by the tensor's": (
        "e4m3",
        lambda f: lambda x, d=checker.RULE: f(np.full_like(x, x.max()), d),
        {"2 scales", "5 blocks", "11 4over6"},
    ),
    "results in the dtype toward zero": (
        "stored",
        lambda f: (
            lambda x, dtype: (
                (f(x, "float32").view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else f(x, dtype)
            )
        ),
        {"18 dequantize", "19 product", "20 product of windows"},
    ),
    "one scale for two blocks": (
        "of_e4m3",
        lambda f: lambda byte: f(np.repeat(byte[..., ::2], 2, -1)[..., : byte.shape[-1]]),
        {"5 blocks", *PRODUCTS},
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_is_found_under_its_rule(mutation, monkeypatch):
    name, change, rules = MUTATIONS[mutation]
    monkeypatch.setattr(checker, name, change(getattr(checker, name)))
    with np.errstate(all="ignore"):
        found = results()
    monkeypatch.undo()
    assert rules <= different(found)


FEW = ("5 blocks", "18 dequantize", "19 product")
OF_LIBRARY = {"native": ("11 4over6", *FEW), "reference": FEW}  # which compiles long for 4over6: test_golden.py


@pytest.mark.parametrize("implementation", ["native", pytest.param("reference", marks=pytest.mark.long)])
def test_this_library_conforms(implementation):
    rules = OF_LIBRARY[implementation]
    found = checker.compare(conform.results_of(VECTORS, implementation, rules), VECTORS)
    assert {rule: text for rule, text in found.items() if text != "not offered"} == dict.fromkeys(rules, "equal")


@pytest.mark.long
def test_the_command_conforms_on_each_platform(tmp_path, capsys):
    from jnvfp4 import cli

    assert cli.main(["conform", "--record", str(tmp_path / "own")]) == 0
    assert capsys.readouterr().out.count(" equal\n") == len(checker.RULES) - 1  # no operation orders scales
    assert json.loads(str(np.load(tmp_path / "own")["meta"]))["implementation"].startswith("jnvfp4, ")


WITHOUT_JAX = (
    "import runpy, sys; sys.modules['jax'] = None; sys.argv[0] = ''; runpy.run_path({!r}, run_name='__main__')"
)


def check(*arguments: object) -> subprocess.CompletedProcess:
    code = WITHOUT_JAX.format(str(FOLDER))
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, cwd="/")


def test_the_checker_reads_results_without_jax(tmp_path):
    file = tmp_path / "results.npz"
    np.savez(file, **results(), meta=np.array('{"implementation": "x"}'))
    equal = check(file)
    assert (equal.returncode, equal.stderr) == (0, "")
    assert equal.stdout.startswith('results: {"implementation": "x"}\n1 elements                  equal\n')
    np.savez(file, **results(checker.Dialect({"first nibble": "high"}), "3 packing"))
    other = check(file)
    assert other.returncode == 1
    assert "3 packing/all/data[0, 0] is 0x7, not 0x70 (100.00% differ); dialect: first nibble: high" in other.stdout
    np.savez(file, **{"5 blocks/other/data": np.zeros(1)})
    assert check(file).returncode == check().returncode == 2
    np.savez(file, **{"3 packing/all/data": np.zeros((8, 16), np.int8)})
    assert "3 packing/all/data is int8[8, 16], not uint8[8, 16]; dialect: unknown" in check(file).stdout


@pytest.mark.parametrize("peer", maker.PEERS)
def test_an_adapter_offers_rules(peer):
    """Which ones, and where they differ, is in docs/conformance.md."""
    try:
        found = maker.results_of(peer)
    except ImportError as missing:
        skip_or_fail(peer, str(missing))
    assert {"meta"} < set(found) <= {*VECTORS.expected, "meta"}

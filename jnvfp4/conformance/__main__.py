"""Compares the bytes of an NVFP4 implementation with the vectors beside this file, by the rules of README.md.

python jnvfp4/conformance RESULTS.npz
"""

import itertools
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

VECTORS = Path(__file__).with_name("vectors.npz")
Arrays = dict[str, np.ndarray]
Case = dict[str, Any]  # the arguments of a rule: arrays, and texts or numbers

F = np.float32
FLT_MAX, SIXTH, BLOCK = np.finfo(F).max, F(1) / F(6), 16
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], F)
E4M3 = np.array([(8 + i % 8) * 2.0 ** (i // 8 - 10) if i >= 8 else i * 2.0**-9 for i in range(127)], F)
SIGNED = np.concatenate([E2M1, -E2M1])
ROUNDINGS: dict[str, Any] = {  # from the indices below and above, which differ for a tie
    "to even": lambda below, above: np.where(below % 2 == 0, below, above),
    "away from zero": lambda below, above: above,
    "toward zero": lambda below, above: below,
}
# What writers do otherwise: for each choice its values by name. The first is the rule's.
CHOICES: dict[str, dict[str, Any]] = {
    "levels of scales": {"two": lambda S: S, "one": np.ones_like},
    "S_dec": {"1 / S_enc": lambda S_enc, A, E: F(1) / S_enc, "A / (6 E)": lambda S_enc, A, E: A / F(6 * E)},
    "block scale": {
        "b * (S_enc * (1/6))": lambda b, S_enc, S_dec: b * (S_enc * SIXTH),
        "(b / 6) * S_enc": lambda b, S_enc, S_dec: b / F(6) * S_enc,
        "b / (6 * S_dec)": lambda b, S_enc, S_dec: b / (F(6) * S_dec),
        "(b / 6) / S_dec": lambda b, S_enc, S_dec: b / F(6) / S_dec,
        "(b / S_dec) * (1/6)": lambda b, S_enc, S_dec: b / S_dec * SIXTH,
    },
    "scale of a small block": {
        "as small as 0": lambda scale: scale,
        "at least 2^-9": lambda scale: np.maximum(scale, 1),
        "at least 2^-6": lambda scale: np.maximum(scale, 8),
        "2^-3 for 0": lambda scale: np.where(scale == 0, 0x20, scale),
        "1 for 0": lambda scale: np.where(scale == 0, 0x38, scale),
    },
    "codes": {
        "x * (1 / (s * S_dec))": lambda x, s, S_enc, S_dec: x * np.minimum(F(1) / (s * S_dec), FLT_MAX),
        "x / (s * S_dec)": lambda x, s, S_enc, S_dec: x / (s * S_dec),
        "x / (s / S_enc)": lambda x, s, S_enc, S_dec: x / (s / S_enc),
        "(x / S_dec) / s": lambda x, s, S_enc, S_dec: x / S_dec / s,
        "x * ((1 / S_dec) / s)": lambda x, s, S_enc, S_dec: x * (F(1) / S_dec / s),
    },
    "ties of elements": ROUNDINGS,
    "ties of scales": ROUNDINGS,
    "code of -0": {"8": lambda x, q: True, "0 for -0.0": lambda x, q: x != 0, "0": lambda x, q: q != 0},
    "code of NaN": {"0": 0, "7": 7, "8": 8},
    "scale of NaN": {"0x7f": 0x7F, "0xff": 0xFF},
    "first nibble": {"low": slice(None), "high": slice(None, None, -1)},
    "candidates": {"(b / 6) * S_enc": lambda b, S: b / F(6) * S, "b * (S_enc * (1/6))": lambda b, S: b * (S * SIXTH)},
    "equal errors": {"map to 6": np.less, "map to 4": np.less_equal},
    "error": {"as stated": True, "the other math": False},
    "signs": {"0xd7e8": 0xD7E8, "none": 0},
    "result of rotation": {"bfloat16": lambda y: bf16(y), "float32": lambda y: y},
    "factor of a decoded value": {
        "q * ((s * A) * (1 / (6 E)))": lambda q, s, A, E: q * (s * A * (F(1) / F(6 * E))),
        "q * (s * (A * (1 / (6 E))))": lambda q, s, A, E: q * (s * (A * (F(1) / F(6 * E)))),
        "q * (s * (A / (6 E)))": lambda q, s, A, E: q * (s * (A / F(6 * E))),
        "(q * s) * (A / (6 E))": lambda q, s, A, E: q * s * (A / F(6 * E)),
    },
    "order of sums": {
        "ascending": lambda parts: sum(parts, np.zeros_like(parts[0])),
        "in float64, rounded once": lambda parts: np.sum(parts, axis=0, dtype=np.float64).astype(F),
    },
    "alpha": {
        "(A_a * A_b) / (36 E_a E_b)": lambda a, b, six_a, six_b: a * b / (six_a * six_b),
        "(A_a / (6 E_a)) * (A_b / (6 E_b))": lambda a, b, six_a, six_b: a / six_a * (b / six_b),
        "(A_a * A_b) * (1 / (36 E_a E_b))": lambda a, b, six_a, six_b: a * b * (F(1) / (six_a * six_b)),
    },
    "tiles": {"128x4": True, "rows": False},
}


class Dialect(dict[str, str]):
    """Names the choices that differ from the rule's; a call gives the value of any choice."""

    def __call__(self, choice: str) -> Any:
        return CHOICES[choice][self.get(choice, next(iter(CHOICES[choice])))]


RULE = Dialect()


# ---------------------------------------------------------------- numbers
def nearest(table: np.ndarray, a: np.ndarray, ties: Callable[..., np.ndarray]) -> np.ndarray:
    middle = (table[1:].astype(np.float64) + table[:-1]) / 2
    return ties(np.searchsorted(middle, a, "left"), np.searchsorted(middle, a, "right"))


def e2m1(x: np.ndarray, d: Dialect = RULE) -> np.ndarray:
    code = np.where(np.isnan(x), d("code of NaN"), nearest(E2M1, np.abs(x), d("ties of elements")))
    sign = np.signbit(x) & ~np.isnan(x) & d("code of -0")(x, code)
    return (code | sign * 8).astype(np.uint8)


def e4m3(x: np.ndarray, d: Dialect = RULE) -> np.ndarray:
    code = nearest(E4M3, np.minimum(x, F(448)), d("ties of scales"))
    return np.where(np.isnan(x), d("scale of NaN"), code).astype(np.uint8)


def of_e4m3(byte: np.ndarray) -> np.ndarray:
    return np.append(E4M3, F(np.nan))[byte & 0x7F]


def bf16(x: np.ndarray) -> np.ndarray:
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(F)
    return np.where(np.isnan(x), F(np.nan), rounded)


def stored(x: np.ndarray, dtype: str) -> np.ndarray:
    x = np.where(np.isnan(x), F(np.nan), x)
    return (bf16(x).view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else x.astype(dtype)


def widened(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(F) if x.dtype == np.uint16 else x.astype(F)


def pack(codes: np.ndarray, d: Dialect = RULE) -> np.ndarray:
    pairs = codes.reshape(*codes.shape[:-1], -1, 2)[..., d("first nibble")]
    return pairs[..., 0] | pairs[..., 1] << 4


def unpack(data: np.ndarray) -> np.ndarray:
    return np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], -1)


# ---------------------------------------------------------------- scales and codes
def tensor_scales(amax: np.ndarray, e4m3_max: int, d: Dialect = RULE) -> tuple[np.ndarray, np.ndarray]:
    encode = np.minimum(F(6 * e4m3_max) / amax, FLT_MAX)
    encode = np.where((amax == 0) | (encode == 0), F(1), encode)
    return d("levels of scales")(encode), d("levels of scales")(d("S_dec")(encode, amax, e4m3_max))


def choose(x, b, amax, encode, decode, case: Case, d: Dialect) -> tuple[np.ndarray, np.ndarray]:
    """Chooses the 4over6 scale of blocks [..., rows, blocks, 16]; returns it and the codes."""
    base = d("candidates")(b, encode)
    errors, scales, codes = [], [e4m3(base, d), e4m3(base * F(1.5), d)], []
    for scale in scales:
        codes.append(e2m1(d("codes")(x, *(v[..., None] for v in (of_e4m3(scale), encode, decode))), d))
        value = SIGNED[codes[-1]] * of_e4m3(scale)[..., None]
        if (case["error_math"] == "fp32") == d("error"):
            difference = value * amax[..., None] / F(6 * case["e4m3_max"]) - x
        else:
            difference = value - x * encode[..., None]
        error = difference * difference if case["select"] == "mse" else np.abs(difference)
        error = np.add.accumulate(error, axis=-1, dtype=F)[..., -1]
        errors.append(of_tiles(error, tree) if case["block_rows"] == BLOCK else error)
    four = d("equal errors")(errors[1], errors[0])
    return np.where(four, scales[1], scales[0]), np.where(four[..., None], codes[1], codes[0])


def tree(rows: np.ndarray) -> np.ndarray:
    return tree(rows[: len(rows) // 2] + rows[len(rows) // 2 :]) if len(rows) > 1 else rows[0]


def of_tiles(rows: np.ndarray, combine: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    tiles = rows.reshape(*rows.shape[:-2], -1, BLOCK, rows.shape[-1])  # all 16 rows get what they combine to
    return np.repeat(combine(np.moveaxis(tiles, -2, 0)), BLOCK, axis=-2)


def rotated(x: np.ndarray, d: Dialect = RULE) -> np.ndarray:
    v = bf16(x) * np.tile(np.where(d("signs") >> np.arange(BLOCK) & 1, F(-1), F(1)), x.shape[-1] // BLOCK)
    for stride in (1, 2, 4, 8):
        pairs = v.reshape(*v.shape[:-1], -1, 2, stride)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        v = np.stack([a + b, a - b], axis=-2).reshape(v.shape)
    return d("result of rotation")(v * F(0.25) + F(0))


def philox(key: np.ndarray, index: np.ndarray, transposed: bool) -> np.ndarray:
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    c = [index & low, index >> half, np.full_like(index, transposed), np.zeros_like(index)]
    for i in range(10):
        k = [np.uint64(int(w) + i * step & 0xFFFFFFFF) for w, step in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True)]
        p, q = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [q >> half ^ c[1] ^ k[0], q & low, p >> half ^ c[3] ^ k[1], p & low]
    return np.stack(c, axis=-1).astype("<u4").view(np.uint8)


# ---------------------------------------------------------------- rules: a case to its outputs
def per_block(amax: np.ndarray, scope: str) -> np.ndarray:
    return {"tensor": lambda: amax, "row": lambda: amax[..., None], "window64": lambda: np.repeat(amax, 4, -1)}[scope]()


def quantize(case: Case, d: Dialect = RULE) -> Arrays:
    x = widened(case["x"])
    x = np.swapaxes(x, -1, -2) if case["transpose"] else x
    x = rotated(x, d) if case["rht"] else x
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    b, amax, scope = np.abs(blocks).max(-1), case.get("amax"), case["scope"]
    if amax is None:
        windows = b.reshape(*x.shape[:-1], -1, 4) if scope == "window64" else b
        amax = windows.max(axis=None if scope == "tensor" else -1)
    amaxes = np.broadcast_to(per_block(amax, scope), b.shape)
    b = of_tiles(b, lambda rows: rows.max(0)) if case["block_rows"] == BLOCK else b
    encode, decode = tensor_scales(amaxes, case["e4m3_max"], d)
    if case["select"] != "max6":
        scale, codes = choose(blocks, b, amaxes, encode, decode, case, d)
    else:
        value = d("block scale")(b, encode, decode)
        scale = e4m3(value * F(1.0625) if case["headroom"] else value, d)
        scale = d("scale of a small block")(scale).astype(np.uint8)
        values = d("codes")(blocks, *(v[..., None] for v in (of_e4m3(scale), encode, decode)))
        index = np.arange(b.size, dtype=np.uint64).reshape(b.shape)
        if case["rounding"] == "stochastic":
            codes = stochastic(values, philox(case["words"], index, case["transpose"]))
        else:
            codes = e2m1(values, d)
    return {"data": pack(codes.reshape(x.shape), d), "scale": scale, "amax": np.asarray(amax, F)}


def stochastic(v: np.ndarray, r: np.ndarray) -> np.ndarray:
    a = np.abs(v)
    t = a + r.astype(F) * (np.where(a >= 4, F(2), np.where(a >= 2, F(1), F(0.5))) / F(256))
    code = np.searchsorted(E2M1, t, "right") - 1 | np.signbit(v) * 8
    return np.where(np.isnan(v), 0, code).astype(np.uint8)


def dequantize(case: Case, d: Dialect = RULE) -> Arrays:
    q = SIGNED[unpack(case["data"])].reshape(*case["scale"].shape, BLOCK)
    s, amax = of_e4m3(case["scale"])[..., None], per_block(case["amax"], case["scope"])[..., None]
    y = d("factor of a decoded value")(q, s, amax, case["e4m3_max"])
    return {"y": stored(y.reshape(*y.shape[:-2], -1), case["dtype"])}


def multiply(case: Case, d: Dialect = RULE) -> Arrays:
    """Computes a product [M, N]; ``a`` is a 16-bit matrix, or a_data, a_scale and a_amax."""
    add, b, sb, six_b = (
        d("order of sums"),
        SIGNED[unpack(case["b_data"])],
        of_e4m3(case["b_scale"]),
        F(6 * case["b_e4m3_max"]),
    )
    amax_b = np.atleast_2d(case["b_amax"].T)  # [windows or 1, rows or 1]
    if "a" in case:
        a, b = widened(case["a"]), b * np.repeat(sb, BLOCK, -1)
        y, alpha = add([a[:, [k]] * b[:, k] for k in range(a.shape[1])]), amax_b / six_b
    else:
        a, sa, six_a = SIGNED[unpack(case["a_data"])], of_e4m3(case["a_scale"]), F(6 * case["a_e4m3_max"])
        amax_a = np.atleast_2d(case["a_amax"].T)
        cut = [slice(BLOCK * i, BLOCK * (i + 1)) for i in range(sa.shape[1])]
        parts = [sa[:, [i]] * sb[:, i] * (a[:, k] @ b[:, k].T) for i, k in enumerate(cut)]
        count = max(len(amax_a), len(amax_b))
        pairs = [(amax_a[w % len(amax_a)][:, None], amax_b[w % len(amax_b)]) for w in range(count)]
        alphas = [d("alpha")(*pair, six_a, six_b) for pair in pairs]
        y, alpha = add(parts), alphas[0]
        if count > 1:  # windows of four blocks
            y, alpha = add([f * add(parts[4 * w : 4 * w + 4]) for w, f in enumerate(alphas)]), np.ones((), F)
    y = alpha * y
    return {"y": stored(y + case["bias"] if "bias" in case else y, case["dtype"])}


def tile_scales(case: Case, d: Dialect = RULE) -> Arrays:
    """Reorders scales to tiles of 128 x 4, each as 32 x 4 x 4 bytes, with zeros beyond the ends."""
    rows, cols = (-(-n // unit) * unit for n, unit in zip(case["scale"].shape, (128, 4), strict=True))
    out = np.pad(case["scale"], [(0, end - n) for n, end in zip(case["scale"].shape, (rows, cols), strict=True)])
    if d("tiles"):
        out = out.reshape(rows // 128, 4, 32, cols // 4, 4).transpose(0, 3, 2, 1, 4).reshape(rows, cols)
    return {"tiles": out}


def _scales(case: Case, d: Dialect) -> Arrays:
    encode, decode = tensor_scales(case["amax"], case["e4m3_max"], d)
    return {"encode": encode, "decode": decode}


_CODES = ("codes", "ties of elements", "code of -0", "code of NaN", "scale of NaN", "first nibble")
_PLAIN = ("levels of scales", "S_dec", "block scale", "scale of a small block", *_CODES, "ties of scales")
_CHOICE = ("candidates", "equal errors", "error", "S_dec", *_CODES)
_ROTATION = ("signs", "result of rotation")
RULES: dict[str, tuple[Callable[[Case, Dialect], Arrays], tuple[str, ...]]] = {  # and where others choose otherwise
    "1 elements": (lambda c, d: {"code": e2m1(c["x"], d)}, ("ties of elements", "code of -0", "code of NaN")),
    "2 scales": (lambda c, d: {"byte": e4m3(c["x"], d)}, ("ties of scales", "scale of NaN")),
    "3 packing": (lambda c, d: {"data": pack(c["code"], d)}, ("first nibble",)),
    "4 tensor scale": (_scales, ("S_dec",)),
    **dict.fromkeys(("5 blocks", "6 given amax", "7 not finite", "8 tiles 16x16"), (quantize, _PLAIN)),
    **dict.fromkeys(("9 rows", "10 windows"), (quantize, _PLAIN)),
    **dict.fromkeys(("11 4over6", "12 4over6 16x16"), (quantize, _CHOICE)),
    "13 rotation": (lambda c, d: {"y": rotated(widened(c["x"]), d)}, _ROTATION),
    "14 rotated blocks": (quantize, (*_ROTATION, *_PLAIN)),
    "15 stochastic cast": (lambda c, d: {"code": stochastic(c["v"], c["r"])}, ()),
    "16 random bytes": (lambda c, d: {"r": philox(c["words"], c["index"], c["transpose"])}, ()),
    "17 stochastic blocks": (quantize, ("S_dec", "block scale", "codes", "first nibble")),
    "18 dequantize": (dequantize, ("factor of a decoded value",)),
    "19 product": (multiply, ("order of sums", "alpha")),
    "20 product of windows": (multiply, ("order of sums", "alpha")),
    "21 product of 16-bit rows": (multiply, ("order of sums",)),
    "22 order of scales": (tile_scales, ("tiles",)),
}


# ---------------------------------------------------------------- vectors and results
class Vectors(NamedTuple):  # the cases by name, which begins with their rule; the outputs by case and name
    version: str
    cases: dict[str, Case]
    expected: Arrays


def load() -> Vectors:
    with np.load(VECTORS) as file:
        suite, arrays = json.loads(str(file["suite"])), {name: file[name] for name in file.files if name != "suite"}
    cases = {
        name: {key: arrays[value[1:]] if str(value).startswith("@") else value for key, value in case.items()}
        for name, case in suite["cases"].items()
    }
    return Vectors(suite["version"], cases, {n: a for n, a in arrays.items() if n.rpartition("/")[0] in cases})


def run(name: str, case: Case, dialect: Dialect = RULE) -> Arrays:
    with np.errstate(all="ignore"):
        outputs = RULES[name.split("/")[0]][0](case, dialect)
    return {f"{name}/{output}": np.array(array, order="C") for output, array in outputs.items()}


def is_equal(a: np.ndarray, b: np.ndarray) -> bool:
    return (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())


def first_differences(results: Mapping[str, np.ndarray], vectors: Vectors) -> dict[str, str]:
    """Names for each rule the first output that differs; or says "equal" or "not offered"."""
    found = dict.fromkeys(RULES, "not offered")
    for name, expected in vectors.expected.items():
        rule = name.split("/")[0]
        if name in results and found[rule] in ("not offered", "equal"):
            found[rule] = "equal" if is_equal(results[name], expected) else name
    return found


def compare(results: Mapping[str, np.ndarray], vectors: Vectors) -> dict[str, str]:
    """Says for each rule "equal", "not offered", or the first difference and the dialect that gives the results."""
    found = first_differences(results, vectors)
    for rule, name in found.items():
        if name in results:
            own = {n: a for n, a in results.items() if n.startswith(f"{rule}/")}
            found[rule] = f"{name}{_place(results[name], vectors.expected[name])}; {dialect_of(rule, own, vectors)}"
    return found


def _place(got: np.ndarray, expected: np.ndarray) -> str:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f" is {got.dtype}{list(got.shape)}, not {expected.dtype}{list(expected.shape)}"
    got, expected = (np.atleast_1d(a).view(f"u{a.itemsize}") for a in (got, expected))
    at = tuple(int(i) for i in np.argwhere(got != expected)[0])
    return f"{list(at)} is {got[at]:#x}, not {expected[at]:#x} ({np.mean(got != expected):.2%} differ)"


def dialect_of(rule: str, results: Mapping[str, np.ndarray], vectors: Vectors) -> str:
    """Names the choices that give the results of a rule, and of how many arrays if not of all.

    From the rule on it changes the one or two choices that make most arrays equal, or else most bytes.
    """
    cases = {name: case for name, case in vectors.cases.items() if any(r.startswith(f"{name}/") for r in results)}

    def score(dialect: Dialect) -> tuple[int, int]:
        computed = (item for name, case in cases.items() for item in run(name, case, dialect).items())
        pairs = [(results[o], a) for o, a in computed if o in results and results[o].nbytes == a.nbytes]
        bytes_of = [[np.frombuffer(a.tobytes(), np.uint8) for a in pair] for pair in pairs]
        return sum(is_equal(*pair) for pair in pairs), sum(int(np.sum(a == b)) for a, b in bytes_of)

    best, found, one = RULE, score(RULE), [(choice, value) for choice in RULES[rule][1] for value in CHOICES[choice]]
    for count in (1, 2, 2, 2):
        changed = [Dialect(best | dict(some)) for some in itertools.combinations(one, count)]
        scores = [score(dialect) for dialect in changed] if found[0] < len(results) else []
        if scores and max(scores) > found and (count > 1 or max(scores)[0] == len(results)):
            best, found = changed[scores.index(max(scores))], max(scores)
    named = "; ".join(f"{choice}: {value}" for choice, value in best.items() if value != next(iter(CHOICES[choice])))
    some = f" (for {found[0]} of {len(results)} arrays)" if found[0] < len(results) else ""
    return f"dialect: {named or 'unknown'}{some}"


def table(results: Mapping[str, np.ndarray], found: dict[str, str]) -> str:
    return "\n".join([f"results: {results.get('meta', 'without meta')}", *(f"{r:28}{t}" for r, t in found.items())])


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        return print(__doc__) or 2
    vectors, results = load(), dict(np.load(arguments[0]))
    if others := sorted(results.keys() - vectors.expected.keys() - {"meta"}):
        print(f"{arguments[0]} has {others[0]!r}, which is no output of version {vectors.version} of the vectors")
        return 2
    found = compare(results, vectors)
    print(table(results, found))
    return int(not set(found.values()) <= {"equal", "not offered"})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

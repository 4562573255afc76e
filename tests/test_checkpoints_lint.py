"""lint: a broken checkpoint for each rule, what --fix makes of it, and no alarm on checkpoints that are right."""

import copy
import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import GOLDEN, array, files_of, header_of, model_of, weight, with_header, write_model

import jnvfp4
from jnvfp4.checkpoints import ConvertOptions, convert_checkpoint, fix_checkpoint, lint, open_checkpoint
from jnvfp4.checkpoints._files.errors import CheckpointError
from jnvfp4.checkpoints._files.source import CONFIG, HF_QUANT, open_source
from jnvfp4.checkpoints._layouts.loaders import VERSIONS
from jnvfp4.checkpoints._layouts.stored import layout_of, open_stored
from jnvfp4.checkpoints._layouts.unsupported import kv_cache
from jnvfp4.checkpoints.rules import RULES
from jnvfp4.cli import main

MODELOPT, CT = "modelopt", "compressed-tensors"
ATTENTION, MOE = "model.layers.0.self_attn", "model.layers.0.mlp"
UP, DOWN = f"{MOE}.experts.1.up_proj", f"{MOE}.experts.1.down_proj"
ROUTER, HEAD = f"{MOE}.gate", "lm_head"
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def source_model(directory) -> Path:
    """A layer with attention, a router and three experts; its shapes divide by 8 ranks, and q, k, v fill no tile."""
    shapes = {"q": (128, 96), "k": (64, 96), "v": (64, 96), "o": (128, 128)}
    tensors = {f"{ATTENTION}.{role}_proj.weight": weight(*shape) for role, shape in shapes.items()}
    for e in range(3):
        tensors |= {f"{MOE}.experts.{e}.{role}_proj.weight": weight(128, 128, e) for role in ("gate", "up", "down")}
    tensors |= {f"{ROUTER}.weight": weight(4, 128), f"{HEAD}.weight": weight(64, 128)}
    tensors |= {"model.embed_tokens.weight": weight(64, 128), "model.norm.weight": weight(1, 128)}
    model = model_of(directory / "model", tensors, {"model_type": "qwen3_moe", "num_hidden_layers": 1})
    modules = [name.removesuffix(".weight") for name, (_, a) in tensors.items() if a.shape[0] > 1]
    (directory / "amaxes.json").write_text(json.dumps({m: 100 + i for i, m in enumerate(modules)}))
    return model


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Checkpoints without any finding, by layout."""
    directory = tmp_path_factory.mktemp("sound")
    model = source_model(directory)
    for layout in (MODELOPT, CT):
        options = ConvertOptions(layout=layout, input_amax=directory / "amaxes.json")
        convert_checkpoint(model, directory / layout, options)
    return {layout: directory / layout for layout in (MODELOPT, CT)}


class Broken:
    """The tensors and configs of a checkpoint, to be changed and written."""

    def __init__(self, directory: Path):
        source = open_source(directory)
        self.layout = layout_of(source)
        self.tensors = {e.name: (e.tag, source.read(e.name)) for e in source.entries()}
        self.config = copy.deepcopy(source.config)
        path = directory / HF_QUANT
        self.hf_quant = json.loads(path.read_text()) if path.exists() else None

    def write(self, directory: Path) -> Path:
        model_of(directory, self.tensors, self.config)
        (directory / "tokenizer.json").write_text("{}")
        if self.hf_quant is not None:
            (directory / HF_QUANT).write_text(json.dumps(self.hf_quant))
        return directory

    def part(self, module: str, which: str) -> str:
        """The name of one of a module's tensors."""
        return getattr(self.layout.parts(module), which)

    @property
    def quantization(self) -> dict:
        return self.config["quantization_config"]


def put(part, change, module):
    """Replaces one tensor of a module by what `change` makes of it, in its dtype or another one."""

    def broken(b: Broken) -> None:
        name = b.part(module, part)
        tag, x = b.tensors[name]
        new = change(x)
        b.tensors[name] = new if isinstance(new, tuple) else (tag, np.asarray(new, x.dtype).reshape(new.shape))

    return broken


def value(part, number, module=UP):
    return put(part, lambda x: np.full(x.shape, number, x.dtype), module)


def scaled(factor, module=UP):
    """Another global scale: S_dec is so many times as large."""

    def broken(b: Broken) -> None:
        put("global_scale", lambda x: x * np.float32(factor if b.layout.meaning == "decode" else 1 / factor), module)(b)

    return broken


def without(part, module=UP):
    return lambda b: b.tensors.pop(b.part(module, part))


def block_scale(byte, module=UP):
    def change(x):
        x = x.copy()
        x.view(np.uint8)[3, 5] = byte
        return x

    return put("scales", change, module)


def tiled(x, swizzle):
    """Block scales in whole tiles of 128x4, row by row or in the order in which GEMMs read them: entry by entry."""
    n, k = x.shape
    rows, columns = -(-n // 128) * 128, -(-k // 4) * 4
    out = np.zeros(rows * columns, np.uint8)
    for r in range(n):
        for c in range(k):
            tile = (r // 128) * (columns // 4) + c // 4
            place = tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
            out[place if swizzle else r * columns + c] = x.view(np.uint8)[r, c]
    return out.reshape(rows, columns)


def padded(module=f"{ATTENTION}.k_proj", swizzle=False, as_bytes=False, flat=False):
    def change(x):
        out = tiled(x, swizzle)
        out = out.reshape(-1) if flat else out
        return ("U8", out) if as_bytes else ("F8_E4M3", out.view(E4M3))

    return put("scales", change, module)


def experts_of(b: Broken) -> list[str]:
    """The experts' modules, whose 128x8 block scales are whole tiles."""
    return [f"{MOE}.experts.{e}.{role}_proj" for e in range(3) for role in ("gate", "up", "down")]


def unmarked(b: Broken, module: str) -> None:
    """Rows of different sizes, as models have, in the order of tiles."""
    rows = np.exp(np.random.default_rng(0).normal(0, 0.5, (128, 1)))
    put("scales", lambda x: tiled((rows * np.ones(x.shape)).astype(E4M3), True).view(E4M3), module)(b)


def blocks_of_32(b: Broken, module: str) -> None:
    put("scales", lambda x: x[:, ::2], module)(b)
    for section in (b.quantization, b.hf_quant["quantization"]):
        section["group_size"] = 32


def moved(module, to):
    """The parts of a quantized weight, as those of another module, whose 16-bit weight they replace."""

    def broken(b: Broken) -> None:
        b.tensors.pop(f"{to}.weight")
        b.tensors |= {n.replace(module, to): t for n, t in list(b.tensors.items()) if n.startswith(f"{module}.")}
        for listed in [
            b.quantization["ignore"],
            *([b.hf_quant["quantization"]["exclude_modules"]] if b.hf_quant else []),
        ]:
            listed[:] = [name for name in listed if name != to]

    return broken


def in_16_bits(b: Broken, module=DOWN) -> None:
    for name in b.layout.parts(module):
        b.tensors.pop(name)
    b.tensors[f"{module}.weight"] = weight(128, 128)
    for key, section in (("ignore", b.quantization), ("exclude_modules", (b.hf_quant or {}).get("quantization"))):
        if section is not None:
            section[key].append(module)


def short_k(b: Broken) -> None:
    put("codes", lambda x: x[:, :56], f"{ATTENTION}.o_proj")(b)
    put("scales", lambda x: x[:, :7], f"{ATTENTION}.o_proj")(b)


def no_activations(b: Broken) -> None:
    b.tensors = {n: t for n, t in b.tensors.items() if not n.endswith(str(b.layout.suffixes.activation))}


def weight_only_config(b: Broken) -> None:
    for group in b.quantization["config_groups"].values():
        group["input_activations"] = None


def entry(key, new, file=CONFIG):
    def broken(b: Broken) -> None:
        section = b.quantization if file == CONFIG else b.hf_quant["quantization"]
        section[key] = new(section[key]) if callable(new) else new

    return broken


def both(*changes):
    return lambda b: [change(b) for change in changes]


def kv(b: Broken) -> None:
    b.tensors[f"{ATTENTION}.k_proj.k_scale"] = b.tensors[f"{ATTENTION}.v_proj.v_scale"] = ("F32", np.float32(0.5))


def awq(b: Broken) -> None:
    b.tensors[f"{ATTENTION}.o_proj.pre_quant_scale"] = ("F32", np.ones(128, np.float32))


def group_entry(key, new):
    return lambda b: b.quantization["config_groups"]["group_0"].update({key: new})


def two_groups(b: Broken) -> None:
    """W4A16 in attention, W4A4 elsewhere."""
    groups = b.quantization["config_groups"]
    group = {**groups["group_0"], "targets": ["re:.*self_attn.*"], "input_activations": None}
    b.quantization["config_groups"] = {"group_0": groups["group_0"], "group_1": group}
    b.tensors = {n: t for n, t in b.tensors.items() if ATTENTION not in n or not n.endswith("input_global_scale")}


ANY = (MODELOPT, CT)
# By rule: a name, what is broken, the layouts, and whether --fix mends it.
BROKEN = [
    ("input-scale-missing", "an expert", without("activation"), ANY, True),
    ("input-scale-missing", "two experts", both(without("activation"), without("activation", DOWN)), ANY, True),
    ("input-scale-missing", "o_proj", without("activation", f"{ATTENTION}.o_proj"), ANY, False),
    *(("input-scale-zero", str(x), value("activation", x), ANY, True) for x in (0, np.nan, np.inf, -1)),
    ("input-scale-zero", "subnormal", value("activation", 1e-39), (MODELOPT,), True),
    ("input-scale-zero", "o_proj", value("activation", 0, f"{ATTENTION}.o_proj"), ANY, False),
    ("input-scale-one", "an expert", value("activation", 1), ANY, True),
    ("input-scale-one", "all experts", both(*(value("activation", 1, f"{MOE}.experts.{e}.{r}_proj") for e in range(3)
                                              for r in ("gate", "up", "down"))), ANY, False),
    ("input-scale-one", "o_proj", value("activation", 1, f"{ATTENTION}.o_proj"), ANY, False),
    ("fused-globals", "up", scaled(1.5), ANY, True),
    ("fused-globals", "up, smaller", scaled(0.4), ANY, True),
    ("fused-globals", "q", scaled(1.5, f"{ATTENTION}.q_proj"), ANY, True),
    ("fused-globals", "too far apart to be rounded again", scaled(1 / 100), ANY, False),
    ("fused-globals", "several numbers", put("global_scale", lambda x: x.reshape(-1) * [1, 1.5], DOWN), ANY, False),
    ("fused-globals", "k", scaled(1.01, f"{ATTENTION}.k_proj"), ANY, True),
    *(("bad-globals", str(x), value("global_scale", x, DOWN), ANY, False) for x in (0, np.nan, np.inf, -1)),
    ("bad-globals", "KV", both(kv, entry("kv_cache_scheme", {"num_bits": 8, "type": "float"}),
                               lambda b: b.tensors.update({f"{ATTENTION}.k_proj.k_scale": ("F32", np.float32(0))})),
     ANY, False),
    *(("bad-block-scales", hex(x), block_scale(x), ANY, True) for x in (0x7F, 0xFF)),
    ("bad-block-scales", "negative", block_scale(0x81), ANY, False),
    ("padded-scales", "plain", padded(), ANY, True),
    ("padded-scales", "swizzled", padded(swizzle=True), ANY, True),
    ("padded-scales", "swizzled, whole tiles of rows", padded(f"{ATTENTION}.q_proj", swizzle=True), ANY, True),
    ("padded-scales", "swizzled bytes", padded(swizzle=True, as_bytes=True, flat=True), ANY, True),
    ("padded-scales", "swizzled bytes of whole tiles", padded(UP, swizzle=True, as_bytes=True, flat=True), ANY, True),
    ("padded-scales", "unmarked tiles", lambda b: [unmarked(b, m) for m in list(experts_of(b))], ANY, False),
    ("padded-scales", "one axis of whole tiles", padded(UP, flat=True), ANY, False),
    ("parts", "blocks of 32", lambda b: [blocks_of_32(b, m) for m in experts_of(b)], (MODELOPT,), False),
    ("parts", "blocks of 32, and a group size", both(lambda b: blocks_of_32(b, UP), entry("group_size", 32, HF_QUANT)),
     (MODELOPT,), False),
    ("parts", "no scales", without("scales"), ANY, False),
    ("parts", "no global", without("global_scale"), ANY, False),
    ("parts", "half", put("scales", lambda x: x[:, :4], UP), ANY, False),
    ("parts", "no rows", both(*(put(p, lambda x: x[:0], f"{ATTENTION}.o_proj") for p in ("codes", "scales"))), ANY,
     False),
    ("parts", "scales as bytes", put("scales", lambda x: ("U8", x.view(np.uint8)), UP), ANY, False),
    ("parts", "dtype", put("global_scale", lambda x: ("I32", np.ones((), np.int32)), UP), ANY, False),
    ("experts-differ", "dtype", in_16_bits, (CT,), False),
    ("experts-differ", "missing", lambda b: [without(p, DOWN)(b) for p in b.layout.parts(DOWN)._fields], ANY, False),
    ("quantized-router", "", moved(UP, ROUTER), ANY, False),
    *(("quantized-router", m, both(lambda b, m=m: b.tensors.update({f"{m}.weight": weight(64, 128)}), moved(UP, m)),
       ANY, False) for m in (f"{ATTENTION}.indexer.wk", "mtp.fc")),
    ("quantized-head", "lm_head", moved(UP, HEAD), ANY, False),
    ("quantized-head", "embedding", moved(UP, "model.embed_tokens"), ANY, False),
    ("ranks", "", short_k, ANY, False),
    ("kv-scales", "", kv, ANY, True),
    ("kv-scales", "rotations", both(kv, entry("transform_config", {"a": 1})), ANY, False),
    ("config", "head not listed, in config.json", entry("ignore", [ROUTER]), ANY, True),
    ("config", "no list", lambda b: b.quantization.pop("ignore"), (CT,), True),
    ("config", "AWQ's factors", both(entry("ignore", [ROUTER]), awq), ANY, False),
    ("config", "rotations", both(entry("ignore", [ROUTER]), entry("transform_config", {"config_groups": {"u": {}}})),
     ANY, False),
    ("config", "AWQ", both(entry("ignore", [ROUTER]), entry("pre_quant_scale", True)), ANY, False),
    ("config", "unknown key", both(entry("ignore", [ROUTER]), entry("clip", 2)), ANY, False),
    ("config", "known keys", both(entry("ignore", [ROUTER]), entry("version", "0.15"), entry("sparsity_config", {})),
     ANY, True),
    ("config", "unknown key of a group", both(entry("ignore", [ROUTER]), group_entry("output_activations", {"a": 1})),
     ANY, False),
    ("config", "8 bits", both(entry("ignore", [ROUTER]), group_entry("input_activations", None),
                              group_entry("weights", {"num_bits": 8, "type": "float"})), ANY, False),
    ("config", "dynamic", both(no_activations, entry("ignore", [ROUTER]), entry("activation_scheme", "dynamic")),
     ANY, False),
    ("config", "dynamic group", both(no_activations, entry("ignore", [ROUTER]),
                                     group_entry("input_activations", {"num_bits": 4, "dynamic": True})), ANY, False),
    ("config", "two groups", both(entry("ignore", [ROUTER]), two_groups), (CT,), False),
    ("config", "head not listed", entry("exclude_modules", [ROUTER], HF_QUANT), (MODELOPT,), True),
    ("config", "nothing listed", entry("exclude_modules", [], HF_QUANT), (MODELOPT,), True),
    ("config", "quantized listed", entry("ignore", lambda x: [*x, DOWN]), ANY, True),
    ("config", "listed by *", entry("exclude_modules", lambda x: [*x, "*o_proj"], HF_QUANT), (MODELOPT,), True),
    ("config", "method", entry("quant_method", "fp8"), ANY, True),
    ("config", "group size", entry("group_size", 32, HF_QUANT), (MODELOPT,), True),
    ("config", "key", lambda b: b.hf_quant["quantization"].pop("kv_cache_quant_algo"), (MODELOPT,), True),
    ("config", "two algorithms", entry("quant_algo", "W4A16_NVFP4", HF_QUANT), (MODELOPT,), True),
    ("config", "no section", lambda b: b.config.pop("quantization_config"), (CT,), True),
    ("config", "format", lambda b: b.quantization.pop("format"), (CT,), True),
    ("config", "W4A4 without scales", no_activations, ANY, True),
    ("config", "W4A16 with scales", weight_only_config, (CT,), True),
]  # fmt: skip
CASES = [pytest.param(layout, *case, id=f"{case[0]}, {case[1]}, {layout}") for case in BROKEN for layout in case[3]]


def test_every_rule_has_a_broken_checkpoint():
    assert {case[0] for case in BROKEN} == set(RULES)


@pytest.mark.parametrize(("layout", "rule", "name", "breaks", "_", "fixable"), CASES)
def test_a_broken_checkpoint_is_found_and_fixed(tmp_path, sound, capsys, layout, rule, name, breaks, _, fixable):
    b = Broken(sound[layout])
    breaks(b)
    path, out = b.write(tmp_path / "broken"), tmp_path / "fixed"
    every = lint(path)
    found = [f for f in every if not f.note or rule != "config"]  # but for routers that are not listed
    assert {f.rule for f in found} == {rule}
    assert {f.fixable for f in found} == {fixable}
    assert rule != "experts-differ" or [f.where for f in found] == [DOWN]
    note = rule == "ranks" or name in ("lm_head", "all experts")
    assert {f.note for f in found} == {note}
    code = 0 if note else 1
    assert main(["lint", str(path)]) == code
    text = capsys.readouterr().out
    words = (rule, RULES[rule].breaks, RULES[rule].do, found[0].where, *(f"{n} {v}" for n, v in VERSIONS.items()))
    assert all(w in text for w in words)
    assert main(["lint", str(path), "--fix", str(out), "--json"]) == (0 if fixable else code)
    told = json.loads(capsys.readouterr().out)
    assert out.exists() == bool(told["fixed"]) == fixable
    if not fixable:
        assert told["findings"] == [vars(f) for f in every]
        return
    assert told["findings"] == lint(out) == []
    before, after = open_source(path), open_source(out)
    touched = {n for n in after.places if n not in before.places or not _same(before, after, n)}
    assert touched <= set(told["fixed"])
    stored = open_stored(out) if rule != "kv-scales" else None
    parts = [stored.parts(m) for m in stored.modules] if stored else []
    assert not touched & {p.codes for p in parts}
    assert touched <= {name for p in parts for name in p[1:]}
    kept = {n: d for n, d in files_of(path).items() if n not in told["fixed"] and not n.endswith(".safetensors")}
    assert kept.items() <= files_of(out).items()


def _same(a, b, name) -> bool:
    e, f = a.entry(name), b.entry(name)
    return (e.tag, e.shape) == (f.tag, f.shape) and a.read(name).tobytes() == b.read(name).tobytes()


# The layout, what is broken, the rules that find it, and whether --fix adds the scale of activations that is missing.
SEVERAL = {
    "two algorithms, no scale": (MODELOPT, both(entry("quant_algo", "W4A16_NVFP4", HF_QUANT), without("activation")),
                                 {"config", "input-scale-missing"}, True),
    "W4A16 with some scales": (CT, both(weight_only_config, without("activation")), {"config"}, False),
    "a section in one file": (MODELOPT, lambda b: b.config.pop("quantization_config"), set(), False),
    "a section in a file of another layout": (CT, lambda b: (b.config.pop("quantization_config"), setattr(
        b, "hf_quant", {"quantization": {"exclude_modules": [ROUTER, HEAD]}})), {"config"}, False),
    "an algorithm of several formats": (MODELOPT, both(entry("quant_algo", "MIXED_PRECISION"), entry("ignore", [])),
                                        set(), False),
    "a block scale of -0": (MODELOPT, block_scale(0x80), set(), False),
    "scales of no weight": (MODELOPT, both(entry("ignore", [ROUTER]), lambda b: b.tensors.update(
        {"a.weight_scale": ("F8_E4M3", np.ones((16, 2), E4M3))})), {"config"}, False),
    "fused with scales in an unknown order": (
        MODELOPT, both(padded(UP, flat=True), scaled(1.5), without("activation")),
        {"padded-scales", "fused-globals", "input-scale-missing"}, True),
    "1.0 in all but one": (
        MODELOPT, both(lambda b: [x.fill(1) for n, (_, x) in b.tensors.items() if n.endswith(".input_scale")],
                       without("activation")), {"input-scale-one", "input-scale-missing"}, True),
}  # fmt: skip


@pytest.mark.parametrize(("layout", "breaks", "rules", "adds"), SEVERAL.values(), ids=SEVERAL)
def test_faults_beside_each_other(tmp_path, sound, layout, breaks, rules, adds):
    b = Broken(sound[layout])
    breaks(b)
    path = b.write(tmp_path / "broken")
    assert {f.rule for f in lint(path)} == rules
    done = fix_checkpoint(path, tmp_path / "fixed").keys() - {CONFIG, HF_QUANT}
    assert done == ({b.part(UP, "activation")} if adds else set())


# ---------------------------------------------------------------- what --fix writes
def fixed(tmp_path, sound, breaks, layout=MODELOPT) -> tuple[Broken, Broken]:
    """A checkpoint as it was before it was broken, and after it was fixed."""
    b = Broken(sound[layout])
    breaks(b)
    fix_checkpoint(b.write(tmp_path / "broken"), tmp_path / "fixed")
    return Broken(sound[layout]), Broken(tmp_path / "fixed")


def test_the_metadata_of_shards_is_kept(tmp_path, sound):
    b = Broken(sound[MODELOPT])
    block_scale(0xFF)(b)
    shard = next(b.write(tmp_path / "broken").glob("*.safetensors"))
    header, data = header_of(shard.read_bytes())
    metadata = {"recipe": "mine", "jnvfp4_version": "0.1"}
    shard.write_bytes(with_header(json.dumps({**header, "__metadata__": metadata}), data))
    fix_checkpoint(tmp_path / "broken", tmp_path / "fixed")
    written = {**metadata, "format": "pt", "jnvfp4_version": jnvfp4.__version__}
    assert open_source(tmp_path / "fixed").files[shard.name].metadata == written


@pytest.mark.parametrize("layout", ANY)
@pytest.mark.parametrize("breaks", [without("activation"), value("activation", 0), value("activation", 1)])
def test_activations_get_the_largest_scale_of_siblings(tmp_path, sound, layout, breaks):
    """Gate of the same expert, gate and up of the others; not down."""
    before, after = fixed(tmp_path, sound, breaks, layout)
    siblings = [f"{MOE}.experts.{e}.{role}_proj" for e in range(3) for role in ("gate", "up")]
    scales = [before.tensors[before.part(m, "activation")][1].item() for m in siblings if m != UP]
    tag, got = after.tensors[after.part(UP, "activation")]
    assert (tag, got.shape) == ("F32", after.layout.global_shape)
    assert len(set(scales)) > 1
    assert got.item() == pytest.approx(max(scales) if layout == MODELOPT else min(scales), rel=1e-6)


def test_a_stack_of_experts_has_a_scale_each(tmp_path):
    """Stored as [E, K, N], of which K is split over ranks."""
    stack = f"{MOE}.experts"
    tensors = {f"{stack}.{role}_proj": array(2, 128, 64) for role in ("gate", "up", "down")}
    model = model_of(tmp_path / "model", tensors, {"model_type": "llama4"})
    convert_checkpoint(model, tmp_path / "sound", ConvertOptions(input_amax=3.0))
    assert lint(tmp_path / "sound") == []
    b = Broken(tmp_path / "sound")
    name = f"{stack}.up_proj_input_scale"
    scale = b.tensors.pop(name)[1]
    blocks = b.tensors[f"{stack}.down_proj_weight_scale"][1]
    blocks.view(np.uint8)[1, 2, 3] = 0x7F
    fix_checkpoint(b.write(tmp_path / "broken"), tmp_path / "fixed")
    after = Broken(tmp_path / "fixed").tensors
    assert after[name][1].tolist() == scale.tolist()
    assert after[f"{stack}.down_proj_weight_scale"][1].shape == blocks.shape
    assert lint(tmp_path / "fixed") == []


def test_scales_are_found_in_any_order(tmp_path, sound):
    for name, breaks in (("a", padded()), ("b", padded(swizzle=True)), ("c", padded(UP, True, True, True))):
        before, after = fixed(tmp_path / name, sound, breaks)
        assert after.tensors.keys() == before.tensors.keys()
        assert all(a[0] == b[0] and a[1].tobytes() == b[1].tobytes() for a, b in zip(
            after.tensors.values(), before.tensors.values(), strict=True))  # fmt: skip


@pytest.mark.parametrize("layout", ANY)
@pytest.mark.parametrize("factor", [1.5, 0.4])
def test_fused_weights_get_the_largest_scale_and_nearly_the_same_values(tmp_path, sound, layout, factor):
    b = Broken(sound[layout])
    scaled(factor)(b)
    path, out = b.write(tmp_path / "broken"), tmp_path / "fixed"
    fix_checkpoint(path, out)
    old, new = open_stored(path), open_stored(out)
    gate = f"{MOE}.experts.1.gate_proj"
    for module in (UP, gate):
        v, w = old.weight(module), new.weight(module)
        assert w.decode == max(old.weight(m).decode for m in (UP, gate))
        assert v.codes.tobytes() == w.codes.tobytes()
        if v.decode == w.decode:
            assert v.scales.tobytes() == w.scales.tobytes()
        else:
            exact = v.scales.view(E4M3).astype(np.float32) * (v.decode / w.decode)
            assert w.scales.view(E4M3).tobytes() == exact.astype(E4M3).tobytes()
            x, y = v.values(), w.values()
            assert 0 < np.linalg.norm(x - y) < 0.04 * np.linalg.norm(x)


FUSED_ROLES = (
    ("linear_attn", ("in_proj_qkv", "in_proj_z")),  # Qwen3.5; with in_proj_b and in_proj_a
    ("attn1", ("to_q", "to_k", "to_v")),
    ("attn2", ("to_k", "to_v")),
    ("attn", ("add_q_proj", "add_k_proj", "add_v_proj")),
    ("attention", ("wq", "wk", "wv")),
    ("self_attn", ("index_q_proj", "index_k_proj", "index_v_proj")),
    ("self_attn", ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj")),  # Kimi Linear
    ("mlp", ("c_fc_0", "c_fc_1")),
    ("mlp", ("fc1", "fc3")),
    ("attention.self", ("query", "key", "value")),
)
APART = (("mlp", ("fc1", "fc2")), ("attn2", ("to_q", "to_k")), ("crossattention", ("query", "key")))


@pytest.mark.parametrize(("parent", "roles"), FUSED_ROLES + APART)
def test_what_loaders_fuse_has_one_global_scale(tmp_path, parent, roles):
    """Standard deviations of 0.02 and 0.2 give one global scale; lint finds several in a file, and --fix mends them."""
    modules = [f"model.layers.0.{parent}.{role}" for role in roles]
    deviations = dict(zip(modules, (0.02, *[0.2] * len(modules)), strict=False))
    tensors = {f"{m}.weight": array(64, 64) * np.asarray(v, ml_dtypes.bfloat16) for m, v in deviations.items()}
    model, apart = model_of(tmp_path / "model", tensors), tmp_path / "apart"
    convert_checkpoint(model, tmp_path / "out", ConvertOptions(weight_only=True))
    b, fused = Broken(tmp_path / "out"), roles not in [r for _, r in APART]
    one = {b.tensors[b.part(m, "global_scale")][1].item() for m in modules}
    assert len(one) == (1 if fused else 2)
    assert lint(tmp_path / "out") == []
    for m in modules:
        convert_checkpoint(model_of(tmp_path / m, {f"{m}.weight": tensors[f"{m}.weight"]}), tmp_path / f"{m}-out")
        b.tensors |= {n: t for n, t in Broken(tmp_path / f"{m}-out").tensors.items() if not n.endswith("input_scale")}
    assert [(f.rule, f.fixable) for f in lint(b.write(apart))] == [("fused-globals", True)] * fused
    if fused:
        fix_checkpoint(apart, tmp_path / "fixed")
        assert lint(tmp_path / "fixed") == []


@pytest.mark.parametrize("layout", ANY)
def test_fused_weights_get_the_same_bytes(tmp_path, sound, layout):
    for i, factor in enumerate(np.random.default_rng(0).uniform(0.5, 2, 50)):
        _, after = fixed(tmp_path / str(i), sound, scaled(factor), layout)
        gate = after.part(f"{MOE}.experts.1.gate_proj", "global_scale")
        assert after.tensors[gate][1].tobytes() == after.tensors[after.part(UP, "global_scale")][1].tobytes()


def test_nan_becomes_the_largest_scale(tmp_path, sound):
    before, after = fixed(tmp_path, sound, block_scale(0xFF))
    x, y = (b.tensors[b.part(UP, "scales")][1].view(np.uint8) for b in (before, after))
    assert y[3, 5] == 0x7E
    y[3, 5] = x[3, 5]
    assert x.tobytes() == y.tobytes()


def test_faults_of_one_weight_are_mended_together(tmp_path, sound):
    """Scales that are padded, with NaN, of fused weights with different global scales; and what cannot be fixed."""
    k = f"{ATTENTION}.k_proj"
    breaks = both(block_scale(0x7F, k), padded(k, swizzle=True), scaled(0.5, k), without("activation", k), kv)
    b = Broken(sound[MODELOPT])
    both(breaks, value("global_scale", np.nan, DOWN))(b)
    path = b.write(tmp_path / "broken")
    assert len({f.rule for f in lint(path)}) == 6
    done = fix_checkpoint(path, tmp_path / "fixed")
    assert done[b.part(k, "scales")].startswith("stored as [N, K/16], 448 for NaN, rounded again")
    assert [f.rule for f in lint(tmp_path / "fixed")] == ["bad-globals"]
    v = f"{ATTENTION}.v_proj"
    value("global_scale", 0, v)(b)
    assert [f.where for f in lint(b.write(tmp_path / "more")) if f.rule == "fused-globals"] == [f"{ATTENTION}.q_proj"]
    assert b.part(v, "global_scale") not in fix_checkpoint(tmp_path / "more", tmp_path / "again")
    _, scales = Broken(tmp_path / "fixed").tensors[b.part(k, "scales")]
    assert scales.shape == (64, 6)
    assert scales[3, 5].astype(np.float32) == 224


def test_the_config_made_anew_is_that_of_the_converter(tmp_path, sound):
    for layout in ANY:
        before, after = fixed(tmp_path / layout, sound, entry("ignore", [ROUTER]), layout)
        assert (before.config, before.hf_quant) == (after.config, after.hf_quant)
    claim = both(entry("kv_cache_quant_algo", "FP8", HF_QUANT), entry("group_size", 32, HF_QUANT))
    for name, of_cache in (("scales", kv), ("claim", claim)):
        _, after = fixed(tmp_path / name, sound, of_cache)
        assert after.hf_quant["quantization"]["kv_cache_quant_algo"] == "FP8"
    _, after = fixed(tmp_path / "w", sound, no_activations)
    assert after.quantization["quant_algo"] == "W4A16_NVFP4"


def test_shards_stay_shards(tmp_path, sound):
    """A tensor that is new goes beside the codes of its weight."""
    convert_checkpoint(GOLDEN / "llama" / "input", tmp_path / "two")
    (tmp_path / "two" / HF_QUANT).unlink()
    config = json.loads((tmp_path / "two" / CONFIG).read_text())
    config["quantization_config"]["ignore"] = ["x"]
    (tmp_path / "two" / CONFIG).write_text(json.dumps(config))
    fix_checkpoint(tmp_path / "two", tmp_path / "out")
    before, after = open_source(tmp_path / "two"), open_source(tmp_path / "out")
    assert (len(after.files), after.places) == (2, before.places)
    assert open_checkpoint(tmp_path / "out").keys() == open_checkpoint(tmp_path / "two").keys()
    b = Broken(sound[MODELOPT])
    without("activation")(b)
    shards = {f"{i}.safetensors": {n: x for n, x in b.tensors.items() if (UP in n) == i} for i in (0, 1)}
    fix_checkpoint(write_model(tmp_path / "new", shards, b.config), tmp_path / "fixed")
    assert open_source(tmp_path / "fixed").places[b.part(UP, "activation")] == "1.safetensors"


def test_a_list_that_loaders_would_read_differently_is_not_made(tmp_path, sound):
    """With a dense MLP beside the router, whose name is a part of gate_proj's."""
    b = Broken(sound[MODELOPT])
    b.tensors |= {n.replace("experts.0.", ""): t for n, t in b.tensors.items() if "experts.0." in n}
    path = b.write(tmp_path / "broken")
    assert {(f.rule, f.fixable) for f in lint(path)} == {("config", False)}
    assert fix_checkpoint(path, tmp_path / "fixed") == {}
    assert not (tmp_path / "fixed").exists()


# ---------------------------------------------------------------- no alarm
GOLDENS = sorted(p.parent for p in GOLDEN.rglob("model.safetensors") if p.parent.name != "input")


@pytest.mark.parametrize("path", GOLDENS, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_golden_checkpoints_have_no_finding(path, capsys):
    """Notes say that activations are not calibrated, once, and that eight ranks are too many."""
    assert len(GOLDENS) == 5
    assert all(f.note for f in lint(path))
    assert sum(f.rule == "input-scale-one" for f in lint(path)) <= 1
    assert main(["lint", str(path)]) == 0
    assert capsys.readouterr().out.endswith("\nno finding\n")


@pytest.mark.parametrize(
    "options",
    [{}, {"layout": CT}, {"layout": "te"}, {"weight_only": True}, {"layout": CT, "weight_only": True},
     {"kv_cache": "fp8"}, {"preset": "moe-experts"}, {"experts": "stacked"}, {"input_amax": 3.0},
     {"layout": "te", "spec": jnvfp4.ROW_SCALED}, {"spec": jnvfp4.spec.four_over_six()}, {"ignore": ("*.o_proj",)},
     {"layout": "te", "spec": jnvfp4.spec.four_over_six()}, {"layout": CT, "ignore": ("*.o_proj",)}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("model", ["llama", "moe"])
def test_what_the_converter_writes_has_no_finding(tmp_path, model, options):
    if model == "llama" and {"preset", "experts"} & options.keys():
        pytest.skip("has no experts")
    convert_checkpoint(GOLDEN / model / "input", tmp_path / "out", ConvertOptions(**options))
    assert [f for f in lint(tmp_path / "out") if not f.note] == []


@pytest.mark.parametrize("layout", ANY)
def test_lists_of_other_software_are_read_as_loaders_do(tmp_path, sound, layout):
    """Wildcards of Model Optimizer, expressions of compressed-tensors, targets; vision towers are not asked for."""
    b = Broken(sound[layout])
    b.tensors["model.visual.blocks.0.attn.qkv.weight"] = weight(16, 32)
    listed = ["lm_head*", "model.layers.0.mlp.gat*"] if layout == MODELOPT else ["re:.*lm_head", r"re:.*mlp\.gate$"]
    b.quantization["ignore"] = listed
    if layout == MODELOPT:
        b.hf_quant["quantization"]["exclude_modules"] = listed
    assert lint(b.write(tmp_path / "listed")) == []
    if layout == CT:
        b.quantization["ignore"] = []
        b.quantization["config_groups"]["group_0"]["targets"] = ["re:.*self_attn.*", "re:.*experts.*"]
        assert lint(b.write(tmp_path / "targets")) == []
        return
    for role in "qkv":
        in_16_bits(b, f"{ATTENTION}.{role}_proj")
    b.quantization["ignore"] = b.hf_quant["quantization"]["exclude_modules"] = [*listed[:2], f"{ATTENTION}.qkv_proj"]
    assert lint(b.write(tmp_path / "fused")) == []


def test_mixed_formats_are_checked_but_for_their_config(tmp_path, sound):
    b = Broken(sound[MODELOPT])
    b.tensors[f"{ATTENTION}.x_proj.weight"] = ("F8_E4M3", np.ones((16, 32), E4M3))
    b.tensors[f"{ATTENTION}.x_proj.weight_scale"] = ("F32", np.float32(1))
    b.quantization["quant_algo"] = b.hf_quant["quantization"]["quant_algo"] = "MIXED_PRECISION"
    assert lint(b.write(tmp_path / "mixed")) == []
    both(without("activation"), kv, entry("ignore", ["lm_head"]))(b)
    found = [(f.rule, f.fixable) for f in lint(b.write(tmp_path / "broken"))]
    assert found == [("input-scale-missing", True), ("kv-scales", False)]
    b.hf_quant["quantization"]["quantized_layers"] = {
        f"{MOE}.*": {"quant_algo": "NVFP4"},
        f"{MOE}.experts.*": {"quant_algo": "W4A16_NVFP4"},
    }
    assert [f.rule for f in lint(b.write(tmp_path / "weight-only"))] == ["kv-scales"]


@pytest.mark.parametrize("layout", ANY)
def test_a_scale_of_one_that_may_be_real_is_a_note(tmp_path, sound, layout):
    """An amax of 2688 beside one of 400 or 5376; a scale that is missing beside them is the largest."""
    b = Broken(sound[layout])
    gate = f"{MOE}.experts.1.gate_proj"
    both(value("activation", 1), value("activation", 0.15 if layout == MODELOPT else 1 / 0.15, gate))(b)
    assert [(f.rule, f.note, f.fixable) for f in lint(b.write(tmp_path / "a"))] == [("input-scale-one", True, False)]
    without("activation", gate)(b)
    for near, largest in ((0.15, 1), (2, 2)):
        value("activation", near if layout == MODELOPT else 1 / near, f"{MOE}.experts.0.gate_proj")(b)
        fix_checkpoint(b.write(tmp_path / f"b{near}"), tmp_path / f"out{near}")
        got = [Broken(tmp_path / f"out{near}").tensors[b.part(m, "activation")][1].item() for m in (UP, gate)]
        assert got == [1, largest if layout == MODELOPT else 1 / largest]


def test_activations_are_judged_by_their_group(tmp_path, sound):
    """W4A16 beside W4A4; activations whose scales are computed as the model runs."""
    b = Broken(sound[CT])
    two_groups(b)
    assert lint(b.write(tmp_path / "two")) == []
    without("activation")(b)
    path = b.write(tmp_path / "broken")
    assert [(f.rule, f.fixable) for f in lint(path)] == [("input-scale-missing", True)]
    assert fix_checkpoint(path, tmp_path / "out").keys() == {b.part(UP, "activation")}
    for layout in ANY:
        b = Broken(sound[layout])
        both(group_entry("input_activations", {"num_bits": 4, "dynamic": True}), without("activation"))(b)
        value("activation", 0, DOWN)(b)
        assert lint(b.write(tmp_path / layout)) == []
        no_activations(b)
        assert lint(b.write(tmp_path / f"{layout}-none")) == []


def test_scales_of_a_cache_in_another_format_are_no_finding(tmp_path, sound):
    b = Broken(sound[MODELOPT])
    both(kv, entry("kv_cache_quant_algo", "NVFP4", HF_QUANT))(b)
    path = b.write(tmp_path / "kv")
    assert lint(path) == []
    assert kv_cache(open_source(path)) == "NVFP4"


def test_layout_te_has_nothing_to_fix(tmp_path):
    path = tmp_path / "te"
    convert_checkpoint(GOLDEN / "llama" / "input", path, ConvertOptions(layout="te"))
    b = Broken(path)
    module = "model.layers.0.self_attn.k_proj"
    padded(module, as_bytes=True)(b)
    entry("ignore", [module])(b)
    found = lint(b.write(tmp_path / "broken"))
    assert {"padded-scales", "config"} <= {f.rule for f in found}
    assert not any(f.fixable for f in found)
    assert fix_checkpoint(tmp_path / "broken", tmp_path / "out") == {}


@pytest.mark.parametrize("layout", ANY)
def test_a_router_that_is_not_listed_is_a_note(tmp_path, sound, layout):
    b = Broken(sound[layout])
    entry("ignore", ["lm_head"])(b)
    (found,) = lint(b.write(tmp_path / "broken"))
    assert (found.rule, found.note, found.fixable) == ("config", True, False)
    assert ROUTER in found.found


# ---------------------------------------------------------------- the command
def test_ranks_that_are_asked_for_are_findings(tmp_path, sound, capsys):
    path = str(sound[MODELOPT])
    assert lint(path, ranks=8) == []
    assert [(f.rule, f.note) for f in lint(path, ranks=16)] == [("ranks", False)] * 2
    assert main(["lint", path, "--ranks", "16"]) == 1
    assert "as 2 more" in capsys.readouterr().out
    assert main(["lint", path, "--ranks", "0"]) == 2


def test_long_lists_are_cut_in_text_alone(tmp_path, sound, capsys):
    b = Broken(sound[MODELOPT])
    b.tensors = {n: t for n, t in b.tensors.items() if not n.endswith(".input_scale") or ATTENTION in n}
    for e in range(3, 12):
        b.tensors |= {n.replace("experts.2", f"experts.{e}"): t for n, t in b.tensors.items() if "experts.2" in n}
    path = b.write(tmp_path / "broken")
    assert main(["lint", str(path)]) == 1
    out = capsys.readouterr().out
    assert "and 26 more" in out
    assert out.endswith("findings: 36, of which --fix mends 0\n")
    assert main(["lint", str(path), "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["findings"]) == 36


def test_what_is_no_checkpoint_is_an_error(tmp_path, capsys):
    with pytest.raises(CheckpointError, match="has no NVFP4 weight"):
        lint(GOLDEN / "moe" / "input")
    assert main(["lint", str(GOLDEN / "moe" / "input"), "--fix", str(tmp_path / "out")]) == 3
    assert main(["lint", str(GOLDEN / "moe" / "te_modelopt"), "--fix", str(tmp_path / "out")]) == 0
    assert "nothing to fix" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_an_output_that_has_files_is_refused(tmp_path, sound):
    b = Broken(sound[MODELOPT])
    without("activation")(b)
    path = b.write(tmp_path / "broken")
    before = files_of(path)
    for out in (path, sound[MODELOPT]):
        with pytest.raises(CheckpointError, match="is not empty"):
            fix_checkpoint(path, out)
    assert files_of(path) == before


def test_block_scales_are_read_by_slices(tmp_path, sound, monkeypatch):
    """And nothing else that is large."""
    from jnvfp4.checkpoints._files.safetensors import File
    from jnvfp4.checkpoints._layouts import survey

    read, names = File.read, []
    monkeypatch.setattr(survey, "CHUNK_BYTES", 100)
    monkeypatch.setattr(File, "read", lambda f, name, rows=slice(None): (names.append(name), read(f, name, rows))[1])
    monkeypatch.setattr(File, "array", None)
    b = Broken(sound[CT])
    block_scale(0x7F)(b)
    names.clear()
    assert [f.found for f in lint(b.write(tmp_path / "broken"))] == ["has 1 NaN of 1024"]
    assert names.count(b.part(UP, "scales")) == 8 + 1  # once for the order
    assert not [n for n in names if not re.search("scale", n)]


def test_padded_scales_are_read_once_and_once_more_to_be_stored(tmp_path, sound, monkeypatch):
    from jnvfp4.checkpoints._layouts.survey import Survey

    unpadded, read = Survey.unpadded, []
    monkeypatch.setattr(Survey, "unpadded", lambda s, item: (read.append(item.module), unpadded(s, item))[1])
    b, module = Broken(sound[MODELOPT]), f"{ATTENTION}.k_proj"
    both(padded(module), scaled(0.5, module))(b)
    assert {f.rule for f in lint(b.write(tmp_path / "broken"))} == {"padded-scales", "fused-globals"}
    assert read == [module]
    fix_checkpoint(tmp_path / "broken", tmp_path / "fixed")
    assert read == [module] * 3


def test_the_page_has_all_rules():
    page = (Path(__file__).parent.parent / "docs" / "checkpoints.md").read_text()
    table = re.search(r"^\| rules \|.*\n((?:\|.*\n)+)", page, re.M)[1]
    rows = [line.split("|")[1] for line in table.splitlines()]
    assert sorted(re.findall(r"`([\w-]+)`", "".join(rows))) == sorted(RULES)

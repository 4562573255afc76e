"""Checkpoints in JAX: formats that are refused, sharded reading, orbax."""

import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoints import TE_MODELOPT, array, environment, same, write_model
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from scripts import in_two_processes

import jnvfp4
from jnvfp4.checkpoints import (
    CheckpointError,
    dequantize_checkpoint,
    diff,
    inspect,
    open_checkpoint,
    repack_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from jnvfp4.checkpoints._files.source import CONFIG, HF_QUANT, Source
from jnvfp4.checkpoints._layouts.base import Quantization
from jnvfp4.checkpoints._layouts.layouts import LAYOUTS
from jnvfp4.cli import main

# ---------------------------------------------------------------- checkpoints that are NVFP4 in part
READERS = {
    "open": open_checkpoint,
    "dequantize": lambda path: dequantize_checkpoint(path, path.parent / "dequantized", "F32"),
    "repack": lambda path: repack_checkpoint(path, path.parent / "repacked", "modelopt"),
    "verify": lambda path: verify_checkpoint(path, path),
    "diff": lambda path: diff(path, path),
}
ATTENTION = "model.layers.0.self_attn"
ONE = ("F32", np.ones((), np.float32))
FP8 = ("F8_E4M3", np.ones((16, 32), ml_dtypes.float8_e4m3fn))
FP8_ARGUMENTS = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


def nvfp4_with(directory, layout="modelopt", tensors=(), change=lambda config, hf_quant: None):
    """A checkpoint with one NVFP4 weight, `o_proj`, these tensors beside it, and changed configs."""
    parts = LAYOUTS[layout].parts(f"{ATTENTION}.o_proj")
    scales = np.full((16, 2), 0x38, np.uint8)
    stored = {
        parts.codes: ("U8", np.arange(256, dtype=np.uint8).reshape(16, 16)),
        parts.scales: ("U8", scales) if layout == "te" else ("F8_E4M3", scales.view(ml_dtypes.float8_e4m3fn)),
        parts.global_scale: ("F32", np.ones(1, np.float32)),
        **({parts.activation: ONE} if parts.activation else {}),
    }
    files = LAYOUTS[layout].config_files({}, Quantization(["lm_head"], weight_only=False))
    config, hf_quant = files[CONFIG], files.get(HF_QUANT)
    change(config, hf_quant)
    out = write_model(directory / "nvfp4", {"model.safetensors": stored | dict(tensors)}, config)
    if layout == "modelopt":
        (out / HF_QUANT).write_text(json.dumps(hf_quant))
    return out


# By what else is stored: the tensors, and the tensor and the module that the error names.
OTHER_FORMATS = {
    "FP8 activations": ({"q_proj.weight": ("BF16", array(16, 32)), "q_proj.input_scale": ONE},
                        "q_proj.input_scale", "q_proj"),
    "MXFP4": ({"q_proj.weight": ("U8", np.zeros((16, 16), np.uint8)),
               "q_proj.weight_scale": ("U8", np.zeros((16, 1), np.uint8))}, "q_proj.weight_scale", "q_proj"),
    "INT8": ({"q_proj.weight": ("I8", np.ones((16, 32), np.int8)), "q_proj.scale": ONE}, "q_proj.scale", "q_proj"),
    "FP8 of three axes": (
        {"q_proj.weight": ("F8_E4M3", np.ones((2, 16, 32), ml_dtypes.float8_e4m3fn)), "q_proj.weight_scale": ONE},
        "q_proj.weight_scale", "q_proj"),
    "FP8, no weight": ({"q_proj": FP8, "q_proj.weight_scale": ONE}, "q_proj.weight_scale", "q_proj"),
    "bytes": ({"q_proj.weight": ("U8", np.ones((16, 16), np.uint8)), "q_proj.scale": ONE}, "q_proj.scale", "q_proj"),
    "GPTQ": ({"q_proj.qweight": ("I32", np.ones((4, 16), np.int32)), "q_proj.scales": ("BF16", array(1, 16))},
             "q_proj.scales", "q_proj"),
    "E5M2": ({"q_proj.weight": ("F8_E5M2", FP8[1].astype(ml_dtypes.float8_e5m2)), "q_proj.scale": ONE},
             "q_proj.scale", "q_proj"),
    "AWQ, of another size": ({"o_proj.pre_quant_scale": ("BF16", array(16))}, "o_proj.pre_quant_scale", "o_proj"),
    "AWQ, of another dtype": ({"o_proj.pre_quant_scale": ("F64", np.ones(32))}, "o_proj.pre_quant_scale", "o_proj"),
    "AWQ of FP8": (
        {"q_proj.weight": FP8, "q_proj.weight_scale": ONE, "q_proj.pre_quant_scale": ("BF16", array(32))},
        "q_proj.pre_quant_scale", "q_proj"),
    "two scales of FP8": (
        {"q_proj.weight": FP8, "q_proj.weight_scale": ONE, "q_proj.weight_scale_inv": ONE},
        "q_proj.weight_scale_inv", "q_proj"),
    "SVDQuant": ({"o_proj.svdquant_lora_a": ("BF16", array(4, 32))}, "o_proj.svdquant_lora_a", "o_proj"),
    "order of columns": ({"o_proj.weight_g_idx": ("I32", np.zeros(32, np.int32))}, "o_proj.weight_g_idx", "o_proj"),
    **{name: ({f"o_proj.{name}": ONE}, f"o_proj.{name}", "o_proj")
       for name in ("weight_zero_point", "svdquant_lora_b", "q_scale", "kv_scale", "output_scale")},
}  # fmt: skip


def refused_by_all(path, text) -> None:
    """By every reader, before anything is written; `inspect` describes it with a warning."""
    for reader in READERS.values():
        with pytest.raises(CheckpointError, match=text) as found:
            reader(path)
        assert found.value.code == 3
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    (warning,) = inspect(path)["warnings"]
    assert re.search(text, f"{warning}\n")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", OTHER_FORMATS)
def test_other_formats_beside_nvfp4_are_refused(tmp_path, case, layout):
    tensors, tensor, module = OTHER_FORMATS[case]
    path = nvfp4_with(tmp_path, layout, {f"{ATTENTION}.{name}": t for name, t in tensors.items()})
    name, of = (re.escape(f"{ATTENTION}.{x}".rstrip(".")) for x in (tensor, module))
    refused_by_all(
        path, f"model.safetensors: tensor '{name}': belongs to module '{of}'.*; expected NVFP4 and FP8 weights"
    )


def entries(**values):
    return lambda config, hf_quant: config["quantization_config"].update(values)


def of_group(**values):
    return lambda config, hf_quant: config["quantization_config"]["config_groups"]["group_0"].update(values)


def of_weights(**values):
    return lambda config, hf_quant: config["quantization_config"]["config_groups"]["group_0"]["weights"].update(values)


def of_hf_quant(**values):
    return lambda config, hf_quant: hf_quant["quantization"].update(values)


QUANTIZED_LAYERS = {
    f"{ATTENTION}.o_proj": {"quant_algo": "NVFP4", "group_size": 16},
    f"{ATTENTION}.q_proj": {"quant_algo": "W8A16"},
}
MIXED = {"quant_algo": "MIXED_PRECISION", "quantized_layers": QUANTIZED_LAYERS}
LAYER = rf"quantized_layers\.{re.escape(ATTENTION)}\.q_proj\.quant_algo is 'W8A16'; expected 'NVFP4' or .* or 'FP8' or "
GROUP = r"config\.json: quantization_config\.config_groups\.group_0"
CT = ("compressed-tensors",)
# By entry: the layouts that have it, the change of the configs, and the text of the error after the directory.
OTHER_CONFIGS = {
    "a layer": (("modelopt",), entries(**MIXED), rf"config\.json: quantization_config\.{LAYER}"),
    "a layer, hf": (("modelopt",), of_hf_quant(**MIXED), rf"hf_quant_config\.json: quantization\.{LAYER}"),
    "all in FP8": (("modelopt",), of_hf_quant(quant_algo="FP8"), "tion.quant_algo is 'FP8'; expected 'NVFP4' or "),
    "SVDQuant": (("modelopt",), entries(quant_algo="NVFP4_SVD"), "quantization_config.quant_algo is 'NVFP4_SVD';"),
    "nested": (("modelopt",), entries(quantization={"quant_algo": "FP8"}), "config.quantization.quant_algo is 'FP8';"),
    "not text": (("modelopt",), entries(quant_algo=["NVFP4"]), r"config.quant_algo is \['NVFP4'\];"),
    "text model": (
        ("modelopt",), lambda config, _: config.update(text_config={"quantization_config": {"quant_algo": "FP8"}}),
        r"config\.json: text_config\.quantization_config\.quant_algo is 'FP8';"),
    "a config of another kind": (
        ("modelopt",), lambda config, _: config.update(quantization_config="awq"),
        r"config\.json: quantization_config is 'awq'; expected an object"),
    "a config of another kind, hf": (
        ("modelopt",), lambda _, hf_quant: hf_quant.update(quantization="FP8"),
        r"hf_quant_config\.json: quantization is 'FP8'; expected an object"),
    "bits": (CT, of_weights(num_bits=8), rf"{GROUP}\.(format|input_activations\.num_bits) is "),
    "three bits": (("modelopt", *CT), of_weights(num_bits=3), rf"{GROUP}\.weights\.num_bits is 3; expected 4 or 8\n"),
    "integers": (("modelopt", *CT), of_weights(type="int"), rf"{GROUP}\.weights\.type is 'int'; expected 'float'\n"),
    "strategy": (CT, of_weights(strategy="channel"), rf"{GROUP}\.weights\.strategy is 'channel'; expected 'tensor_gr"),
    "blocks": (CT, of_weights(block_structure=[64, 64]), rf"{GROUP}\.weights\.block_structure is \[64, 64\]; expected"),
    "strategy of activations": (
        CT, of_group(input_activations={"num_bits": 4, "strategy": "token"}),
        rf"{GROUP}\.input_activations\.strategy is 'token'; expected 'tensor_group'\n"),
    "activations": (
        ("modelopt", *CT), of_group(input_activations=FP8_ARGUMENTS), rf"{GROUP}\.input_activations\.num_bits is 8;"),
    "format": (CT, entries(format="pack-quantized"), "config.format is 'pack-quantized'; expected 'nvfp4-pack-q"),
    "format of a group": (CT, of_group(format="float-quantized"), rf"{GROUP}\.format is 'float-quantized';"),
    "rotation": (
        CT, entries(transform_config={"config_groups": {"R1": {"type": "hadamard"}}}),
        r"transform_config is {.*}; expected {} or {"),
    "sparsity": (CT, entries(sparsity_config={"format": "sparse-24-bitmask"}), r"sparsity_config\.format is 'sparse-"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "layout"), [(case, layout) for case, row in OTHER_CONFIGS.items() for layout in row[0]]
)
def test_configs_of_other_formats_are_refused(tmp_path, case, layout):
    _, change, text = OTHER_CONFIGS[case]
    path = nvfp4_with(tmp_path, layout, {f"{ATTENTION}.k_proj.k_scale": ONE}, change)
    refused_by_all(path, text)
    assert main(["lint", str(path)]) in (0, 1)  # of what it finds, the scale of a KV cache needs all configs


NORMAL = {
    "nothing": ((), entries()),
    "names with scale": (
        ("q_proj.layer_scale", "task_scale", "router.scale", "altup.correct_output_scale", "v_bias"), entries()),
    "a KV cache in high precision": ((), entries(kv_cache_scheme={}, kv_cache_quant_algo=None)),
    "an FP8 KV cache": ((), entries(kv_cache_scheme={"num_bits": 8, "type": "float", "dynamic": False})),
    "empty entries": (
        (), entries(transform_config={}, sparsity_config={}, moe_sparsity_config=None, global_compression_ratio=None)),
    "entries that are null": ((), entries(format=None, quant_algo=None, transform_config=None, pre_quant_scale=None)),
    "a dense model": ((), entries(sparsity_config={"format": "dense"}, transform_config={"config_groups": {}})),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", NORMAL)
def test_nvfp4_beside_high_precision_is_read(tmp_path, case, layout):
    """Also a float8 tensor without a scale, which is its own value."""
    names, change = NORMAL[case]
    tensors = {f"{ATTENTION}.{name}": ("BF16", array(4)) for name in names} | {"model.codebook": FP8}
    path = nvfp4_with(tmp_path, layout, tensors, change)
    for reader in ("open", "dequantize", "repack", "diff"):
        READERS[reader](path)
    assert not inspect(path)["warnings"]
    errors = {r.name: r.error for r in verify_checkpoint(tmp_path / "dequantized", path)}
    assert errors.pop(f"{ATTENTION}.o_proj.weight").relative_error == 0
    assert errors == dict.fromkeys(tensors)


# ---------------------------------------------------------------- sharded reading
class Recorded(np.ndarray):
    """A tensor of a file; what is read of it or of a view of it through an index is noted."""

    record: "Record | None"

    def __array_finalize__(self, whole):
        self.record = getattr(whole, "record", None)

    def __getitem__(self, index):
        if self.record is not None:
            self.record.note(index)
        return np.asarray(self)[index]


class Record:
    """Which elements of a tensor were read, and the largest share of it in one read."""

    def __init__(self, shape):
        self.seen, self.largest = np.zeros(shape, bool), 0.0

    def note(self, index):
        self.seen[index] = True
        self.largest = max(self.largest, self.seen[index].size / self.seen.size)


def recording(monkeypatch) -> dict[str, Record]:
    """Of the tensors of all files, from now on."""
    out: dict[str, Record] = {}
    array_of = Source.array

    def array(self, name):
        x = array_of(self, name).view(Recorded)
        x.record = out.setdefault(name, Record(x.shape))
        return x

    monkeypatch.setattr(Source, "array", array)
    return out


@pytest.fixture
def records(monkeypatch):
    return recording(monkeypatch)


Q_PROJ = "model.layers.0.self_attn.q_proj"  # [128, 256]
MLP_DOWN = "model.layers.0.mlp.down_proj"  # [256, 320]


@pytest.mark.parametrize(("spec", "share"), [(P("x", None), 4), (P(None, "y"), 2), (P("x", "y"), 8)], ids=str)
def test_shards_are_read_and_no_more(records, spec, share):
    mesh = jax.make_mesh((4, 2), ("x", "y"), devices=jax.devices("cpu")[:8])
    names = [f"{Q_PROJ}.weight", f"{MLP_DOWN}.weight", "lm_head.weight", "model.norm.weight"]
    places = {n: NamedSharding(mesh, spec if len(open_checkpoint(TE_MODELOPT).shape(n)) == 2 else P()) for n in names}
    records.clear()
    tensors = open_checkpoint(TE_MODELOPT).to_device(places)
    assert list(tensors) == names
    for name in [*(f"{m}.{part}" for m in (Q_PROJ, MLP_DOWN) for part in ("weight", "weight_scale")), "lm_head.weight"]:
        assert records[name].seen.all(), name
        assert records[name].largest == 1 / share, name
    assert len(records) == 6  # and a norm; global scales are no views
    q, checkpoint = tensors[f"{Q_PROJ}.weight"], open_checkpoint(TE_MODELOPT)
    assert q.data.sharding.is_equivalent_to(places[f"{Q_PROJ}.weight"], 2)
    assert q.scale.sharding.is_equivalent_to(places[f"{Q_PROJ}.weight"], 2)
    assert q.amax.sharding.is_fully_replicated
    same(tensors, {name: checkpoint[name] for name in names})


@pytest.mark.parametrize("spec", [P("x"), P("x", None), P(None, None)], ids=str)
def test_cuts_along_rows_fall_anywhere(tmp_path, spec):
    w = {"model.layers.0.mlp.down_proj.weight": jnvfp4.quantize(jnp.asarray(array(24, 32)))}
    save_checkpoint(w, tmp_path / "out")
    mesh = jax.make_mesh((8,), ("x",), devices=jax.devices("cpu")[:8])  # three rows each
    got = open_checkpoint(tmp_path / "out").to_device(dict.fromkeys(w, NamedSharding(mesh, spec)))
    same({n: t.data for n, t in got.items()}, {n: t.data for n, t in w.items()})


def test_cuts_that_cannot_be():
    mesh = jax.make_mesh((8,), ("x",), devices=jax.devices("cpu")[:8])
    checkpoint = open_checkpoint(TE_MODELOPT)
    with pytest.raises(CheckpointError, match=r"down_proj.*K = 320 is cut into pieces of 40.*whole blocks of 16"):
        checkpoint.to_device({f"{MLP_DOWN}.weight": NamedSharding(mesh, P(None, "x"))})
    three = jax.make_mesh((3,), ("x",), devices=jax.devices("cpu")[:3])
    with pytest.raises(ValueError, match="evenly divide"):
        checkpoint.to_device({"model.norm.weight": NamedSharding(three, P("x"))})
    with pytest.raises(KeyError, match="nothing"):
        checkpoint.to_device({"nothing": None})


def test_a_mapping_reads_what_is_asked_for(records):
    checkpoint = open_checkpoint(TE_MODELOPT)
    assert f"{Q_PROJ}.weight" in checkpoint
    assert f"{Q_PROJ}.weight_scale" not in checkpoint
    assert checkpoint.get(f"{Q_PROJ}.weight_scale") is None
    assert len(list(checkpoint.keys())) == len(checkpoint) == 21
    assert checkpoint.shape("lm_head.weight") == (96, 256)
    assert checkpoint.config["model_type"] == "llama"
    assert not records
    assert checkpoint.shape(f"{Q_PROJ}.weight") == checkpoint[f"{Q_PROJ}.weight"].shape == (128, 256)
    assert set(records) == {f"{Q_PROJ}.{part}" for part in ("weight", "weight_scale")}


def test_an_ordinary_checkpoint_is_read(tmp_path):
    w = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
    save_checkpoint({"a.weight": w}, tmp_path / "a", config={})
    opened = open_checkpoint(tmp_path / "a")
    np.testing.assert_array_equal(opened["a.weight"], w)
    assert repr(opened) == f"Checkpoint('{tmp_path / 'a'}', layout=None, 1 tensors, 0 in NVFP4)"
    with pytest.raises(KeyError, match=r"'a.weigth' is no tensor of Checkpoint\(.*; it has a.weight"):
        opened["a.weigth"]
    with pytest.raises(CheckpointError, match=r"has no NVFP4 weight(.|\n)*hint: `jnvfp4 convert` makes one of it"):
        repack_checkpoint(tmp_path / "a", tmp_path / "b", "te")
    for file, text in (
        ("hf_quant_config.json", '{"quantization": {"producer": "other"}}'),
        ("config.json", '{"quantization_config": {"quant_method": "gptq"}}'),
        ("config.json", '{"text_config": {"quantization_config": {"quant_method": "gptq"}}}'),
    ):
        (tmp_path / "a" / file).write_text(text)
        with pytest.raises(CheckpointError, match=r"has no NVFP4 weight(.|\n)*hint: read it with the software that"):
            open_checkpoint(tmp_path / "a")
        (tmp_path / "a" / file).unlink()
    scaled = {"a.weight": FP8, "a.weight_scale_inv": ("F32", np.ones((1, 1), np.float32))}
    with pytest.raises(CheckpointError, match=r"'a.weight_scale_inv': belongs to module 'a', and readers would"):
        open_checkpoint(write_model(tmp_path / "fp8", {"model.safetensors": scaled}, {}))


@pytest.mark.parametrize("experts_amax", [(), (4,)], ids=["amax of all", "amax of each"])
def test_row_scaled_weights_and_stacks_of_experts_are_placed(tmp_path, experts_amax):
    rows = jnvfp4.quantize(jnp.asarray(array(32, 64)), jnvfp4.ROW_SCALED)
    experts = jnvfp4.quantize(jnp.asarray(array(4, 32, 64)), amax=jnp.full(experts_amax, 8, jnp.float32))
    save_checkpoint({"a.down_proj.weight": rows, "a.experts.down_proj": experts}, tmp_path / "out", "te")
    mesh = jax.make_mesh((4, 2), ("x", "y"), devices=jax.devices("cpu")[:8])
    sharding, of_amax = (NamedSharding(mesh, s, memory_kind="pinned_host") for s in (P("x", "y"), P("x")))
    checkpoint = open_checkpoint(tmp_path / "out")
    got = checkpoint.to_device(dict.fromkeys(checkpoint, sharding))
    want = {"a.down_proj.weight": rows, "a.experts.down_proj": replace(experts, amax=np.full(4, 8, np.float32))}
    same(got, want)
    for t in got.values():
        assert t.data.sharding.is_equivalent_to(sharding, t.ndim)
        assert t.amax.sharding.is_equivalent_to(of_amax, 1)
    save_checkpoint({"a.down_proj.weight": jnvfp4.quantize(jnp.asarray(array(32, 64)))}, tmp_path / "one", "te")
    (one,) = open_checkpoint(tmp_path / "one").to_device({"a.down_proj.weight": sharding}).values()
    assert (one.amax.shape, one.amax.sharding.spec) == ((), P())


@pytest.mark.parametrize("layout", ["modelopt", "te"])
def test_a_weight_of_one_row_has_the_amax_of_a_tensor(tmp_path, layout):
    one = jnvfp4.quantize(jnp.asarray(array(1, 64)))
    save_checkpoint({"a.down_proj.weight": one}, tmp_path / "out", layout)
    got = open_checkpoint(tmp_path / "out")["a.down_proj.weight"]
    assert (got.format, got.amax.shape) == (one.format, ())


def test_row_scaled_stacks_cannot_be_stored(tmp_path):
    rows = jnvfp4.quantize(jnp.asarray(array(4, 32, 64)), jnvfp4.ROW_SCALED)
    with pytest.raises(CheckpointError, match=r"amax_scope='row'.*what te can store"):
        save_checkpoint({"a.experts.down_proj": rows}, tmp_path / "out", "te")


OF_TWO = """
import sys
import jax, numpy as np, pytest
from jax.sharding import NamedSharding, PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
sys.path.insert(0, sys.argv[3])
import test_checkpoints_load as t

records = t.recording(pytest.MonkeyPatch())
mesh = jax.make_mesh((4,), ("x",))
assert len(mesh.local_devices) == 2
specs = {f"{t.Q_PROJ}.weight": P("x"), f"{t.MLP_DOWN}.weight": P("x"), "lm_head.weight": P(None, "x")}
t.open_checkpoint(t.TE_MODELOPT).to_device({n: NamedSharding(mesh, s) for n, s in specs.items()})
np.savez(sys.argv[4], **{n: r.seen for n, r in records.items() if r.seen.ndim == 2})
"""


@pytest.mark.long
def test_processes_read_what_is_theirs(tmp_path):
    """Two processes with two devices each: halves that do not overlap, and are the whole together."""
    out, here = [tmp_path / f"{i}.npz" for i in range(2)], str(Path(__file__).parent)
    arguments = [(here, str(path)) for path in out]
    in_two_processes("-c", OF_TWO, environments=2 * [environment()], arguments=arguments)
    one, two = (np.load(path) for path in out)
    assert len(one.files) == 5
    for name in one.files:
        assert one[name].mean() == 0.5
        np.testing.assert_array_equal(one[name], ~two[name])


# ---------------------------------------------------------------- orbax
@pytest.mark.filterwarnings("ignore")  # of orbax and of what it imports
@pytest.mark.parametrize("spec", [None, P("x", None), P(None, "x")], ids=str)
def test_orbax_restores_what_it_saved(tmp_path, spec):
    ocp = pytest.importorskip("orbax.checkpoint")
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices("cpu")[:2])
    checkpoint = open_checkpoint(TE_MODELOPT)
    names = [f"{Q_PROJ}.weight", "lm_head.weight"]
    place = None if spec is None else NamedSharding(mesh, spec)
    tree = {"params": checkpoint.to_device(dict.fromkeys(names, place))}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", tree)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "orbax", jax.tree.map(ocp.utils.to_shape_dtype_struct, tree))
    same(restored, tree)
    assert isinstance(restored["params"][names[0]], jnvfp4.NVFP4Tensor)
    for x, y in zip(jax.tree.leaves(restored), jax.tree.leaves(tree), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)

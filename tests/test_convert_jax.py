"""Checkpoints in JAX: name maps, sharded reading, orbax."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jnvfp4
from jnvfp4.convert import CheckpointError, convert_checkpoint
from jnvfp4.convert.checkpoint import open_checkpoint
from jnvfp4.convert.maps import Rule, from_hf, to_hf
from jnvfp4.convert.save import save_checkpoint
from jnvfp4.convert.source import Source

GOLDEN = Path(__file__).parent / "data" / "checkpoints" / "llama" / "te_modelopt"
LAYER = r"model.layers.{layer:\d+}."


def array(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(ml_dtypes.bfloat16)


def same(a, b) -> None:
    """Trees of the same structure with the same bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


# ---------------------------------------------------------------- name maps
LLAMA = [
    Rule("model.embed_tokens.weight", "embedding"),
    Rule("lm_head.weight", "head"),
    Rule("model.norm.weight", "norm"),
    Rule(LAYER + "{which}_layernorm.weight", "layers/{which}_norm", stack=("layer",)),
    Rule(LAYER + "self_attn.{p:[qkvo]}_proj.weight", "layers/attention/{p}", stack=("layer",)),
    Rule(LAYER + "mlp.{p:gate|up|down}_proj.weight", "layers/mlp/{p}", stack=("layer",)),
]


def test_a_quantized_model_with_stacked_layers_and_back(tmp_path):
    checkpoint = open_checkpoint(GOLDEN)
    tree = from_hf(checkpoint, LLAMA)
    assert set(tree) == {"embedding", "head", "norm", "layers"}
    q = tree["layers"]["attention"]["q"]
    assert (q.shape, q.scale.shape, q.amax.shape) == ((2, 128, 256), (2, 128, 16), (2,))
    each = [jnvfp4.dequantize(checkpoint[f"model.layers.{i}.self_attn.q_proj.weight"]) for i in range(2)]
    np.testing.assert_array_equal(jnvfp4.dequantize(q), jnp.stack(each))
    back = to_hf(tree, LLAMA)
    same(back, dict(checkpoint))
    save_checkpoint(back, tmp_path / "out", config={"model_type": "llama"})
    same(dict(open_checkpoint(tmp_path / "out")), dict(checkpoint))


def test_arrays_are_transposed_split_and_stacked():
    weights = {f"layers.{i}.experts.{e}.w": array(6, 4, seed=4 * i + e) for i in range(2) for e in range(3)}
    rule = Rule(
        r"layers.{i:\d+}.experts.{e:\d+}.w", "moe/kernel", stack=("e", "i"), axis=1, transpose=True, split=(1, 3)
    )
    kernel = from_hf(weights, [rule])["moe"]["kernel"]
    assert kernel.shape == (4, 3, 2, 3, 2)  # in, experts, layers, heads, head
    np.testing.assert_array_equal(kernel[:, 2, 1], weights["layers.1.experts.2.w"].T.reshape(4, 3, 2))
    same(to_hf({"moe": {"kernel": kernel}}, [rule]), weights)


def test_experts_of_quantized_layers():
    x = jnp.asarray(array(3, 16, 32))
    weights = {f"{i}": jnvfp4.quantize(x * (i + 1)) for i in range(2)}
    for axis, amaxes in ((0, (2, 3)), (1, (3, 2))):
        rule = Rule(r"{i:\d}", "w", stack=("i",), axis=axis)
        w = from_hf(weights, [rule])["w"]
        assert w.amax.shape == amaxes
        np.testing.assert_array_equal(
            jnvfp4.dequantize(w), jnp.stack([jnvfp4.dequantize(t) for t in weights.values()], axis)
        )
        back = to_hf({"w": w}, [rule])
        same({n: jnvfp4.dequantize(t) for n, t in back.items()}, {n: jnvfp4.dequantize(t) for n, t in weights.items()})


def test_a_map_of_abstract_tensors_has_their_shapes():
    checkpoint = open_checkpoint(GOLDEN)
    abstract = jax.eval_shape(lambda tensors: from_hf(tensors, LLAMA), dict(checkpoint))
    tree = from_hf(checkpoint, LLAMA)
    assert jax.tree.structure(abstract) == jax.tree.structure(tree)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(abstract)] == [
        (x.shape, x.dtype) for x in jax.tree.leaves(tree)
    ]


W, Q = array(16, 32), jnvfp4.quantize(jnp.asarray(array(16, 32)))
STACK = Rule(r"l.{i:\d+}.w", "w", stack=("i",))
BAD_MAPS = {
    "a name without a rule": ({"a": W, "b": W}, [Rule("a", "a")], "tensor 'b': matches no rule"),
    "a name with two": ({"ab": W}, [Rule("a{x}", "{x}"), Rule("{x}b", "{x}")], "matches 'a{x}' and '{x}b'"),
    "a rule for nothing": ({"a": W}, [Rule("a", "a"), Rule("b", "b")], "rule 'b' matches no name"),
    "one place": ({"a": W, "b": W}, [Rule("a", "x"), Rule("b", "x")], "tensor 'b': .* the rule of 'a' give one place"),
    "one place by one rule": ({"a.bc": W, "ab.c": W}, [Rule("{x}.{y}", "{x}{y}")], "'a.bc' give one place, 'abc'"),
    "through a leaf": ({"a": W, "b": W}, [Rule("a", "x"), Rule("b", "x/y")], "goes through a leaf"),
    "on a branch": ({"a": W, "b": W}, [Rule("a", "x/y"), Rule("b", "x")], "a leaf and a branch"),
    "transposed": ({"a": Q}, [Rule("a", "a", transpose=True)], "transposes it, which is quantized.*\n.*before quant"),
    "split": ({"a": Q}, [Rule("a", "a", split=(0, 2))], "splits it, which is quantized"),
    "transposed vector": ({"a": W[0]}, [Rule("a", "a", transpose=True)], r"transposes \[32\]; expected two axes"),
    "parts": ({"a": W}, [Rule("a", "a", split=(0, 3))], r"splits \[16, 32\]; expected a multiple of 3 at axis 0"),
    "missing layer": ({"l.0.w": W, "l.2.w": W}, [STACK], "nothing for {'i': 1} of 'w'"),
    "kept layer": ({"l.0.w": W, "l.1.w": Q}, [STACK], "stacks NVFP4 .* on bfloat16.*\n.*all layers or none"),
    "unequal layers": ({"l.0.w": W, "l.1.w": W[:8]}, [STACK], r"stacks bfloat16 \[8, 32\] on bfloat16 \[16, 32\]"),
    "layer 01": ({"l.01.w": W}, [STACK], r"stacks \['01'\]; expected numbers"),
    "axis in blocks": (
        {"l.0.w": Q}, [Rule(r"l.{i:\d+}.w", "w", stack=("i",), axis=1)], r"at axis 1 a quantized .* an axis of 0 to 0"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_MAPS)
def test_maps_to_a_tree_that_mean_nothing(case):
    tensors, rules, text = BAD_MAPS[case]
    with pytest.raises(CheckpointError, match=f"(?s){text}"):
        from_hf(tensors, rules)


BAD_WAYS_BACK = {
    "a leaf without a rule": ({"a": W, "b": {"c": W}}, [Rule("a", "a")], "tensor 'b/c': matches no rule"),
    "a rule for nothing": ({"a": W}, [Rule("a", "a"), Rule("b", "b")], "rule 'b' matches no path"),
    "one name": ({"a": W, "b": W}, [Rule("x", "a"), Rule("x", "b")], "give one name, 'x'"),
    "another name": ({"w": array(3, 4, 4)}, [Rule("l.{i:[01]}.w", "w", stack=("i",))], "makes 'l.2.w' of it"),
    "quantized": ({"a": Q}, [Rule("a", "a", transpose=True)], "transposes it, which is quantized"),
    "parts": ({"a": W}, [Rule("a", "a", split=(0, 3))], r"merges \[16, 32\]; expected 3 at axis 0"),
    "no axis": ({"w": W}, [Rule(r"l.{i:\d+}.w", "w", stack=("i",), axis=2)], "at axis 2 an array .* axis of 0 to 1"),
}


@pytest.mark.parametrize("case", BAD_WAYS_BACK)
def test_maps_to_names_that_mean_nothing(case):
    tree, rules, text = BAD_WAYS_BACK[case]
    with pytest.raises(CheckpointError, match=f"(?s){text}"):
        to_hf(tree, rules)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"name": "a.{x}", "path": "a"}, "each field once"),
        ({"name": "a", "path": "a/{x}"}, "each field once"),
        ({"name": "a.{x}", "path": "{x}/{x}"}, "each field once"),
        ({"name": "a.{x}", "path": "{x}", "stack": ("x",)}, "each field once"),
        ({"name": "a.{x", "path": "a"}, "brace"),
        ({"name": "a.{x:[}", "path": "{x}"}, "is no expression"),
    ],
)
def test_rules_that_mean_nothing(fields, text):
    with pytest.raises(CheckpointError, match=text):
        Rule(**fields)


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
    places = {n: NamedSharding(mesh, spec if len(open_checkpoint(GOLDEN).shape(n)) == 2 else P()) for n in names}
    records.clear()
    tensors = open_checkpoint(GOLDEN).to_device(places)
    assert list(tensors) == names
    for name in [*(f"{m}.{part}" for m in (Q_PROJ, MLP_DOWN) for part in ("weight", "weight_scale")), "lm_head.weight"]:
        assert records[name].seen.all(), name
        assert records[name].largest == 1 / share, name
    assert len(records) == 8  # and two globals and a norm
    q, checkpoint = tensors[f"{Q_PROJ}.weight"], open_checkpoint(GOLDEN)
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
    checkpoint = open_checkpoint(GOLDEN)
    with pytest.raises(CheckpointError, match=r"down_proj.*K = 320 is cut into pieces of 40.*whole blocks of 16"):
        checkpoint.to_device({f"{MLP_DOWN}.weight": NamedSharding(mesh, P(None, "x"))})
    three = jax.make_mesh((3,), ("x",), devices=jax.devices("cpu")[:3])
    with pytest.raises(ValueError, match="evenly divide"):
        checkpoint.to_device({"model.norm.weight": NamedSharding(three, P("x"))})
    with pytest.raises(KeyError, match="nothing"):
        checkpoint.to_device({"nothing": None})


def test_a_mapping_reads_what_is_asked_for(records):
    checkpoint = open_checkpoint(GOLDEN)
    assert f"{Q_PROJ}.weight" in checkpoint
    assert f"{Q_PROJ}.weight_scale" not in checkpoint
    assert checkpoint.get(f"{Q_PROJ}.weight_scale") is None
    assert len(list(checkpoint.keys())) == len(checkpoint) == 21
    assert checkpoint.shape("lm_head.weight") == (96, 256)
    assert checkpoint.config["model_type"] == "llama"
    assert not records
    assert checkpoint.shape(f"{Q_PROJ}.weight") == checkpoint[f"{Q_PROJ}.weight"].shape == (128, 256)
    assert set(records) == {f"{Q_PROJ}.{part}" for part in ("weight", "weight_scale", "weight_scale_2")}


@pytest.mark.parametrize("experts_amax", [(), (4,)], ids=["amax of all", "amax of each"])
def test_row_scaled_weights_and_stacks_of_experts_are_placed(tmp_path, experts_amax):
    rows = jnvfp4.quantize(jnp.asarray(array(32, 64)), jnvfp4.ROW_SCALED)
    experts = jnvfp4.quantize(jnp.asarray(array(4, 32, 64)), amax=jnp.full(experts_amax, 8, jnp.float32))
    save_checkpoint({"a.down_proj.weight": rows, "a.experts.down_proj": experts}, tmp_path / "out", "te")
    sharding = NamedSharding(jax.make_mesh((4, 2), ("x", "y"), devices=jax.devices("cpu")[:8]), P("x", "y"))
    checkpoint = open_checkpoint(tmp_path / "out")
    got = checkpoint.to_device(dict.fromkeys(checkpoint, sharding))
    want = {"a.down_proj.weight": rows, "a.experts.down_proj": replace(experts, amax=np.full(4, 8, np.float32))}
    same(got, want)
    for t in got.values():
        assert t.data.sharding.is_equivalent_to(sharding, t.ndim)
        assert t.amax.sharding.is_equivalent_to(NamedSharding(sharding.mesh, P("x")), 1)


def test_row_scaled_stacks_cannot_be_stored(tmp_path):
    rows = jnvfp4.quantize(jnp.asarray(array(4, 32, 64)), jnvfp4.ROW_SCALED)
    with pytest.raises(CheckpointError, match=r"amax_scope='row'.*what te can store"):
        save_checkpoint({"a.experts.down_proj": rows}, tmp_path / "out", "te")


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_stacked_layers_stay_sharded(kind):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType[kind],), devices=jax.devices("cpu")[:4])
    checkpoint = open_checkpoint(GOLDEN)
    places = {n: NamedSharding(mesh, P("x") if "_proj" in n else P()) for n in checkpoint}
    tree = from_hf(checkpoint.to_device(places), LLAMA)
    q = tree["layers"]["attention"]["q"]
    for leaf in (q.data, q.scale):
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "x")), 3)
    back = to_hf(tree, LLAMA)
    assert back[f"{Q_PROJ}.weight"].data.sharding.is_equivalent_to(places[f"{Q_PROJ}.weight"], 2)
    same(back, dict(checkpoint))


def test_a_tree_of_arrays_is_saved_for_conversion(tmp_path):
    tree = {"layers": {"w": jnp.asarray(array(2, 16, 32))}, "norm": jnp.ones(32)}
    name = "model.layers.{i:[01]}.mlp.down_proj.weight"
    rules = [Rule(name, "layers/w", stack=("i",)), Rule("model.norm.weight", "norm")]
    save_checkpoint(to_hf(tree, rules), tmp_path / "plain", config={"model_type": "llama"})
    assert json.loads((tmp_path / "plain" / "config.json").read_text()) == {"model_type": "llama"}
    convert_checkpoint(tmp_path / "plain", tmp_path / "out")
    w = from_hf(open_checkpoint(tmp_path / "out"), rules)["layers"]["w"]
    np.testing.assert_array_equal(w.data[1], jnvfp4.quantize(tree["layers"]["w"][1]).data)


OF_TWO = """
import sys
import jax, numpy as np, pytest
from jax.sharding import NamedSharding, PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
sys.path.insert(0, sys.argv[3])
import test_convert_jax as t

records = t.recording(pytest.MonkeyPatch())
mesh = jax.make_mesh((4,), ("x",))
assert len(mesh.local_devices) == 2
specs = {f"{t.Q_PROJ}.weight": P("x"), f"{t.MLP_DOWN}.weight": P("x"), "lm_head.weight": P(None, "x")}
t.open_checkpoint(t.GOLDEN).to_device({n: NamedSharding(mesh, s) for n, s in specs.items()})
np.savez(sys.argv[4], **{n: r.seen for n, r in records.items() if r.seen.ndim == 2})
"""


@pytest.mark.long
def test_processes_read_what_is_theirs(tmp_path):
    """Two processes with two devices each: halves that do not overlap, and are the whole together."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        address = f"localhost:{s.getsockname()[1]}"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    out = [tmp_path / f"{i}.npz" for i in range(2)]
    here = str(Path(__file__).parent)
    both = [
        subprocess.Popen([sys.executable, "-c", OF_TWO, address, str(i), here, str(path)], env=environment)
        for i, path in enumerate(out)
    ]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
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
    checkpoint = open_checkpoint(GOLDEN)
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

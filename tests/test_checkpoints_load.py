"""Checkpoints in JAX: sharded reading, orbax."""

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import TE_MODELOPT, array, same
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jnvfp4
from jnvfp4.checkpoints import CheckpointError, open_checkpoint, save_checkpoint
from jnvfp4.checkpoints._files.source import Source


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

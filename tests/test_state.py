"""What stores keep of a quantized tensor: names that say the format, and ``to_state`` for stores without names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_tensor, key_for
from operands import normal

from jnvfp4 import from_state, quantize, to_state
from jnvfp4.spec import NVFP4, NVFP4_RHT, ROW_SCALED, SUPPORTED_SPECS, WINDOW64, four_over_six, name_of

# One spec for each format.
SPECS = {
    s.format: s for s in (four_over_six(amax_scope="row"), four_over_six(), WINDOW64, ROW_SCALED, NVFP4_RHT, NVFP4)
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=name_of)


def tree_of(spec, lead=()):
    x = normal((*lead, 32, 64))
    return {"layers": [{"w": quantize(x, spec, key=key_for(spec)), "norm": jnp.ones(64)}], "step": 3}


def paths(tree):
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(tree)]


# ---------------------------------------------------------------- names
def test_the_paths_of_the_leaves_name_the_format():
    assert paths({"w": quantize(normal((32, 64)))}) == [
        "w/data_nvfp4_tensor_448",
        "w/scale_nvfp4_tensor_448",
        "w/amax_nvfp4_tensor_448",
    ]
    assert paths(quantize(normal((32, 64)), NVFP4_RHT))[0] == "data_nvfp4_tensor_448_rht"
    assert paths(quantize(normal((32, 64)), four_over_six(amax_scope="row")))[2] == "amax_nvfp4_row_256"


def test_trees_of_two_formats_have_no_path_in_common():
    """So that a store of names and arrays finds none of the entries of another format."""
    assert set(SPECS) == {spec.format for spec in SUPPORTED_SPECS}
    found = [path for spec in SPECS.values() for path in paths(quantize(normal((32, 64)), spec))]
    assert len(set(found)) == 3 * len(SPECS) == 18


@every_spec
def test_a_store_of_names_gives_the_tensors_back(spec):
    """Without a tree to restore into: what orbax restores as nested dictionaries."""
    tree = tree_of(spec, lead=(2,))
    w = tree["layers"][0]["w"]
    named = {path: leaf for path, leaf in zip(paths(w), jax.tree.leaves(w), strict=True)}
    assert_same_tensor(from_state({"layers": [{"w": named, "norm": jnp.ones(64)}], "step": 3}), tree)


# ---------------------------------------------------------------- to_state and from_state
@every_spec
def test_from_state_reverses_to_state(spec):
    """Also by the order of the leaves alone, where a store has no names."""
    tree = tree_of(spec)
    restored = from_state(to_state(tree))
    assert_same_tensor(restored, tree)
    assert restored["layers"][0]["norm"] is tree["layers"][0]["norm"]
    assert_same_tensor(from_state(to_state(tree["layers"][0]["w"])), tree["layers"][0]["w"])
    assert_same_tensor(from_state(by_order(to_state(tree), to_state(jax.eval_shape(lambda: tree)))), tree)


def test_a_state_has_plain_arrays_alone():
    """Types that every store knows: no float8."""
    state = to_state(tree_of(NVFP4_RHT))["layers"][0]["w"]
    assert {key: (leaf.dtype.name, leaf.shape) for key, leaf in state.items()} == {
        "data_nvfp4_tensor_448_rht": ("uint8", (32, 32)),
        "scale_nvfp4_tensor_448_rht": ("uint8", (32, 4)),
        "amax_nvfp4_tensor_448_rht": ("float32", ()),
        "format": ("int32", (3,)),
    }
    np.testing.assert_array_equal(state["format"], [0, 448, 1])


def test_a_state_of_numpy_arrays_keeps_every_bit():
    """As a file of them does."""
    tree = tree_of(four_over_six())
    restored = from_state(jax.device_get(to_state(tree)))
    assert isinstance(restored["layers"][0]["w"].data, np.ndarray)
    assert_same_tensor(restored, tree)


def by_order(saved, like):
    """What a store of leaves without names does: of tensors themselves it would lose the format without an error."""
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(saved))


@every_spec
def test_a_state_restored_by_order_into_another_format_is_refused(spec):
    state = to_state(tree_of(spec))
    for wanted in SPECS.values():
        if wanted is not spec:
            mixed = by_order(state, to_state(tree_of(wanted)))
            with pytest.raises(ValueError, match=r"from_state: the format of \['layers'\]\[0\]\['w'\] must be nvfp4_"):
                from_state(mixed)


def test_an_abstract_tree_has_an_abstract_state():
    """For a restore into ``to_state(jax.eval_shape(...))``."""
    tree = {"w": quantize(normal((32, 64)))}
    abstract = jax.eval_shape(lambda: tree)
    state = to_state(abstract)["w"]
    assert state["scale_nvfp4_tensor_448"] == jax.ShapeDtypeStruct((32, 4), jnp.uint8)
    restored = from_state(to_state(abstract))
    assert jax.tree.structure(restored) == jax.tree.structure(abstract)
    assert jax.tree.leaves(restored) == jax.tree.leaves(abstract)
    assert jax.tree.structure(from_state(jax.eval_shape(lambda: to_state(tree)))) == jax.tree.structure(tree)


def test_shardings_stay_in_a_state():
    device = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[1])
    tree = jax.device_put({"w": quantize(normal((32, 64)))}, device)
    assert {leaf.sharding for leaf in jax.tree.leaves(to_state(tree)) if isinstance(leaf, jax.Array)} == {device}
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
    assert to_state(abstract)["w"]["scale_nvfp4_tensor_448"].sharding == device


# ---------------------------------------------------------------- refused


def test_a_state_inside_jit_is_refused():
    """The format is a part of the structure of a tensor, and there the record is no number."""
    with pytest.raises(TypeError, match=r"from_state: the format of .* must be known, got a traced array; call"):
        jax.jit(from_state)(to_state(quantize(normal((32, 64)))))


# ---------------------------------------------------------------- orbax
def save(tmp_path, tree):
    ocp = pytest.importorskip("orbax.checkpoint")
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(tmp_path / "c", tree)
    checkpointer.wait_until_finished()
    return lambda *like: checkpointer.restore(tmp_path / "c", *like)


ignore_orbax = pytest.mark.filterwarnings("ignore")  # its own warnings are no concern here


@ignore_orbax
@every_spec
def test_orbax_restores_tensors_and_states(tmp_path, spec):
    """With a tree to restore into and without."""
    tree = {"w": quantize(normal((32, 64)), spec), "list": [quantize(normal((32, 64)), spec)]}
    stored = {"tree": tree, "state": to_state(tree)}
    restore = save(tmp_path, stored)
    as_stored, named = restore(jax.eval_shape(lambda: stored)), restore()
    assert_same_tensor(as_stored, stored)
    assert_same_tensor((from_state(named), from_state(as_stored["state"])), ({"tree": tree, "state": tree}, tree))


@ignore_orbax
@pytest.mark.parametrize(
    ("saved", "wanted"),
    [(NVFP4, NVFP4_RHT), (NVFP4_RHT, NVFP4), (NVFP4, four_over_six()), (four_over_six(), NVFP4)],
    ids=name_of,
)
def test_orbax_refuses_another_format(tmp_path, saved, wanted):
    restore = save(tmp_path, {"w": quantize(normal((32, 64)), saved)})
    like = jax.eval_shape(lambda: {"w": quantize(normal((32, 64)), wanted)})
    with pytest.raises((ValueError, KeyError), match="nvfp4"):
        restore(like)

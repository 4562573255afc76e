"""Trees of JAX models and Hugging Face names: rules in both directions, stacked layers, sharded leaves."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import TE_MODELOPT, array, same
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jnvfp4
from jnvfp4.checkpoints import (
    CheckpointError,
    NameRule,
    convert_checkpoint,
    from_hf,
    open_checkpoint,
    save_checkpoint,
    to_hf,
)

LAYER = r"model.layers.{layer:\d+}."
Q_PROJ = "model.layers.0.self_attn.q_proj"  # [128, 256]


# ---------------------------------------------------------------- both directions
LLAMA = [
    NameRule("model.embed_tokens.weight", "embedding"),
    NameRule("lm_head.weight", "head"),
    NameRule("model.norm.weight", "norm"),
    NameRule(LAYER + "{which}_layernorm.weight", "layers/{which}_norm", stack=("layer",)),
    NameRule(LAYER + "self_attn.{p:[qkvo]}_proj.weight", "layers/attention/{p}", stack=("layer",)),
    NameRule(LAYER + "mlp.{p:gate|up|down}_proj.weight", "layers/mlp/{p}", stack=("layer",)),
]


def test_a_quantized_model_with_stacked_layers_and_back(tmp_path):
    checkpoint = open_checkpoint(TE_MODELOPT)
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
    rule = NameRule(
        r"layers.{i:\d+}.experts.{e:\d+}.w", "moe/kernel", stack=("e", "i"), axis=1, transpose=True, split=(1, 3)
    )
    kernel = from_hf(weights, [rule])["moe"]["kernel"]
    assert kernel.shape == (4, 3, 2, 3, 2)  # in, experts, layers, heads, head
    np.testing.assert_array_equal(kernel[:, 2, 1], weights["layers.1.experts.2.w"].T.reshape(4, 3, 2))
    same(to_hf({"moe": {"kernel": kernel}}, [rule]), weights)


def test_experts_of_quantized_layers():
    x = jnp.asarray(array(3, 16, 32))
    weights = {f"{i}": jnvfp4.quantize(x * (i + 1)) for i in range(2)}
    values = {name: jnvfp4.dequantize(t) for name, t in weights.items()}
    for axis, amaxes in ((0, (2, 3)), (1, (3, 2))):
        rule = NameRule(r"{i:\d}", "w", stack=("i",), axis=axis)
        w = from_hf(weights, [rule])["w"]
        assert w.amax.shape == amaxes
        np.testing.assert_array_equal(jnvfp4.dequantize(w), jnp.stack([*values.values()], axis))
        same({name: jnvfp4.dequantize(t) for name, t in to_hf({"w": w}, [rule]).items()}, values)


def test_a_map_of_abstract_tensors_has_their_shapes():
    checkpoint = open_checkpoint(TE_MODELOPT)
    abstract = jax.eval_shape(lambda tensors: from_hf(tensors, LLAMA), dict(checkpoint))
    tree = from_hf(checkpoint, LLAMA)
    assert jax.tree.structure(abstract) == jax.tree.structure(tree)
    found, want = ([(x.shape, x.dtype) for x in jax.tree.leaves(of)] for of in (abstract, tree))
    assert found == want


W, Q = array(16, 32), jnvfp4.quantize(jnp.asarray(array(16, 32)))
STACK = NameRule(r"l.{i:\d+}.w", "w", stack=("i",))
A_PLACE = "expected a place for each name"
BAD_MAPS = {
    "a name without a rule": ({"a": W, "b": W}, [NameRule("a", "a")], "tensor 'b': matches no rule"),
    "a name with two": ({"ab": W}, [NameRule("a{x}", "{x}"), NameRule("{x}b", "{x}")], "matches 'a{x}' and '{x}b'"),
    "a rule for nothing": ({"a": W}, [NameRule("a", "a"), NameRule("b", "b")], "rule 'b' matches no name"),
    "one place": ({"a": W, "b": W}, [NameRule("a", "x"), NameRule("b", "x")],
                  f"tensor 'b': .* puts it at 'x', where 'a' is; {A_PLACE}"),
    "one stacked place": ({"l.0.w": W, "m.1.w": W}, [STACK, NameRule(r"m.{i:\d+}.w", "w", stack=("i",))],
                          f"tensor 'm.1.w': .* puts it at 'w', where 'l.0.w' is; {A_PLACE}"),
    "one place by one rule": (
        {"a.bc": W, "ab.c": W}, [NameRule("{x}.{y}", "{x}{y}")], "puts it at 'abc', where 'a.bc' is"),
    "through a leaf": ({"a": W, "b": W}, [NameRule("a", "x"), NameRule("b", "x/y")], "goes through a leaf"),
    "on a branch": ({"a": W, "b": W}, [NameRule("a", "x/y"), NameRule("b", "x")], "a leaf and a branch"),
    "transposed": ({"a": Q}, [NameRule("a", "a", transpose=True)], "transposes it, which is quan.*\n.*before quant"),
    "split": ({"a": Q}, [NameRule("a", "a", split=(0, 2))], "splits it, which is quantized"),
    "transposed vector": ({"a": W[0]}, [NameRule("a", "a", transpose=True)], r"transposes \[32\]; expected two axes"),
    "parts": ({"a": W}, [NameRule("a", "a", split=(0, 3))], r"splits \[16, 32\]; expected a multiple of 3 at axis 0"),
    "missing layer": ({"l.0.w": W, "l.2.w": W}, [STACK], "no tensor for {'i': 1} of 'w'"),
    "kept layer": ({"l.0.w": W, "l.1.w": Q}, [STACK], "stacks NVFP4 .* on bfloat16.*\n.*all layers or none"),
    "unequal layers": ({"l.0.w": W, "l.1.w": W[:8]}, [STACK], r"stacks bfloat16 \[8, 32\] on bfloat16 \[16, 32\]"),
    "layer 01": ({"l.01.w": W}, [STACK], r"stacks \['01'\]; expected numbers"),
    "axis in blocks": ({"l.0.w": Q}, [NameRule(r"l.{i:\d+}.w", "w", stack=("i",), axis=1)],
                       r"at axis 1 a quantized .* an axis of 0 to 0"),
}  # fmt: skip


BAD_WAYS_BACK = {
    "a leaf without a rule": ({"a": W, "b": {"c": W}}, [NameRule("a", "a")], "tensor 'b/c': matches no rule"),
    "a rule for nothing": ({"a": W}, [NameRule("a", "a"), NameRule("b", "b")], "rule 'b' matches no path"),
    "one name": ({"a": W, "b": W}, [NameRule("x", "a"), NameRule("x", "b")], "lead to one name, 'x'"),
    "another name": ({"w": array(3, 4, 4)}, [NameRule("l.{i:[01]}.w", "w", stack=("i",))], "gives it the name 'l.2.w'"),
    "quantized": ({"a": Q}, [NameRule("a", "a", transpose=True)], "transposes it, which is quantized"),
    "parts": ({"a": W}, [NameRule("a", "a", split=(0, 3))], r"merges \[16, 32\]; expected 3 at axis 0"),
    "no axis": (
        {"w": W}, [NameRule(r"l.{i:\d+}.w", "w", stack=("i",), axis=2)], "at axis 2 an array .* axis of 0 to 1"),
}  # fmt: skip
BAD_RULES = [
    ({"name": "a.{x}", "path": "a"}, "each field once"),
    ({"name": "a", "path": "a/{x}"}, "each field once"),
    ({"name": "a.{x}", "path": "{x}/{x}"}, "each field once"),
    ({"name": "a.{x}", "path": "{x}", "stack": ("x",)}, "each field once"),
    ({"name": "a.{x", "path": "a"}, "brace"),
    ({"name": "a.{x:[}", "path": "{x}"}, "has a wrong expression"),
]
BAD = {f"from_hf, {name}": (partial(from_hf, *case[:2]), case[2]) for name, case in BAD_MAPS.items()}
BAD |= {f"to_hf, {name}": (partial(to_hf, *case[:2]), case[2]) for name, case in BAD_WAYS_BACK.items()}
BAD |= {str(fields): (partial(NameRule, **fields), text) for fields, text in BAD_RULES}


@pytest.mark.parametrize("case", BAD)
def test_maps_and_rules_that_mean_nothing(case):
    make, text = BAD[case]
    with pytest.raises(CheckpointError, match=f"(?s){text}"):
        make()


# ---------------------------------------------------------------- with checkpoints
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_stacked_layers_stay_sharded(kind):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType[kind],), devices=jax.devices("cpu")[:4])
    checkpoint, rules = open_checkpoint(TE_MODELOPT), [LLAMA[4]]
    places = {n: NamedSharding(mesh, P("x")) for n in checkpoint if "self_attn" in n}
    tensors = checkpoint.to_device(places)
    tree = from_hf(tensors, rules)
    q = tree["layers"]["attention"]["q"]
    for leaf in (q.data, q.scale):
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "x")), 3)
    back = to_hf(tree, rules)
    assert back[f"{Q_PROJ}.weight"].data.sharding.is_equivalent_to(places[f"{Q_PROJ}.weight"], 2)
    same(back, tensors)


def test_a_tree_of_arrays_is_saved_for_conversion(tmp_path):
    tree = {"layers": {"w": jnp.asarray(array(2, 16, 32))}, "norm": jnp.ones(32)}
    name = "model.layers.{i:[01]}.mlp.down_proj.weight"
    rules = [NameRule(name, "layers/w", stack=("i",)), NameRule("model.norm.weight", "norm")]
    save_checkpoint(to_hf(tree, rules), tmp_path / "plain", config={"model_type": "llama"})
    assert json.loads((tmp_path / "plain" / "config.json").read_text()) == {"model_type": "llama"}
    convert_checkpoint(tmp_path / "plain", tmp_path / "out")
    w = from_hf(open_checkpoint(tmp_path / "out"), rules)["layers"]["w"]
    np.testing.assert_array_equal(w.data[1], jnvfp4.quantize(tree["layers"]["w"][1]).data)

"""``Policy``: which layer of a model is quantized, by which recipe, and the reason that ``explain`` gives."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jnvfp4 import Policy, Rule, recipes
from jnvfp4.policy import KEEP, Layer, is_weight

SR, ROWS = recipes.pretrain(), recipes.row_scaled()


def tree(*paths, shape=(32, 64)):
    """Parameters of a model with a kernel at each path."""
    root: dict = {}
    for path in paths:
        node = root
        for part in path.split("/"):
            node = node.setdefault(part, {})
        node["kernel"] = jax.ShapeDtypeStruct(shape, jnp.float32)
        node["bias"] = jax.ShapeDtypeStruct(shape[-1:], jnp.float32)
    return root


BLOCKS = [f"block_{i}/{layer}" for i in range(4) for layer in ("attention/query", "mlp/up", "mlp/down")]
MODEL = tree("embed", *BLOCKS, "lm_head")


def decided(policy, model=MODEL):
    return {decision.path: decision.recipe for decision in policy.explain(model)}


def reasons(policy, model=MODEL):
    return {decision.path: decision.why for decision in policy.explain(model)}


# ---------------------------------------------------------------- values
def test_a_policy_is_data():
    def make():
        return Policy([Rule("block_.*", SR)], default=ROWS, last_bf16=1, keep=["x"])

    assert make() == make()
    assert hash(make()) == hash(make())
    assert make() != Policy([Rule("block_.*", SR)], default=ROWS)
    assert isinstance(make().rules, tuple)
    with pytest.raises(AttributeError):
        make().default = SR
    traces = []
    f = jax.jit(lambda x, policy: traces.append(policy) or x, static_argnames="policy")
    f(1, policy=make())
    f(2, policy=make())
    assert len(traces) == 1


# ---------------------------------------------------------------- which rule decides
def test_the_first_rule_that_matches_the_whole_path_decides():
    policy = Policy([Rule("block_0/.*", None), Rule(".*/mlp/(up|down)", SR), Rule("block.*", ROWS)])
    assert decided(policy) == {
        "embed": None,
        "lm_head": None,
        **{path: None for path in BLOCKS if path.startswith("block_0/")},
        **{path: SR for path in BLOCKS if "mlp" in path and not path.startswith("block_0/")},
        **{path: ROWS for path in BLOCKS if "query" in path and not path.startswith("block_0/")},
    }
    assert reasons(policy)["block_1/mlp/up"] == "rule '.*/mlp/(up|down)'"
    assert reasons(policy)["block_0/mlp/up"] == "rule 'block_0/.*'"


def is_up(path):
    return path.endswith("/up")


def test_a_function_may_select():
    policy = Policy([Rule(is_up, SR)])
    assert {path for path, recipe in decided(policy).items() if recipe} == {p for p in BLOCKS if p.endswith("/up")}
    assert reasons(policy)["block_0/mlp/up"] == "rule is_up"


def test_the_default_is_for_layers_without_a_rule():
    policy = Policy([Rule(".*query", None)], default=SR)
    assert [path for path, recipe in decided(policy).items() if recipe is None] == [
        *(path for path in BLOCKS if "query" in path),
        "embed",
        "lm_head",
    ]
    assert reasons(policy)["block_0/mlp/up"] == "default"
    assert reasons(Policy([Rule(".*query", SR)]))["block_0/mlp/up"] == "no rule matches"
    assert set(decided(Policy()).values()) == {None}


def test_a_rule_without_w_gather_takes_that_of_the_policy():
    of_policy, of_rule = (P("x"), P()), (P("y"), P())
    policy = Policy([Rule("up", SR), Rule("down", SR, of_rule)], default=SR, w_gather=of_policy)
    assert [policy.gather_of(path) for path in ("up", "down", "gate")] == [of_policy, of_rule, of_policy]


# ---------------------------------------------------------------- what stays in high precision
@pytest.mark.parametrize("name", KEEP)
def test_kept_names_are_whole_parts_of_a_path(name):
    model = tree(name, f"decoder/{name}", f"{name}/up", f"my{name}", f"{name}s/up", f"{name}_0")
    kept = {path for path, why in reasons(Policy(default=SR), model).items() if why == f"keep {name!r}"}
    assert kept == {name, f"decoder/{name}", f"{name}/up"}


def test_other_names_may_be_kept():
    assert decided(Policy(default=SR, keep=()))["lm_head"] == SR
    policy = Policy(default=SR, keep=("attention",))
    assert {path for path, recipe in decided(policy).items() if recipe is None} == {p for p in BLOCKS if "query" in p}


def test_the_first_and_last_layers():
    policy = Policy(default=SR, first_bf16=1, last_bf16=2)
    assert {path.split("/")[0] for path, recipe in decided(policy).items() if recipe} == {"block_1"}
    assert reasons(policy)["block_0/mlp/up"] == "first_bf16=1"
    assert reasons(policy)["block_2/mlp/up"] == "last_bf16=2 of 4 layers"
    assert reasons(policy)["lm_head"] == "keep 'lm_head'"


def test_every_stack_of_layers_is_counted_by_itself():
    model = tree(*(f"encoder/layers/{i}/up" for i in range(3)), *(f"decoder/layers/{i}/up" for i in range(5)))
    found = decided(Policy(default=SR, first_bf16=1, last_bf16=1), model)
    assert sorted(path for path, recipe in found.items() if recipe) == [
        *(f"decoder/layers/{i}/up" for i in (1, 2, 3)),
        "encoder/layers/1/up",
    ]


def test_layers_may_be_listed_in_any_order():
    policy, layers = Policy(default=SR, last_bf16=1), [Layer(f"block_{i}/up", (32, 64)) for i in (2, 0, 1)]
    assert [decision.path for decision in policy.plan(layers).values() if decision.recipe is None] == ["block_2/up"]
    model = tree(*BLOCKS, "pool")  # a layer outside the stack is not one of its ends
    assert decided(Policy(default=SR, first_bf16=9), model)["pool"] == SR


def test_scanned_layers_have_no_ends():
    layers = [Layer("block/mlp/up", (4, 32, 64), stacked=True), Layer("lm_head", (32, 64))]
    policy = Policy(default=SR, first_bf16=1)
    with pytest.raises(ValueError, match=r"layers must not be scanned for first_bf16=1, since one trace serves all"):
        policy.plan(layers)
    with pytest.raises(ValueError, match="must not be scanned for first_bf16=1, last_bf16=2"):
        Policy(default=SR, first_bf16=1, last_bf16=2).plan(layers)
    assert Policy(default=SR).plan(layers)["block/mlp/up"].recipe == SR
    beside = [*layers, *(Layer(f"layer_{i}/up", (32, 64)) for i in range(2))]  # in high precision they may be scanned
    assert Policy([Rule("block/.*", None)], default=SR, first_bf16=1).plan(beside)["layer_1/up"].recipe == SR


def test_layers_without_numbers_have_no_ends():
    text = r"layers must have numbers in their paths for last_bf16=1 \(scanned .*, got up, down"
    with pytest.raises(ValueError, match=text):
        Policy(default=SR, last_bf16=1).plan([Layer("up", (32, 64)), Layer("down", (32, 64))])


# ---------------------------------------------------------------- explain
def test_padding_is_explained():
    shapes = {"a": (50, 10), "b": (64, 32), "c": (64, 10)}
    plan, n = Policy(default=SR).plan(Layer(path, s, s[::-1]) for path, s in shapes.items()), "N padded from 10 to 16"
    assert [plan[path].why for path in "abc"] == [f"default; {n}, K padded from 50 to 64", "default", f"default; {n}"]


def test_a_rule_may_pad_what_its_recipe_takes():
    """A forward pass takes any N: that of a head is padded only where a rule says so."""
    head, inference = Layer("head", (768, 50257), (50257, 768)), recipes.inference()
    for pad, why in (False, "rule 'head'"), (True, "rule 'head'; N padded from 50257 to 50272"):
        policy = Policy([Rule("head", inference, pad=pad)], keep=())
        assert policy.plan([head])["head"].why == why
        assert policy.options_of("head") == {"w_gather": None, "pad": pad}
        assert policy.options_of("up") == {"w_gather": None, "pad": False}
    windows = Policy([Rule("head", recipes.window64(), pad=True)], keep=())  # which need 64
    assert windows.plan([Layer("head", (80, 20), (20, 80))])["head"].why.endswith(
        "; N padded from 20 to 32, K padded from 80 to 128"
    )
    with pytest.raises(TypeError, match="Rule: pad must be True or False, got 16"):
        Rule("head", inference, pad=16)


def test_explain_prints_a_table():
    policy = Policy([Rule(".*/(up|down)", SR)], last_bf16=3)
    assert str(
        policy.explain(tree("block_0/mlp/up", "block_0/query", "lm_head", *(f"block_{i}/up" for i in (1, 2, 3))))
    ) == (
        "path            shape  recipe      why\n"
        "block_0/mlp/up  32x64  pretrain()  rule '.*/(up|down)'\n"
        "block_0/query   32x64  -           no rule matches\n"
        "block_1/up      32x64  -           last_bf16=3 of 4 layers\n"
        "block_2/up      32x64  -           last_bf16=3 of 4 layers\n"
        "block_3/up      32x64  -           last_bf16=3 of 4 layers\n"
        "lm_head         32x64  -           keep 'lm_head'\n"
        "quantized: 16.7 % of 12,288 weights"
    )
    assert policy.explain(tree("block_0/mlp/up", "block_3/up")).quantized == 0.5


def test_a_tree_of_linen_variables():
    """Only its parameters of two or more axes are layers."""
    assert decided(Policy(default=SR), {"params": tree("up")}) == {"up": SR}
    scale = {"norm": {"scale": jnp.ones(4)}, "up": {"w": jnp.ones((4, 4))}, "v": {"weight": jnp.ones((4, 4))}}
    own = {
        "a": {"down": jnp.ones((4, 4)), "pos": jnp.ones((4, 4)), "out_bias": jnp.ones((4, 4)), "x": jnp.ones((1, 4))}
    }
    assert decided(Policy(default=SR), scale | own) == {"a/down": None, "up": SR, "v": SR}
    assert reasons(Policy(default=SR), scale | own)["a/down"] == "named neither kernel, weight nor w"


@pytest.mark.parametrize(
    ("name", "shape", "multiplies"),
    [("up", (4, 32, 64), True), ("up", (32, 64), True), ("up", (1, 32), False), ("w", (1, 32), True),
     ("w", (32,), False), ("bias", (4, 32), False), ("scale", (4, 32, 64), False), ("pos_embedding", (16, 32), False)],
)  # fmt: skip
def test_parameters_that_may_multiply(name, shape, multiplies):
    assert is_weight(name, shape) == multiplies


def test_a_model_of_a_library_without_an_adapter_is_a_tree(monkeypatch):
    """As an Equinox model, which haliax knows more of, but only where it runs and is imported."""
    monkeypatch.delitem(sys.modules, "haliax", raising=False)

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Linear:
        weight: jax.Array

    Linear.__module__ = "equinox.nn._linear"
    assert decided(Policy(default=SR), {"up": Linear(jnp.ones((16, 16)))}) == {"up": SR}
    assert decided(Policy(default=SR, keep=()), Linear(jnp.ones((16, 16)))) == {"": SR}


@pytest.mark.parametrize("model", [None, {}, 3, {"a": jnp.ones((4, 4))}], ids=str)
def test_explain_refuses_other_models(model):
    with pytest.raises(TypeError, match=r"Policy.explain: model must be one of Flax, Equinox or haliax, or a tree of"):
        Policy(default=SR).explain(model)


def test_explain_says_what_it_got():
    for model, got in ((jnp.ones((4, 4)), r"an array float32 \(4, 4\)"), (Policy, "a class; make an instance")):
        with pytest.raises(TypeError, match=f"kernel, weight or w, got {got}$"):
            Policy(default=SR).explain(model)


def test_a_layer_with_two_weights_is_refused():
    with pytest.raises(ValueError, match="one array named kernel, weight or w, got two in 'up'"):
        Policy(default=SR).explain({"up": {"kernel": jnp.ones((4, 4)), "w": jnp.ones((4, 4))}})


# ---------------------------------------------------------------- errors


UNUSED = {
    "a beginning": ([Rule("block_0", SR)], "every rule must match a layer, got 'block_0', which matches none of block"),
    "no layer": ([Rule(".*gate", SR)], r"got '.*gate', which matches none of block_0/attention/query, .*, \.\.\.$"),
    "a part of a path": (
        [Rule("mlp/up", SR)], r"; a pattern is for the whole path, and '\.\*mlp/up\.\*' for a part of it$"),
    "layers of other rules": (
        [Rule("block_.*", SR), Rule(".*/up", None)],
        "every rule must decide for a layer, got '.*/up', .* as block_0/mlp/up matches 'block_.*'; the first that"),
    "kept layers": (
        [Rule("lm_head", SR)],
        "every rule must match a layer that keep does not name, got 'lm_head', .*; leave 'lm_head' out of keep"),
}  # fmt: skip


@pytest.mark.parametrize(("rules", "text"), UNUSED.values(), ids=UNUSED)
def test_a_rule_that_decides_for_no_layer_raises(rules, text):
    with pytest.raises(ValueError, match=text):
        Policy(rules).explain(MODEL)
    with pytest.raises(ValueError, match="which matches none of no layers"):
        Policy(rules[:1]).plan([])


def test_a_rule_may_leave_kept_layers_or_keep_less():
    Policy([Rule("lm_head", None)]).explain(MODEL)
    assert decided(Policy([Rule("lm_head", SR)], keep=("embed",)))["lm_head"] == SR
    assert decided(Policy([Rule("lm_head|.*/up", SR)]))["lm_head"] is None


def test_a_rule_for_layers_that_cannot_be_quantized_raises():
    layers = [Layer("conv", (3, 32, 64), reason="a reason"), Layer("up", (32, 64), (64, 32))]
    message = r"with a recipe must match a layer that can be quantized, got 'conv', which matches conv \(a rea"
    with pytest.raises(ValueError, match=message):
        Policy([Rule("conv", SR)]).plan(layers)
    assert Policy([Rule("conv", None)]).plan(layers)["conv"].recipe is None
    assert Policy([Rule("conv|up", SR)]).plan(layers)["up"].recipe == SR


@pytest.mark.parametrize("ends", [{"first_bf16": 4}, {"first_bf16": 2, "last_bf16": 2}, {"last_bf16": 9}], ids=str)
def test_the_ends_leave_a_layer(ends):
    with pytest.raises(ValueError, match=r"_bf16=. must leave a layer to quantize, got none of block 0 to 3"):
        Policy([Rule("block_.*", SR)], **ends).explain(MODEL)
    Policy([Rule("block_.*", None)], **ends).explain(MODEL)
    Policy(default=SR, keep=(), **ends).explain(MODEL)  # the embedding and the head

"""The named recipes: the spec of every operand, and what they refuse."""

import dataclasses
import inspect
from itertools import product

import pytest

from jnvfp4 import (
    NVFP4,
    NVFP4_2D,
    NVFP4_RHT,
    NVFP4_RHT_SR,
    NVFP4_RHT_SR_UNBIASED,
    NVFP4_SR,
    NVFP4_SR_UNBIASED,
    ROW_SCALED,
    WINDOW64,
    Format,
    QuantSpec,
    Recipe,
    dot_general,
    four_over_six,
    linear,
    recipes,
)

ONE, TILE = four_over_six(), four_over_six(block_rows=16)
TABLE = {
    "pretrain": (recipes.pretrain(), (NVFP4, NVFP4_2D), (NVFP4_SR, NVFP4_2D), (NVFP4_RHT_SR, NVFP4_RHT)),
    "pretrain, no rht": (
        recipes.pretrain(rht=False),
        (NVFP4, NVFP4_2D),
        (NVFP4_SR, NVFP4_2D),
        (NVFP4_SR, NVFP4),
    ),
    "pretrain, nearest": (
        recipes.pretrain(stochastic_rounding=False),
        (NVFP4, NVFP4_2D),
        (NVFP4, NVFP4_2D),
        (NVFP4_RHT, NVFP4_RHT),
    ),
    "pretrain, unbiased": (
        recipes.pretrain(unbiased=True),
        (NVFP4, NVFP4_2D),
        (NVFP4_SR_UNBIASED, NVFP4_2D),
        (NVFP4_RHT_SR_UNBIASED, NVFP4_RHT),
    ),
    "pretrain, unbiased, no rht": (
        recipes.pretrain(unbiased=True, rht=False, stochastic_rounding=True, weight_tiles=False),
        (NVFP4, NVFP4),
        (NVFP4_SR_UNBIASED, NVFP4),
        (NVFP4_SR_UNBIASED, NVFP4),
    ),
    "pretrain, no tiles": (
        recipes.pretrain(weight_tiles=False),
        (NVFP4, NVFP4),
        (NVFP4_SR, NVFP4),
        (NVFP4_RHT_SR, NVFP4_RHT),
    ),
    "row_scaled": (
        recipes.row_scaled(),
        (ROW_SCALED, NVFP4_2D),
        (NVFP4_SR, NVFP4_2D),
        (NVFP4_SR, ROW_SCALED),
    ),
    "row_scaled, nearest": (
        recipes.row_scaled(stochastic_rounding=False),
        (ROW_SCALED, NVFP4_2D),
        (NVFP4, NVFP4_2D),
        (NVFP4, ROW_SCALED),
    ),
    "4over6 weights": (recipes.four_over_six(), (NVFP4, TILE), (NVFP4_SR, TILE), (NVFP4_RHT_SR, NVFP4_RHT)),
    "4over6 weights, no rht": (
        recipes.four_over_six(rht=False),
        (NVFP4, TILE),
        (NVFP4_SR, TILE),
        (NVFP4_SR, NVFP4),
    ),
    "4over6 activations": (
        recipes.four_over_six("activations"),
        (ONE, NVFP4_2D),
        (NVFP4_SR, NVFP4_2D),
        (NVFP4_SR, ONE),
    ),
    "4over6 all": (recipes.four_over_six("all"), (ONE, TILE), (NVFP4_SR, TILE), (NVFP4_SR, ONE)),
    "4over6 all, nearest": (
        recipes.four_over_six("all", stochastic_rounding=False),
        (ONE, TILE),
        (NVFP4, TILE),
        (NVFP4, ONE),
    ),
    "window64": (recipes.window64(), (WINDOW64, NVFP4_2D), (NVFP4_SR, NVFP4_2D), (NVFP4_SR, WINDOW64)),
    "window64, nearest": (
        recipes.window64(stochastic_rounding=False),
        (WINDOW64, NVFP4_2D),
        (NVFP4, NVFP4_2D),
        (NVFP4, WINDOW64),
    ),
    "pretrain_4over6": (
        recipes.pretrain_4over6(),
        (ONE, ONE),
        (NVFP4_SR, NVFP4_2D),
        (NVFP4_RHT_SR, NVFP4_RHT),
    ),
    "pretrain_4over6, nearest": (
        recipes.pretrain_4over6(stochastic_rounding=False),
        (ONE, ONE),
        (NVFP4, NVFP4_2D),
        (NVFP4_RHT, NVFP4_RHT),
    ),
    "rl": (recipes.rl(), (ROW_SCALED, NVFP4), "dequantized", "dequantized"),
    "rl, high precision": (recipes.rl(backward="high_precision"), (ROW_SCALED, NVFP4), None, None),
    "rl, 4over6": (
        recipes.rl(four_over_six=True),
        (four_over_six(amax_scope="row"), ONE),
        "dequantized",
        "dequantized",
    ),
    "no fprop": (Recipe(None), None, (NVFP4, NVFP4_2D), (NVFP4, NVFP4)),
    "inference": (recipes.inference(), (NVFP4, NVFP4), None, None),
    "inference, weight-only": (recipes.inference(weight_only=True), (None, NVFP4), None, None),
}
TRAINING = {
    "pretrain": recipes.pretrain,
    "row_scaled": recipes.row_scaled,
    "four_over_six": recipes.four_over_six,
    "window64": recipes.window64,
}
every_training_recipe = pytest.mark.parametrize("make", TRAINING.values(), ids=TRAINING)


def specs_of(*pairs) -> list[QuantSpec]:
    return [spec for pair in pairs if isinstance(pair, tuple) for spec in pair if spec is not None]


@pytest.mark.parametrize(("recipe", "fprop", "dgrad", "wgrad"), TABLE.values(), ids=TABLE)
def test_the_specs_of_a_recipe(recipe, fprop, dgrad, wgrad):
    assert (recipe.fprop, recipe.dgrad, recipe.wgrad) == (fprop, dgrad, wgrad)


@pytest.mark.parametrize("error", ["mae", "mse"])
@pytest.mark.parametrize("e4m3_max", [448, 256])
@pytest.mark.parametrize("fast", [False, True])
def test_every_4over6_setting_reaches_x_and_w(error, e4m3_max, fast):
    recipe = recipes.four_over_six("all", error, e4m3_max=e4m3_max, fast=fast)
    (x, w), (_, w_t), (_, x_t) = recipe.fprop, recipe.dgrad, recipe.wgrad
    math = "fp16" if fast else "fp32"
    assert x == x_t == QuantSpec(Format(e4m3_max=e4m3_max), 1, error, math)
    assert w == w_t == QuantSpec(Format(e4m3_max=e4m3_max), 16, error, math)


def test_the_names_are_those_of_the_module():
    """Every recipe of the module is in the table above."""
    functions = {
        name for name, f in vars(recipes).items() if inspect.isfunction(f) and f.__module__ == recipes.__name__
    }
    assert {name for name in functions if not name.startswith("_")} == {*TRAINING, "pretrain_4over6", "rl", "inference"}


# ---------------------------------------------------------------- backward
@every_training_recipe
def test_the_default_backward_is_nvfp4(make):
    assert make(backward="nvfp4") == make()


@every_training_recipe
@pytest.mark.parametrize(("backward", "how"), [("high_precision", None), ("dequantized", "dequantized")])
def test_other_gradients_leave_the_forward_pass(make, backward, how):
    assert make(backward=backward) == Recipe(make().fprop, how, how)


@every_training_recipe
@pytest.mark.parametrize("backward", ["high_precision", "dequantized"])
def test_other_gradients_need_no_key(make, backward):
    assert not make(backward=backward).stochastic


# ---------------------------------------------------------------- the policy on gradients
SWITCHES = [
    *(recipes.pretrain(rht=r, stochastic_rounding=s, weight_tiles=t) for r, s, t in product([False, True], repeat=3)),
    *(recipes.pretrain(rht=r, unbiased=True) for r in (False, True)),
    *(f(stochastic_rounding=s) for f in (recipes.row_scaled, recipes.window64) for s in (False, True)),
    *(
        recipes.four_over_six(scope, stochastic_rounding=s)
        for scope in ("weights", "activations", "all")
        for s in (False, True)
    ),
]


def test_gradients_have_one_amax_and_plain_block_scales():
    """Whatever x and w have: dy is 1x16 with the tensor's amax, never 4over6."""
    assert {dy for recipe in SWITCHES for dy in (recipe.dgrad[0], recipe.wgrad[0])} == {
        NVFP4,
        NVFP4_SR,
        NVFP4_RHT,
        NVFP4_RHT_SR,
        NVFP4_SR_UNBIASED,
        NVFP4_RHT_SR_UNBIASED,
    }


def test_only_gradients_are_rounded_stochastically():
    others = [spec for r in SWITCHES for spec in specs_of(r.fprop, r.dgrad[1:], r.wgrad[1:])]
    assert {spec.rounding for spec in others} == {"nearest"}


def test_only_wgrad_is_rotated():
    assert not any(spec.format.rht for r in SWITCHES for spec in specs_of(r.fprop, r.dgrad))


def test_weights_are_the_same_values_in_both_orientations():
    """But for 4over6, whose transpose may choose differently."""
    assert all(r.fprop[1] == r.dgrad[1] for r in SWITCHES)


@pytest.mark.parametrize("stochastic", [False, True])
@every_training_recipe
def test_stochastic_says_whether_a_key_is_needed(make, stochastic):
    assert make(stochastic_rounding=stochastic).stochastic is stochastic


@pytest.mark.parametrize(
    ("field", "pair"),
    [
        ("fprop", (NVFP4, NVFP4_SR)),
        ("fprop", (None, NVFP4_SR)),
        ("dgrad", (NVFP4_SR, NVFP4)),
        ("wgrad", (NVFP4, NVFP4_SR)),
    ],
    ids=["fprop", "weight_only", "dgrad", "wgrad"],
)
def test_one_stochastic_operand_is_enough(field, pair):
    assert Recipe(**{field: pair}).stochastic
    assert not Recipe().stochastic


def test_the_default_of_linear_is_the_pretraining_recipe_that_needs_no_key():
    """Not ``Recipe()``, whose loss was further from bfloat16's in docs/recipes.md."""
    assert recipes.pretrain(stochastic_rounding=False) == recipes.DEFAULT
    assert not recipes.DEFAULT.stochastic
    for function in (linear, dot_general):
        assert inspect.signature(function).parameters["recipe"].default == recipes.DEFAULT


def test_a_plain_recipe_rotates_nothing_and_rounds_nothing_stochastically():
    assert Recipe() == recipes.pretrain(rht=False, stochastic_rounding=False)


def test_recipes_are_values():
    """Equal, hashable and immutable: static arguments of jit."""
    assert len({recipe for recipe, *_ in TABLE.values()}) == len(TABLE)
    for make in (*TRAINING.values(), recipes.inference):
        assert make() == make()
        assert hash(make()) == hash(make())
        with pytest.raises(AttributeError):
            make().fprop = None


def test_specs_have_names():
    """Plain pairs become them, and stay equal to pairs."""
    recipe = Recipe((None, NVFP4), (NVFP4_SR, NVFP4_2D), (NVFP4_RHT_SR, NVFP4_RHT))
    assert (recipe.fprop.x, recipe.fprop.w) == (None, NVFP4)
    assert (recipe.dgrad.dy, recipe.dgrad.w) == (NVFP4_SR, NVFP4_2D)
    assert (recipe.wgrad.dy, recipe.wgrad.x) == (NVFP4_RHT_SR, NVFP4_RHT)
    assert type(recipe.fprop) is recipes.Fprop
    assert type(recipe.dgrad) is recipes.Dgrad
    assert type(recipe.wgrad) is recipes.Wgrad
    named = Recipe(recipes.Fprop(None, NVFP4), recipes.Dgrad(NVFP4_SR, NVFP4_2D), recipes.Wgrad(*recipe.wgrad))
    assert named == recipe
    assert hash(named) == hash(recipe)


@pytest.mark.parametrize("how", [None, "dequantized"])
def test_gradients_in_high_precision_have_no_specs(how):
    recipe = Recipe(dgrad=how, wgrad=how)
    assert (recipe.dgrad, recipe.wgrad) == (how, how)
    assert (recipe.dgrad_specs, recipe.wgrad_specs) == (None, None)
    assert (Recipe().dgrad_specs, Recipe().wgrad_specs) == (Recipe().dgrad, Recipe().wgrad)


def test_one_field_can_be_replaced():
    recipe = dataclasses.replace(recipes.pretrain(), wgrad=(NVFP4, NVFP4))
    assert recipe == Recipe(recipes.pretrain().fprop, recipes.pretrain().dgrad, (NVFP4, NVFP4))


def test_the_repr_names_the_specs():
    recipe = Recipe((None, NVFP4_2D), (NVFP4_SR, four_over_six(block_rows=16)), "dequantized")
    assert repr(recipe) == (
        "Recipe(fprop=Fprop(x=None, w=NVFP4_2D), dgrad=Dgrad(dy=NVFP4_SR, w=FOUR_OVER_SIX_2D_MAE_256), "
        "wgrad='dequantized')"
    )


# ---------------------------------------------------------------- refused
INVALID = {
    **{
        f"backward of {name}": (
            lambda make=make: make(backward="fp8"),
            rf"{name}: backward must be one of \('nvfp4', 'high_precision', 'dequantized'\), got 'fp8'",
        )
        for name, make in TRAINING.items()
    },
    "backward of none": (lambda: recipes.pretrain(backward=None), "pretrain: backward must be one of .*, got None"),
    "scope": (
        lambda: recipes.four_over_six("gradients"),
        r"four_over_six: scope must be one of \('weights', 'activations', 'all'\), got 'gradients'",
    ),
    "error": (lambda: recipes.four_over_six(error="max"), "four_over_six: error must be 'mae' or 'mse', got 'max'"),
    "e4m3_max": (lambda: recipes.four_over_six(e4m3_max=240), r"e4m3_max must be one of \(448, 256\), got 240"),
    "rht on activations": (
        lambda: recipes.four_over_six("activations", rht=True),
        'four_over_six: rht must be False for scope="activations", since wgrad reads 4over6 activations, got True',
    ),
    "rht on all": (lambda: recipes.four_over_six("all", rht=True), 'rht must be False for scope="all"'),
    "backward of rl": (
        lambda: recipes.rl(backward="nvfp4"),
        r"rl: backward must be one of \('dequantized', 'high_precision'\), got 'nvfp4'",
    ),
    "4over6 of rl": (lambda: recipes.rl(four_over_six=1), "rl: four_over_six must be True or False, got 1"),
    "rounding of pretrain_4over6": (
        lambda: recipes.pretrain_4over6(stochastic_rounding=None),
        "pretrain_4over6: stochastic_rounding must be True or False, got None",
    ),
    "rht without a quantized gradient": (
        lambda: recipes.pretrain(backward="dequantized", rht=False),
        'pretrain: rht must be left out for backward="dequantized", which quantizes no gradient, got False',
    ),
    "rounding without a quantized gradient": (
        lambda: recipes.row_scaled(backward="high_precision", stochastic_rounding=True),
        'row_scaled: stochastic_rounding must be left out for backward="high_precision"',
    ),
    "unbiased, rounded to nearest": (
        lambda: recipes.pretrain(unbiased=True, stochastic_rounding=False),
        "pretrain: unbiased must be False for stochastic_rounding=False, which rounds nothing stochastically, got True",
    ),
    "unbiased without a quantized gradient": (
        lambda: recipes.pretrain(unbiased=True, backward="dequantized"),
        'pretrain: unbiased must be False for backward="dequantized", which rounds nothing stochastically, got True',
    ),
    "unbiased, a number": (lambda: recipes.pretrain(unbiased=1), "pretrain: unbiased must be True or False, got 1"),
    "switch": (lambda: recipes.pretrain(rht="no"), "pretrain: rht must be True or False, got 'no'"),
    "weight_only": (lambda: recipes.inference(weight_only=1), "inference: weight_only must be True or False, got 1"),
    "fast": (lambda: recipes.four_over_six(fast="no"), "four_over_six: fast must be True or False, got 'no'"),
    "fprop, x rotated": (
        lambda: Recipe((NVFP4_RHT, NVFP4)),
        r"Recipe: fprop operands must both be rotated \(format.rht\) or neither, got",
    ),
    "dgrad, w rotated": (lambda: Recipe(dgrad=(NVFP4, NVFP4_RHT)), "Recipe: dgrad operands must both be rotated"),
    "wgrad, dy rotated": (lambda: Recipe(wgrad=(NVFP4_RHT_SR, WINDOW64)), "Recipe: wgrad operands must both be"),
    "weight-only, rotated": (lambda: Recipe((None, NVFP4_RHT)), "Recipe: fprop operands must both be rotated"),
    "weight-only, window64": (
        lambda: Recipe((None, WINDOW64)),
        'Recipe: fprop weight-only needs a w spec with amax_scope "tensor" or "row", got',
    ),
    "fprop, a list": (
        lambda: Recipe([NVFP4, NVFP4]),
        r"Recipe: fprop must be a pair \(x spec or None, w spec\) or None, got \[",
    ),
    "wgrad, three": (lambda: Recipe(wgrad=(NVFP4,) * 3), r"Recipe: wgrad must be a pair \(dy spec, x spec\), got \("),
    "wgrad, a word": (
        lambda: Recipe(wgrad="bf16"),
        "Recipe: wgrad must be a pair of specs, None or \"dequantized\", got 'bf16'",
    ),
    "no dy spec": (lambda: Recipe(dgrad=(None, NVFP4)), r"Recipe: dgrad must be a pair \(dy spec, w spec\), got"),
}


@pytest.mark.parametrize(("make", "text"), INVALID.values(), ids=INVALID)
def test_invalid_arguments(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_rotated_activations_with_4over6_weights_are_allowed():
    assert recipes.four_over_six("weights", rht=True) == recipes.four_over_six()

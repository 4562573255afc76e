"""The named recipes: the spec of every operand."""

import dataclasses
import inspect

import pytest

from jnvfp4 import NVFP4, NVFP4_2D, NVFP4_RHT, NVFP4_RHT_SR, NVFP4_RHT_SR_UNBIASED, Recipe, dot_general, linear, recipes
from jnvfp4.spec import NVFP4_SR, NVFP4_SR_UNBIASED, ROW_SCALED, WINDOW64, Format, QuantSpec, four_over_six

ONE, TILE = four_over_six(), four_over_six(block_rows=16)
SQUARES, SQUARES_OF_ROW = (four_over_six("mse", e4m3_max=448, amax_scope=scope) for scope in ("tensor", "row"))
PLAIN, TILES, SR, SR_TILES = (NVFP4, NVFP4), (NVFP4, NVFP4_2D), (NVFP4_SR, NVFP4), (NVFP4_SR, NVFP4_2D)
ROTATED, ROTATED_SR, UNBIASED = (NVFP4_RHT, NVFP4_RHT), (NVFP4_RHT_SR, NVFP4_RHT), (NVFP4_SR_UNBIASED, NVFP4)
ROWS, WINDOWS = (ROW_SCALED, NVFP4_2D), (WINDOW64, NVFP4_2D)
UNBIASED_TILES, ROTATED_UNBIASED = (NVFP4_SR_UNBIASED, NVFP4_2D), (NVFP4_RHT_SR_UNBIASED, NVFP4_RHT)
# Each recipe with the specs of its three GEMMs.
TABLE = {
    "pretrain": (recipes.pretrain(), TILES, SR_TILES, ROTATED_SR),
    "pretrain, no rht": (recipes.pretrain(rht=False), TILES, SR_TILES, SR),
    "pretrain, nearest": (recipes.pretrain(stochastic_rounding=False), TILES, TILES, ROTATED),
    "pretrain, plain": (recipes.pretrain(rht=False, stochastic_rounding=False), TILES, TILES, PLAIN),
    "pretrain, unbiased": (recipes.pretrain(unbiased=True), TILES, UNBIASED_TILES, ROTATED_UNBIASED),
    "pretrain, unbiased, no rht": (
        recipes.pretrain(unbiased=True, rht=False, stochastic_rounding=True, weight_tiles=False),
        *(PLAIN, UNBIASED, UNBIASED),
    ),
    "pretrain, no tiles": (recipes.pretrain(weight_tiles=False), PLAIN, SR, ROTATED_SR),
    "row_scaled": (recipes.row_scaled(), ROWS, SR_TILES, (NVFP4_SR, ROW_SCALED)),
    "row_scaled, nearest": (recipes.row_scaled(stochastic_rounding=False), ROWS, TILES, (NVFP4, ROW_SCALED)),
    "4over6 weights": (recipes.four_over_six(), (NVFP4, TILE), (NVFP4_SR, TILE), ROTATED_SR),
    "4over6 weights, no rht": (recipes.four_over_six(rht=False), (NVFP4, TILE), (NVFP4_SR, TILE), SR),
    "4over6 activations": (recipes.four_over_six("activations"), (ONE, NVFP4_2D), SR_TILES, (NVFP4_SR, ONE)),
    "4over6 all": (recipes.four_over_six("all"), (ONE, TILE), (NVFP4_SR, TILE), (NVFP4_SR, ONE)),
    "4over6 all, nearest": (
        recipes.four_over_six("all", stochastic_rounding=False),
        *((ONE, TILE), (NVFP4, TILE), (NVFP4, ONE)),
    ),
    "window64": (recipes.window64(), WINDOWS, SR_TILES, (NVFP4_SR, WINDOW64)),
    "window64, nearest": (recipes.window64(stochastic_rounding=False), WINDOWS, TILES, (NVFP4, WINDOW64)),
    "pretrain_4over6": (recipes.pretrain_4over6(), (ONE, ONE), SR_TILES, ROTATED_SR),
    "pretrain_4over6, nearest": (recipes.pretrain_4over6(stochastic_rounding=False), (ONE, ONE), TILES, ROTATED),
    "rl": (recipes.rl(), (ROW_SCALED, NVFP4), "dequantized", "dequantized"),
    "rl, high precision": (recipes.rl(backward="high_precision"), (ROW_SCALED, NVFP4), None, None),
    "rl, 4over6": (
        recipes.rl(four_over_six=True),
        *((four_over_six(amax_scope="row"), ONE), "dequantized", "dequantized"),
    ),
    "no fprop": (Recipe(None), None, TILES, PLAIN),
    "inference": (recipes.inference(), PLAIN, None, None),
    "inference, weight-only": (recipes.inference(weight_only=True), (None, NVFP4), None, None),
    "inference, 4over6": (recipes.inference(four_over_six=True), (SQUARES_OF_ROW, SQUARES), None, None),
    "inference, both": (recipes.inference(weight_only=True, four_over_six=True), (None, SQUARES), None, None),
}
MAKERS = (recipes.pretrain, recipes.row_scaled, recipes.four_over_six, recipes.window64)
TRAINING = {maker.__name__: maker for maker in MAKERS}
every_training_recipe = pytest.mark.parametrize("make", TRAINING.values(), ids=TRAINING)


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


def test_every_maker_names_what_it_makes():
    """And is in the tables above."""
    makers = recipes._makers()
    assert sorted(makers) == sorted([*TRAINING, "pretrain_4over6", "rl", "inference"])
    assert [getattr(recipes, maker)().name for maker in makers] == [f"{maker}()" for maker in makers]


NAMES = {
    "DEFAULT": recipes.DEFAULT,
    "Recipe()": Recipe(),
    "inference(weight_only=True)": recipes.inference(weight_only=True),
    "Recipe(NVFP4 x NVFP4_2D, NVFP4_SR x NVFP4_2D, NVFP4_SR x NVFP4)": recipes.pretrain(rht=False),
    "Recipe(ROW_SCALED x NVFP4_2D, dequantized, dequantized)": recipes.row_scaled(backward="dequantized"),
    "Recipe(NVFP4 x NVFP4, NVFP4 x NVFP4_2D, None, requantize=True)": Recipe(PLAIN, wgrad=None, requantize=True),
}


@pytest.mark.parametrize(("name", "recipe"), NAMES.items(), ids=NAMES)
def test_other_recipes_are_named_by_their_specs(name, recipe):
    assert recipe.name == name


@every_training_recipe
@pytest.mark.parametrize(("backward", "how"), [("high_precision", None), ("dequantized", "dequantized")])
def test_other_gradients_leave_the_forward_pass(make, backward, how):
    assert make(backward=backward) == Recipe(make().fprop, how, how)
    assert not make(backward=backward).stochastic
    assert (make(backward="nvfp4"), make().stochastic) == (make(), True)


def test_one_stochastic_operand_is_enough():
    first, second = (NVFP4_SR, NVFP4), (NVFP4, NVFP4_SR)
    for recipe in (Recipe(second), Recipe((None, NVFP4_SR)), Recipe(dgrad=first), Recipe(wgrad=second)):
        assert recipe.stochastic
    for recipe in (Recipe(), Recipe(dgrad=None, wgrad="dequantized")):
        assert not recipe.stochastic


def test_the_default_of_linear_is_the_pretraining_recipe_that_needs_no_key():
    """Not ``Recipe()``, whose loss was further from bfloat16's in docs/results.md."""
    assert recipes.pretrain(stochastic_rounding=False) == recipes.DEFAULT
    assert not recipes.DEFAULT.stochastic
    for function in (linear, dot_general):
        assert inspect.signature(function).parameters["recipe"].default == recipes.DEFAULT


def test_recipes_are_values():
    """Equal, hashable and immutable: static arguments of jit."""
    assert len({recipe for recipe, *_ in TABLE.values()}) == len(TABLE)
    assert recipes.pretrain(rht=False, stochastic_rounding=False) == Recipe()
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


def test_one_field_can_be_replaced():
    recipe = dataclasses.replace(recipes.pretrain(), wgrad=PLAIN)
    assert recipe == Recipe(recipes.pretrain().fprop, recipes.pretrain().dgrad, PLAIN)


def test_gradients_of_what_was_quantized():
    recipe = recipes.pretrain_4over6(requantize=True)
    assert recipe == dataclasses.replace(recipes.pretrain_4over6(), requantize=True)
    assert recipe != recipes.pretrain_4over6()
    assert (recipe.requantizes_w, recipes.pretrain_4over6().requantizes_w) == (True, False)
    assert not dataclasses.replace(recipes.pretrain(), requantize=True).requantizes_w  # fprop's w, transposed


def test_the_repr_names_the_specs():
    recipe = Recipe((None, NVFP4_2D), (NVFP4_SR, four_over_six(block_rows=16)), "dequantized")
    assert repr(recipe) == (
        "Recipe(fprop=Fprop(x=None, w=NVFP4_2D), dgrad=Dgrad(dy=NVFP4_SR, w=FOUR_OVER_SIX_2D_MAE_256), "
        "wgrad='dequantized', requantize=False)"
    )

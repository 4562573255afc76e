"""The named recipes of docs/training.md, by the names that command lines take."""

from collections.abc import Callable
from functools import partial

from jnvfp4 import Recipe, recipes

RECIPES: dict[str, Callable[..., Recipe]] = {
    "pretrain": recipes.pretrain,
    "pretrain_no_rht": partial(recipes.pretrain, rht=False),
    "pretrain_no_sr": partial(recipes.pretrain, stochastic_rounding=False),
    "pretrain_no_rht_no_sr": partial(recipes.pretrain, rht=False, stochastic_rounding=False),
    "pretrain_unbiased": partial(recipes.pretrain, unbiased=True),
    "pretrain_no_tiles": partial(recipes.pretrain, weight_tiles=False),
    "row_scaled": recipes.row_scaled,
    "four_over_six_weights": partial(recipes.four_over_six, "weights"),
    "four_over_six_activations": partial(recipes.four_over_six, "activations"),
    "four_over_six_all": partial(recipes.four_over_six, "all"),
    "window64": recipes.window64,
    "pretrain_4over6": recipes.pretrain_4over6,
    "pretrain_4over6_requantized": partial(recipes.pretrain_4over6, requantize=True),
    "rl": recipes.rl,
    "inference": recipes.inference,
    "weight_only": partial(recipes.inference, weight_only=True),
}
# --backward does not change their gradients
WITHOUT_BACKWARD = (
    *("pretrain_unbiased", "pretrain_4over6", "pretrain_4over6_requantized"),
    *("rl", "inference", "weight_only"),
)

"""Fine-tunes the Llama of Tunix in NVFP4, from random weights: all weights, and LoRA on frozen NVFP4 weights.

    pip install ".[qwix]" google-tunix
    python examples/existing_models/tunix_llama.py

Prints what is quantized, and the loss and the bytes of a layer beside bfloat16.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
from flax import nnx
from tunix import PeftTrainer, TrainingConfig
from tunix.models.llama3.model import Llama3, ModelConfig
from tunix.sft import utils
from tunix.sft.peft_trainer import _default_loss_fn as plain_loss

import jnvfp4
from jnvfp4 import Policy, Recipe, Rule, recipes, step_key

HEADS = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 16}
CONFIG = ModelConfig(vocab_size=64, embed_dim=64, hidden_dim=128, num_heads=4, rope_theta=10000, norm_eps=1e-5, **HEADS)
ADAPTERS = {"module_path": "layers/.*", "rank": 8, "alpha": 16.0}


def model() -> Llama3:
    """Returns a model in bfloat16. Tunix starts MLPs at zero, from where they would not learn."""
    made = Llama3(CONFIG, rngs=nnx.Rngs(0))
    params, key = nnx.state(made, nnx.Param), jax.random.key(1)
    noise = optax.tree.random_like(key, params, jax.random.normal)
    nnx.update(made, jax.tree.map(lambda p, n: (0.1 * n if p.ndim > 1 else p).astype(jnp.bfloat16), params, noise))
    return made


def quantized(plain: Llama3, recipe: Recipe, lora: qwix.LoraProvider | None = None) -> tuple[Llama3, Any]:
    """Returns the model in NVFP4 and its provider. These lines are all that Tunix needs."""
    policy = Policy([Rule("layers/.*", recipe)], last_bf16=1)
    provider = jnvfp4.qwix.Provider(policy, lora=lora)
    with step_key(jax.random.key(0)):  # for the call that Qwix makes
        return qwix.quantize_model(plain, provider, **plain.get_model_input(), rngs=nnx.Rngs(2)), provider


def loss(
    model: Llama3, input_tokens: Any, input_mask: Any, positions: Any, attention_mask: Any, seed: jax.Array
) -> jax.Array:
    """Computes the loss of Tunix with a key of this step, for recipes that round stochastically."""
    with step_key(jax.random.fold_in(jax.random.key(3), seed)):
        return plain_loss(model, input_tokens, input_mask, positions, attention_mask)


def inputs(batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    mask = jnp.ones(batch["tokens"].shape, bool)
    of_model = {"positions": utils.build_positions_from_mask(mask), "attention_mask": utils.make_causal_attn_mask(mask)}
    return {"input_tokens": batch["tokens"], "input_mask": mask, "seed": batch["seed"][0], **of_model}


def batches(steps: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields sequences in which a token determines the next one four times out of five."""
    rng = np.random.default_rng(0)
    following = rng.permutation(64)
    for step in range(steps):
        tokens = rng.integers(0, 64, (32, 16))
        for column, previous in zip(tokens[1:], tokens, strict=False):
            column[:] = np.where(rng.random(16) < 0.8, following[previous], column)
        yield {"tokens": tokens.T.astype(np.int32), "seed": np.full(16, step, np.uint32)}


def sft(name: str, trained: Llama3, steps: int) -> None:
    trainer = PeftTrainer(trained, optax.adam(3e-3), TrainingConfig(eval_every_n_steps=steps, max_steps=steps))
    trainer.with_gen_model_input_fn(inputs).with_loss_fn(loss)
    trainer.train(batches(steps))
    losses = trainer.metrics_logger.get_metric_history("", "loss", "train")
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(trained.layers[0].mlp.up_proj.kernel.get_value()))
    print(
        f"{name:16} loss {losses[0]:.3f}, mean of the last 10 of {len(losses)} steps {np.mean(losses[-10:]):.3f}; "
        f"layers/0/mlp/up_proj takes {size} bytes"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    full, provider = quantized(model(), recipes.pretrain())
    print(provider.explain())
    sft("SFT, bfloat16", model(), steps)
    sft("SFT, pretrain()", full, steps)
    adapters = qwix.LoraProvider(**ADAPTERS)
    plain = model()
    sft("LoRA, bfloat16", qwix.apply_lora_to_model(plain, adapters, **plain.get_model_input(), rngs=nnx.Rngs(2)), steps)
    frozen, _ = quantized(plain, recipes.pretrain(), adapters)
    sft("LoRA, NVFP4", frozen, steps)


if __name__ == "__main__":
    main()

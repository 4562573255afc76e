"""Quantizes Flax models that others wrote: BERT of Hugging Face by ``intercept``, GPT-2 by Qwix, with random weights.

    pip install ".[flax,qwix]" "transformers<5"
    python examples/existing_models/hugging_face.py

Prints how many layers are in NVFP4 and the loss of ten training steps. transformers 4 has the last Flax models; nothing
is downloaded.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jnvfp4

warnings.simplefilter("ignore", DeprecationWarning)  # of Qwix and transformers, about Flax and JAX

import qwix  # noqa: E402
from transformers import BertConfig, FlaxBertForMaskedLM, FlaxGPT2LMHeadModel, GPT2Config  # noqa: E402

IDS = jnp.arange(64).reshape(4, 16)
BF16 = jnp.dtype(jnp.bfloat16)
RECIPE = jnvfp4.recipes.pretrain()
SIZES = {"vocab_size": 128}


def cross_entropy(logits: jax.Array) -> jax.Array:
    """Returns the loss of the next token."""
    likely = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
    return -jnp.take_along_axis(likely, IDS[:, 1:, None], -1).mean()


def bert() -> tuple[Any, Callable[[Any, jax.Array], jax.Array]]:
    """Returns parameters and the loss of BERT, whose layers are ``nn.Dense``."""
    config = BertConfig(num_hidden_layers=3, num_attention_heads=2, hidden_size=64, intermediate_size=128, **SIZES)
    model = FlaxBertForMaskedLM(config, dtype=BF16)
    policy = jnvfp4.Policy([jnvfp4.Rule("bert/encoder/layer/.*", RECIPE)], last_bf16=1)
    print(policy.explain(model.params))

    def loss(params: Any, key: jax.Array) -> jax.Array:
        with jnvfp4.flax.linen.intercept(policy), jnvfp4.step_key(key):
            return cross_entropy(model(IDS, params=params).logits)

    return model.params, loss


def gpt2() -> tuple[Any, Callable[[Any, jax.Array], jax.Array]]:
    """Returns parameters and the loss of GPT-2, whose layers are modules of their own, which Qwix reaches."""
    model = FlaxGPT2LMHeadModel(GPT2Config(n_layer=3, n_head=2, n_embd=64, n_positions=64, **SIZES), dtype=BF16)
    policy = jnvfp4.Policy([jnvfp4.Rule("transformer/h/.*", RECIPE)], last_bf16=1)
    driven = qwix.quantize_model(model.module, jnvfp4.qwix.Provider(policy))
    positions = jnp.broadcast_to(jnp.arange(IDS.shape[1]), IDS.shape)

    def loss(params: Any, key: jax.Array) -> jax.Array:
        logits = driven.apply({"params": params}, IDS, jnp.ones_like(IDS), positions, rngs={"sr": key}).logits
        return cross_entropy(logits)

    return model.params, loss


def main() -> None:
    for name, make in (("BERT", bert), ("GPT-2", gpt2)):
        params, loss = make()
        products = str(jax.make_jaxpr(loss)(params, jax.random.key(0))).count("nvfp4_matmul[")
        step = jax.jit(jax.value_and_grad(loss))
        losses = []
        for i in range(10):
            value, grads = step(params, jax.random.key(i))
            params = jax.tree.map(lambda p, g: p - 0.3 * g, params, grads)
            losses.append(float(value))
        print(f"{name}: {products} layers in NVFP4, loss {losses[0]:.3f} -> {losses[-1]:.3f} in ten steps")


if __name__ == "__main__":
    main()

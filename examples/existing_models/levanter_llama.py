"""Trains Levanter's Llama, small and with random weights, by its own trainer in NVFP4 beside bfloat16.

    pip install --pre . levanter jax==0.10.2 gitpython chex  # docs/models.md says why
    python examples/existing_models/levanter_llama.py

Prints what is quantized and the losses.
"""

import argparse
import pathlib
import tempfile
from typing import Any

import haliax as hax
import jax
import jmp
import numpy as np
import optax
from levanter.checkpoint import CheckpointerConfig
from levanter.layers.attention import AttentionMask
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmExample, compute_next_token_loss
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig

import jnvfp4
from jnvfp4 import Policy, Rule, recipes, step_key

Vocab = hax.Axis("vocab", 64)
MODEL = LlamaConfig(seq_len=32, hidden_dim=64, intermediate_dim=128, num_layers=3, num_heads=4, num_kv_heads=2)


def batch(rng: np.random.Generator, following: np.ndarray) -> LmExample:
    """Returns sequences in which a token determines the next one four times out of five."""
    tokens = rng.integers(0, 64, (32, 16))
    for column, previous in zip(tokens[1:], tokens, strict=False):
        column[:] = np.where(rng.random(16) < 0.8, following[previous], column)
    named = hax.named(tokens.T.astype(np.int32), ("batch", MODEL.Pos))
    mask = LmExample.causal_loss_mask(MODEL.Pos).broadcast_axis(hax.Axis("batch", 16))
    return LmExample(tokens=named, loss_mask=mask, attn_mask=AttentionMask.causal())


def loss(model: Any, example: LmExample, *, key: jax.Array) -> Any:
    """Computes the loss of Levanter with the key of its step, for recipes that round stochastically."""
    with step_key(key):
        # Its own mean passes a mask of numbers to jnp.mean, which jax 0.10.2 refuses.
        of_tokens = compute_next_token_loss(model, example, reduction=None)
    return (of_tokens * example.loss_mask).sum() / example.loss_mask.sum()


def losses(policy: Policy, steps: int) -> list[float]:
    """Runs Levanter's trainer and returns the loss of each step."""

    def build() -> Any:
        return jnvfp4.haliax.apply(MODEL.build(Vocab, key=jax.random.key(0)), policy)

    with tempfile.TemporaryDirectory() as folder:
        checkpoints = CheckpointerConfig(base_path=folder, keep=[])
        options = {"num_train_steps": steps, "train_batch_size": 16, "log_dir": pathlib.Path(folder), "id": "tiny"}
        mp = jmp.get_policy("params=float32,compute=bfloat16,output=float32")
        config = TrainerConfig(
            mp=mp, tracker=NoopConfig(), checkpointer=checkpoints, require_accelerator=False, **options
        )
        rng = np.random.default_rng(0)
        following = rng.permutation(64)
        with Trainer(config, optax.adam(3e-3), loss, add_default_hooks=False) as trainer:
            state = trainer.initial_state(jax.random.key(1), model_init=build)
            batches = (batch(rng, following) for _ in range(steps))
            return [float(info.loss) for info in trainer.training_steps(state, batches)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    policy = Policy([Rule("transformer/layers/.*", recipes.pretrain())])
    print(policy.explain(MODEL.build(Vocab, key=jax.random.key(0))))
    for name, of_run in (("bfloat16", Policy()), ("pretrain()", policy)):
        curve = losses(of_run, steps)
        print(f"{name:10} loss {curve[0]:.3f}, mean of the last 10 of {len(curve)} steps {np.mean(curve[-10:]):.3f}")


if __name__ == "__main__":
    main()

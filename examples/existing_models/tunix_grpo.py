"""Makes a step of GRPO with the Llama of Tunix in ``recipes.rl()``, with random weights.

    pip install ".[qwix]" google-tunix
    python examples/existing_models/tunix_grpo.py

The rollout is in ``recipes.inference(weight_only=True)``, then in ``recipes.rl()``. Prints how far its
log-probabilities are from those of the model that is trained.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from tunix import ClusterConfig, GRPOConfig, GRPOLearner, RLCluster, RLTrainingConfig, Role, RolloutConfig
from tunix.rl.common import compute_per_token_logps
from tunix.rl.rollout.base_rollout import CacheConfig
from tunix.rl.rollout.vanilla_rollout import VanillaRollout
from tunix_llama import HEADS, Llama3, model, quantized

from jnvfp4 import Recipe, recipes


class Tokens:
    """Reads and writes tokens as numbers."""

    encode = staticmethod(lambda text, **_: [int(token) for token in text.split()])
    decode = staticmethod(lambda ids, **_: " ".join(map(str, ids)))
    pad_id, bos_id, eos_id = (staticmethod(lambda i=i: i) for i in range(3))


def grpo(name: str, of_rollout: Recipe) -> None:
    """Makes one step of a model in ``recipes.rl()`` whose rollout has another recipe, or the same."""

    class Rollout(VanillaRollout):
        def __init__(self, rollout_actor: Llama3, tokenizer: Any, mesh: Mesh, rollout_config: RolloutConfig) -> None:
            own, _ = quantized(rollout_actor, of_rollout)
            # Tunix takes a rollout that starts with the arrays of the actor for the actor, and never updates it.
            nnx.update(own, jax.tree.map(jnp.copy, nnx.state(own)))
            super().__init__(own, tokenizer, CacheConfig(cache_size=rollout_config.kv_cache_size, **HEADS))

    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    training = RLTrainingConfig(actor_optimizer=optax.adam(1e-3), eval_every_n_steps=2, max_steps=1)
    rollout = RolloutConfig(max_tokens_to_generate=16, max_prompt_length=8, kv_cache_size=64, eos_tokens=[2])
    roles = dict.fromkeys((Role.ACTOR, Role.ROLLOUT, Role.REFERENCE), mesh)
    config = ClusterConfig(role_to_mesh=roles, rollout_engine=Rollout, training_config=training, rollout_config=rollout)
    cluster = RLCluster(actor=quantized(model(), recipes.rl())[0], tokenizer=Tokens(), cluster_config=config)
    even = lambda completions, **_: [float(text.count("0 ") + text.count("2 ")) for text in completions]  # noqa: E731
    before = cluster.rollout.model().layers[0].attn.q_proj.w[...]
    GRPOLearner(cluster, GRPOConfig(num_generations=4, beta=0.0), even).train([{"prompts": np.array(["3 4 5", "7 8"])}])
    moved = jnp.abs(cluster.rollout.model().layers[0].attn.q_proj.w[...] - before).max()
    tokens = jnp.arange(3, 63).reshape(3, 20)
    sides = {"prompt_tokens": tokens[:, :4], "completion_tokens": tokens[:, 4:]}
    actor = nnx.split(cluster.actor_trainer.model)
    of_actor = compute_per_token_logps(*actor, **sides, pad_id=0, eos_id=2, return_logits=False)
    apart = jnp.abs(cluster.rollout.get_per_token_logps(**sides) - of_actor).mean()
    print(f"GRPO, rollout in {name}: weights moved by {moved:.4f}, log-probabilities are {apart:.4f} nats apart")


if __name__ == "__main__":
    grpo("inference(weight_only=True)", recipes.inference(weight_only=True))
    grpo("rl()", recipes.rl())

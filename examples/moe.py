"""Trains a small mixture-of-experts transformer in bfloat16 and in NVFP4, and compares the losses.

    pip install ".[examples]"
    python examples/moe.py
    python examples/moe.py --shared --recipe pretrain_no_rht
    python examples/moe.py --expert-parallel 4 --steps 20

The model and its text are those of train_lm.py, but each MLP is eight experts, of which a router in float32 chooses two
for each token. The rows of all experts are one array, sorted by expert, and ``jnvfp4.grouped_linear`` multiplies each
group of rows by the weights of its expert; the number of rows of each expert stays on the device. In the baseline the
same GEMMs are in bfloat16.

``--expert-parallel N`` splits the batch and the experts over N devices (virtual ones on a CPU). Each device sends each
other one a fixed number of rows by a plain ``all_to_all``; what exceeds it is dropped, as the output of an expert that
adds nothing. ``jax.lax.ragged_all_to_all`` would send no padding, but with XLA's latency-hiding scheduler it has given
wrong gradients on GPUs (marin-community/marin issue 8077), so it is not used here.

Expect one to two minutes on two CPU cores. The loss (nats per byte) falls from 5.5 to about 2.1, and the final
validation loss in NVFP4 is within a few percent of that in bfloat16. The losses are printed, and go to metrics.json.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

# JAX reads this when it starts. It concerns CPU devices only, so it changes nothing about accelerators.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from tqdm import tqdm  # type: ignore[import-untyped]

import jnvfp4
from jnvfp4 import Recipe
from lm.config import Config, step_count
from lm.data import stdlib_text, train_batch, val_batches
from lm.model import Linear, Tree, bf16_linear, init_params, loss_fn, mlp, quantized_linear
from lm.recipes import RECIPES
from lm.train import adamw, init_optimizer, learning_rate

EXPERTS_AXIS = "experts"  # of the mesh
CHOSEN = 2  # experts of a token
HIGH_PRECISION = Recipe(None, None, None)


@dataclass(frozen=True)
class Experts:
    """Holds what the layers of experts are.

    Attributes:
      count: number of experts in each layer.
      width: size of the hidden layer of an expert.
      shared: whether one more expert, the MLP of ``lm.model``, sees all tokens.
      balance: weight of the loss that keeps the router from choosing few experts.
      capacity: with expert parallelism, how many rows a device sends to each other device, relative to an even split.
    """

    count: int
    width: int
    shared: bool = False
    balance: float = 0.01
    capacity: float = 1.5


PRESETS = {
    "cpu": (
        Config(
            layers=2,
            width=128,
            heads=4,
            kv_heads=4,
            mlp_width=256,
            seq=64,
            batch=8,
            steps=600,
            peak_lr=3e-3,
            val_batches=16,
        ),
        Experts(count=8, width=256),
    ),
    "gpu": (
        Config(
            layers=12,
            width=768,
            heads=12,
            kv_heads=12,
            mlp_width=1536,
            seq=512,
            batch=32,
            steps=1000,
            peak_lr=1e-3,
            val_batches=16,
        ),
        Experts(count=32, width=1536),
    ),
}


# Weights


def init_moe(key: Array, config: Config, experts: Experts) -> Tree:
    """Draws the weights of ``lm.model.init_params``, with experts in place of each MLP, or beside a shared one."""
    params = init_params(key, config)
    layers, n, d = params["layers"], config.layers, config.width
    router, up, down = jax.random.split(jax.random.fold_in(key, 7), 3)
    if not experts.shared:
        del layers["mlp_up"], layers["mlp_down"]
    layers["router"] = d**-0.5 * jax.random.normal(router, (n, experts.count, d))
    layers["experts_up"] = d**-0.5 * jax.random.normal(up, (n, experts.count, experts.width, d))
    std = (2 * n * experts.width) ** -0.5
    layers["experts_down"] = std * jax.random.normal(down, (n, experts.count, d, experts.width))
    return params


def shardings_of(params: Tree) -> Tree:
    """Returns how the weights are split: those of experts over devices, all others on every device."""
    return jax.tree.map_with_path(
        lambda path, _: P(None, EXPERTS_AXIS) if path[-1].key.startswith("experts_") else P(), params
    )


# The layer of experts


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def with_loss(y: Array, loss: Array, weight: float) -> Array:
    """Returns y; the gradient is that of a training loss to which ``weight * loss`` is added."""
    return y


with_loss.defvjp(lambda y, loss, weight: (y, loss), lambda weight, loss, dy: (dy, 0 * loss + weight))


def route(x: Array, router: Array) -> tuple[Array, Array, Array]:
    """Chooses two experts for each of x [tokens, width], in float32.

    Returns:
      their numbers [tokens, 2], their weights, which sum to 1, and the loss of an uneven choice (1 if it is even).
    """
    share = jax.nn.softmax(jnp.dot(x.astype(jnp.float32), router.T, precision="highest"))
    weights, chosen = lax.top_k(share, CHOSEN)
    chosen_share = jnp.zeros(router.shape[0]).at[chosen.ravel()].add(1.0) / chosen.size
    loss = router.shape[0] * jnp.sum(chosen_share * share.mean(axis=0))
    return chosen, weights / weights.sum(axis=-1, keepdims=True), loss


def places(group: Array, groups: int) -> tuple[Array, Array]:
    """Finds a row for each item in an array that is sorted by group.

    Args:
      group: int32 [items], the group of each; ``groups`` for an item that is left out.
      groups: how many there are.

    Returns:
      the row of each item, int32 [items], beyond all rows of groups if it is left out, and the rows of each group.
    """
    order = jnp.argsort(group, stable=True)
    rank = jnp.zeros_like(group).at[order].set(jnp.arange(group.size, dtype=jnp.int32))
    return rank, jnp.zeros(groups, jnp.int32).at[group].add(1, mode="drop")


def run_experts(x: Array, expert: Array, layer: Tree, recipe: Recipe, key: Array) -> Array:
    """Computes the expert of each row of x [rows, width]; zero for a row whose expert is none."""
    row, sizes = places(expert, layer["experts_up"].shape[0])
    keys = jax.random.split(key)
    grouped = partial(jnvfp4.grouped_linear, group_sizes=sizes, recipe=recipe)
    x = jnp.zeros_like(x).at[row].set(x, unique_indices=True)
    hidden = jax.nn.gelu(grouped(x, layer["experts_up"], key=keys[0]))
    return grouped(hidden, layer["experts_down"], key=keys[1])[row]


def send_to_experts(
    x: Array, expert: Array, layer: Tree, recipe: Recipe, key: Array, devices: int, capacity: float
) -> Array:
    """Computes what ``run_experts`` does, where each device has some of the experts.

    Every device sends ``capacity`` times an even share of its rows to every device, by a plain all_to_all whose size is
    known when the program is compiled. Rows beyond that are dropped: their experts add nothing.
    """
    own = layer["experts_up"].shape[0]
    room = min(x.shape[0], int(np.ceil(capacity * x.shape[0] / devices)))
    place, sizes = places(expert // own, devices)
    within = place - (jnp.cumsum(sizes) - sizes)[expert // own]
    slot = jnp.where(within < room, expert // own * room + within, devices * room)
    exchange = partial(lax.all_to_all, axis_name=EXPERTS_AXIS, split_axis=0, concat_axis=0, tiled=True)
    sent = jnp.zeros((devices * room, x.shape[1]), x.dtype).at[slot].set(x, mode="drop")
    numbers = jnp.full(devices * room, own, jnp.int32).at[slot].set(expert % own, mode="drop")
    y = run_experts(exchange(sent), exchange(numbers), layer, recipe, key)
    return exchange(y).at[slot].get(mode="fill", fill_value=0)


def moe(experts: Experts, recipe: Recipe, devices: int) -> Callable:
    """Returns what takes the place of the MLP in each block."""

    def feed_forward(x: Array, layer: Tree, config: Config, linear: Linear, keys: Array) -> Array:
        tokens = x.reshape(-1, config.width)
        chosen, weights, loss = route(tokens, layer["router"])
        rows = jnp.repeat(tokens, CHOSEN, axis=0)
        run = partial(send_to_experts, devices=devices, capacity=experts.capacity) if devices > 1 else run_experts
        y = run(rows, chosen.ravel(), layer, recipe, keys[1]).reshape(-1, CHOSEN, config.width)
        y = jnp.einsum("tcd,tc->td", y.astype(jnp.float32), weights).astype(x.dtype)
        y = with_loss(y, loss, experts.balance / devices).reshape(x.shape)
        return y + mlp(x, layer, config, linear, jax.random.split(keys[0])) if experts.shared else y

    return feed_forward


# Training

Loss = Callable[[Tree, Array, Array], Array]  # weights, batch, key


def make_loss(
    config: Config, experts: Experts, recipe: Recipe, mesh: Mesh | None
) -> Callable[[Tree, Array, Array], Array]:
    """Returns the loss of weights and a batch with a key; over a mesh each device has a part of the batch."""
    linear = bf16_linear if recipe is HIGH_PRECISION else quantized_linear(recipe)
    devices = 1 if mesh is None else mesh.size
    loss = partial(loss_fn, config=config, linear=linear, feed_forward=moe(experts, recipe, devices))
    if mesh is None:
        return lambda params, batch, key: loss(params, batch, key=key)

    def local(params: Tree, batch: Array, key: Array) -> Array:
        key = jax.random.fold_in(key, lax.axis_index(EXPERTS_AXIS))  # each device rounds with other random bits
        return lax.pmean(loss(params, batch, key=key), EXPERTS_AXIS)

    def sharded(params: Tree, batch: Array, key: Array) -> Array:
        specs = (shardings_of(params), P(EXPERTS_AXIS), P())
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())(params, batch, key)

    return sharded


def train(
    name: str, recipe: Recipe, config: Config, experts: Experts, seed: int, mesh: Mesh | None, text: Any, held_out: Any
) -> dict[str, Any]:
    """Trains one model; returns its losses and times."""
    loss = make_loss(config, experts, recipe, mesh)

    @partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params: Tree, state: Tree, batch: Array) -> tuple[Tree, Tree, Array]:
        key = jax.random.fold_in(jax.random.key(seed), state["step"])  # every step rounds with other random bits
        value, grads = jax.value_and_grad(loss)(params, batch, key)
        params, state = adamw(params, grads, state, learning_rate(state["step"], config))
        return params, state, value

    params = init_moe(jax.random.key(seed), config, experts)
    if mesh is not None:
        split = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), shardings_of(params))
        params = jax.device_put(params, split)
    state = init_optimizer(params)
    begin, losses = time.perf_counter(), []
    for step in tqdm(range(1, config.steps + 1), desc=name, unit="step", mininterval=0.5):
        batch = jnp.asarray(train_batch(text, config, seed, step))
        params, state, value = train_step(params, state, batch)
        losses.append(value)
    val_loss, key = jax.jit(loss), jax.random.key(seed)
    final = float(np.mean([val_loss(params, jnp.asarray(batch), key) for batch in held_out]))
    losses = [float(value) for value in jax.device_get(losses)]
    return {"train": losses, "val": final, "seconds": time.perf_counter() - begin}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a mixture of experts in bfloat16 and in NVFP4.")
    backend = "cpu" if jax.default_backend() == "cpu" else "gpu"
    parser.add_argument("--preset", choices=PRESETS, default=backend, help="sizes (default: %(default)s)")
    recipes = [name for name in RECIPES if name not in ("window64", "weight_only", "inference")]
    parser.add_argument("--recipe", choices=recipes, default="pretrain", help="(default: %(default)s)")
    parser.add_argument("--shared", action="store_true", help="one more expert, which sees all tokens")
    parser.add_argument("--expert-parallel", type=int, default=1, metavar="N", help="devices (default: %(default)s)")
    parser.add_argument("--steps", type=step_count, help="training steps, if not the preset's")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the batches and the random rounding")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for metrics.json")
    args = parser.parse_args()
    config, experts = PRESETS[args.preset]
    n = args.expert_parallel
    if n < 1 or n > len(jax.devices()) or config.batch % n or experts.count % n:
        parser.error(
            f"--expert-parallel must divide {config.batch} sequences and {experts.count} experts, and be at most "
            f"{len(jax.devices())} devices, got {n}"
        )
    return args


def main() -> None:
    args = parse_args()
    config, experts = PRESETS[args.preset]
    config = replace(config, steps=args.steps or config.steps)
    experts = replace(experts, shared=args.shared)
    mesh = None
    if args.expert_parallel > 1:
        devices = jax.devices()[: args.expert_parallel]
        mesh = jax.make_mesh((len(devices),), (EXPERTS_AXIS,), axis_types=(AxisType.Auto,), devices=devices)
    text, val_text = stdlib_text()
    held_out = val_batches(val_text, config)
    print(f"{args.preset} preset: {config}, {experts}, {args.expert_parallel} device(s)")
    runs = {}
    for name, recipe in (("bf16", HIGH_PRECISION), (args.recipe, RECIPES[args.recipe]())):
        runs[name] = train(name, recipe, config, experts, args.seed, mesh, text, held_out)
    print(f"\n{'final loss':16}{'training':>10}{'validation':>12}{'gap':>9}{'seconds':>9}")
    for name, run in runs.items():
        gap = 100 * (run["val"] / runs["bf16"]["val"] - 1)
        print(f"{name:16}{run['train'][-1]:10.4f}{run['val']:12.4f}{gap:+8.2f}%{run['seconds']:9.1f}")
    args.out.mkdir(parents=True, exist_ok=True)
    metrics = {"config": asdict(config), "experts": asdict(experts), "devices": args.expert_parallel, "runs": runs}
    (args.out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    print(f"\nwrote {args.out}/metrics.json")


if __name__ == "__main__":
    main()

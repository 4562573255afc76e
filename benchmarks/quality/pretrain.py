"""Pretraining runs that differ in their arm alone, in pieces: each can be stopped, resumed and continued another way.

A checkpoint is written where a run ends or is stopped, and where another run branches off.

Runs with one seed start from the same weights and see the same batches: they are pairs.
"""

import time
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm import tqdm  # type: ignore[import-untyped]

from jnvfp4 import NVFP4, NVFP4_RHT, NVFP4_RHT_SR, NVFP4_SR, QuantSpec, Recipe, recipes
from jnvfp4.spec import four_over_six
from lm.config import Config
from lm.data import val_batches
from lm.model import Linear, Tree, bf16_forward, init_params, loss_fn, quantized_linear, trained_bf16_linear
from lm.train import DECAY, adamw, init_optimizer, learning_rate

from .corpus import Corpus
from .methods import Method, eden, hot_channels, reset_oscillating, searched_x, two_tensors, watched, without_mean

VALIDATIONS = 10  # of a run
POINTS = 50  # of a training curve


# Arms: what is compared


@dataclass(frozen=True)
class Arm:
    """Says how the linear layers of the blocks multiply, and how weights are updated.

    Attributes:
      recipe: of the quantized blocks; None for bfloat16.
      ends_bf16: whether the first and the last block are bfloat16.
      branch_of: name of the arm whose run this one continues.
      branch: after which part of the steps; 1 to validate what that arm trained.
      seeds: how many runs it should have.
      method: what the recipe's layers do instead of what ``jnvfp4.linear`` does.
      resets: the spec by which oscillating weights are found and quantized; None leaves them.
      decay: of weights, times the learning rate.
      cooldown: the last part of the steps, in which the learning rate falls; None for the cosine of ``lm.train``.
    """

    recipe: Recipe | None
    ends_bf16: bool = False
    branch_of: str = ""
    branch: float = 0.9
    seeds: int = 4
    method: Method | None = None
    resets: QuantSpec | None = None
    decay: float = DECAY
    cooldown: float | None = None

    def linears(self, layers: int) -> list[Linear]:
        """Returns the product of each block."""
        bf16: Linear = trained_bf16_linear
        if self.recipe is None:
            quantized = bf16
        elif self.method is not None:
            quantized = self.method(self.recipe)
        else:
            quantized = quantized_linear(self.recipe) if self.recipe.fprop else bf16_forward(self.recipe)
        found = [quantized] * layers
        return [bf16, *found[1:-1], bf16] if self.ends_bf16 else found

    def begin(self, config: Config) -> int:
        """Returns the step after which a branch begins."""
        return int(self.branch * config.steps)

    def learning_rate(self, step: Array, config: Config) -> Array:
        """Returns a step's: by the cosine, or constant after the rise, then falling linearly to zero."""
        if self.cooldown is None:
            return learning_rate(step, config)
        rise, fall = max(1, config.steps // 10), self.cooldown * config.steps
        return config.peak_lr * jnp.minimum(jnp.minimum((step + 1) / rise, (config.steps - step) / fall), 1)


FOUR_OVER_SIX, ROW_FOUR_OVER_SIX, SEARCH = four_over_six(), four_over_six(amax_scope="row"), QuantSpec(select="search")
MSE_448, ROW_MSE_448 = four_over_six("mse", e4m3_max=448), four_over_six("mse", e4m3_max=448, amax_scope="row")
PRETRAIN_4OVER6 = recipes.pretrain_4over6()
REQUANTIZED = recipes.pretrain_4over6(requantize=True)
SEARCHED_W = replace(PRETRAIN_4OVER6, fprop=recipes.Fprop(FOUR_OVER_SIX, SEARCH))
ENDING = replace(PRETRAIN_4OVER6, fprop=recipes.Fprop(None, FOUR_OVER_SIX))
BASELINE = "bf16"
ARMS = {
    BASELINE: Arm(None),
    "plain": Arm(Recipe()),
    "pretrain": Arm(recipes.pretrain()),
    "pretrain_unbiased": Arm(recipes.pretrain(unbiased=True)),
    "pretrain_4over6": Arm(PRETRAIN_4OVER6),
    "4over6_ends_bf16": Arm(PRETRAIN_4OVER6, ends_bf16=True),
    "4over6_ends_bf16_ending": Arm(replace(PRETRAIN_4OVER6, fprop=None), ends_bf16=True, branch_of="4over6_ends_bf16"),
    "rl": Arm(recipes.rl()),
    "backward_only": Arm(replace(recipes.pretrain(), fprop=None)),
    "pretrain_no_rht": Arm(recipes.pretrain(rht=False), seeds=3),
    "pretrain_no_sr": Arm(recipes.pretrain(stochastic_rounding=False)),
    "row_scaled": Arm(recipes.row_scaled(), seeds=1),
    "pretrain_ends_bf16": Arm(recipes.pretrain(), ends_bf16=True),
    "resets": Arm(PRETRAIN_4OVER6, seeds=3, resets=FOUR_OVER_SIX),
    "search_x": Arm(PRETRAIN_4OVER6, seeds=3, method=searched_x),
    "search_w": Arm(SEARCHED_W, seeds=3),
    "search_both": Arm(SEARCHED_W, seeds=3, method=searched_x),
    "row_x_search_w": Arm(replace(PRETRAIN_4OVER6, fprop=recipes.Fprop(ROW_FOUR_OVER_SIX, SEARCH)), seeds=3),
    "hot_16": Arm(PRETRAIN_4OVER6, seeds=3, method=hot_channels(16)),
    "hot_64": Arm(PRETRAIN_4OVER6, seeds=3, method=hot_channels(64)),
    "bf16_decay": Arm(None, decay=0.3),
    "4over6_decay": Arm(PRETRAIN_4OVER6, seeds=3, decay=0.3),
    "requantized_decay": Arm(REQUANTIZED, decay=0.3),
    "bf16_decay_1": Arm(None, decay=1.0),
    "requantized_decay_1": Arm(REQUANTIZED, decay=1.0),
    "bf16_cooldown": Arm(None, seeds=3, cooldown=0.4),
    "requantized_cooldown": Arm(REQUANTIZED, seeds=3, cooldown=0.4),
    "requantized": Arm(REQUANTIZED, seeds=3),
    "requantized_ending": Arm(replace(ENDING, requantize=True), branch_of="requantized", seeds=3),
    "requantized_squares": Arm(replace(REQUANTIZED, fprop=recipes.Fprop(ROW_MSE_448, MSE_448)), seeds=3),
    "requantized_no_sr": Arm(recipes.pretrain_4over6(stochastic_rounding=False, requantize=True), seeds=3),
    "requantized_rotated": Arm(replace(REQUANTIZED, dgrad=recipes.Dgrad(NVFP4_RHT_SR, NVFP4_RHT)), seeds=3),
    "requantized_no_tiles": Arm(replace(REQUANTIZED, dgrad=recipes.Dgrad(NVFP4_SR, NVFP4)), seeds=3),
    "requantized_ends_bf16": Arm(REQUANTIZED, ends_bf16=True, seeds=3),
    "requantized_ends_bf16_ending": Arm(
        replace(REQUANTIZED, fprop=None), ends_bf16=True, branch_of="requantized_ends_bf16", seeds=3
    ),
    "eden": Arm(PRETRAIN_4OVER6, seeds=3, method=eden()),
    "eden_16": Arm(PRETRAIN_4OVER6, seeds=3, method=eden(16)),
    "mean_of_batch": Arm(PRETRAIN_4OVER6, seeds=3, method=without_mean((0, 1))),
    "mean_of_sequence": Arm(PRETRAIN_4OVER6, seeds=3, method=without_mean((1,))),
    "hot_64_ends_bf16": Arm(PRETRAIN_4OVER6, ends_bf16=True, seeds=3, method=hot_channels(64)),
    "w4a16_ending": Arm(ENDING, branch_of="pretrain_4over6", seeds=3),
    "pretrain_4over6_as_w4a16": Arm(ENDING, branch_of="pretrain_4over6", branch=1.0, seeds=3),
    "requantized_as_w4a16": Arm(ENDING, branch_of="requantized", branch=1.0, seeds=3),
    "requantized_decay_as_w4a16": Arm(ENDING, branch_of="requantized_decay", branch=1.0),
    "requantized_decay_1_as_w4a16": Arm(ENDING, branch_of="requantized_decay_1", branch=1.0),
    "requantized_ends_bf16_as_bf16": Arm(None, branch_of="requantized_ends_bf16", branch=1.0, seeds=3),
    "two_tensors_ending": Arm(PRETRAIN_4OVER6, branch_of="pretrain_4over6", seeds=3, method=two_tensors),
}


# One run


@dataclass
class Run:
    """Holds what a run showed.

    Attributes:
      arm: its name.
      seed: of the weights, the batches and the random rounding.
      steps: at which the training loss was logged.
      train: mean loss since the step logged before, nats per token.
      val_steps: at which the validation loss was measured.
      val: the validation loss, nats per token.
      seconds: that this part of the training took, without compiling and validation.
      timed_steps: number of steps in ``seconds``.
    """

    arm: str
    seed: int
    steps: list[int] = field(default_factory=list)
    train: list[float] = field(default_factory=list)
    val_steps: list[int] = field(default_factory=list)
    val: list[float] = field(default_factory=list)
    seconds: float = 0.0
    timed_steps: int = 0

    def is_done(self, config: Config) -> bool:
        return bool(self.val_steps) and self.val_steps[-1] == config.steps


class Trainer:
    """Runs arms on one corpus: compiles each once for all seeds, and keeps checkpoints.

    Args:
      config: sizes of the model and of its training.
      text: the tokens.
      folder: where the checkpoints are kept.
      deadline: the time, as of ``time.monotonic()``, at which a run writes a checkpoint and stops; None for never.
    """

    def __init__(self, config: Config, text: Corpus, folder: Path, deadline: float | None = None):
        self.config, self.folder, self.deadline = config, folder.resolve(), deadline
        self.sha256 = text.source.sha256
        self.tokens = jnp.asarray(text.train)
        self.held_out = jnp.asarray(val_batches(text.val, config))
        self.compiled = cache(self._compiled)

    def _compiled(self, name: str) -> tuple[Any, Any]:
        """Returns the compiled step and validation of an arm."""
        config, arm = self.config, ARMS[name]
        linears = arm.linears(config.layers)

        @partial(jax.jit, donate_argnums=(0, 1))
        def step(params: Tree, state: Tree, tokens: Array, key: Array) -> tuple[Tree, Tree, Array]:
            batches, rounding = jax.random.split(jax.random.fold_in(key, state["step"]))
            starts = jax.random.randint(batches, (config.batch,), 0, len(tokens) - config.seq)
            batch = tokens[starts[:, None] + jnp.arange(config.seq + 1)]
            loss, grads = jax.value_and_grad(loss_fn)(params, batch, config, linears, rounding)
            before, watch = params, state.get("watched")
            params, state = adamw(params, grads, state, arm.learning_rate(state["step"], config), arm.decay)
            if arm.resets is not None:
                params, watch = reset_oscillating(before, params, watch, state["step"], config, arm.resets)
                state |= {"watched": watch}
            return params, state, loss

        @jax.jit
        def validate(params: Tree, batches: Array) -> Array:
            losses = jax.lax.map(lambda batch: loss_fn(params, batch, config, linears, jax.random.key(0)), batches)
            return jnp.mean(losses)

        params, state = initial(0, config, arm)
        key = jax.random.key(0)
        return (
            step.lower(params, state, self.tokens, key).compile(),
            validate.lower(params, self.held_out).compile(),
        )

    def run(self, name: str, seed: int) -> Run:
        """Trains until the end or the deadline, from the latest checkpoint if there is one."""
        found = self._restored(name, seed) or self._branched(name, seed)
        run, params, state = found or (Run(name, seed), *initial(seed, self.config, ARMS[name]))
        if run.is_done(self.config):
            return run
        step, validate = self.compiled(name)
        key = jax.random.key(1000 + seed)
        begin = timed_from = int(state["step"])
        recent: list[Array] = []
        branches = {arm.begin(self.config) for arm in ARMS.values() if arm.branch_of == name}
        started = time.monotonic()
        for i in tqdm(range(begin + 1, self.config.steps + 1), f"{name}, seed {seed}", mininterval=5):
            params, state, loss = step(params, state, self.tokens, key)
            recent.append(loss)
            last = i == self.config.steps
            late = self.deadline is not None and time.monotonic() > self.deadline
            validates = i % max(1, self.config.steps // VALIDATIONS) == 0 or last
            saves = last or late or i in branches
            if i % max(1, self.config.steps // POINTS) == 0 or validates or saves:
                run.steps.append(i)
                run.train.append(float(np.mean(jax.device_get(recent))))  # waits for the steps
                recent.clear()
                run.seconds += time.monotonic() - started
                run.timed_steps += i - timed_from
                if validates:
                    run.val_steps.append(i)
                    run.val.append(float(validate(params, self.held_out)))
                if saves:
                    self._save(run, params, state, i)
                timed_from, started = i, time.monotonic()
            if late:
                break
        if begin == self.config.steps:  # a branch that only validates
            run.val_steps.append(begin)
            run.val.append(float(validate(params, self.held_out)))
        return run

    # Checkpoints

    def path(self, name: str, seed: int) -> Path:
        """Returns the folder of a run's checkpoints."""
        return self.folder / name / f"seed{seed}"

    def _shared(self) -> dict[str, Any]:
        """Returns what runs must have in common to be continued or compared."""
        return {"config": asdict(self.config), "sha256": self.sha256}

    def _save(self, run: Run, params: Tree, state: Tree, step: int) -> None:
        import orbax.checkpoint as ocp

        tree, shown = {"params": params, "state": state}, {"run": asdict(run), **self._shared()}
        with ocp.CheckpointManager(self.path(run.arm, run.seed)) as manager:
            manager.save(step, args=ocp.args.Composite(tree=ocp.args.StandardSave(tree), run=ocp.args.JsonSave(shown)))

    def _restored(self, name: str, seed: int, step: int | None = None) -> tuple[Run, Tree, Tree] | None:
        """Reads the checkpoint after a step, by default the latest one; None where there is none."""
        found = read_checkpoint(self.path(name, seed), step, self._shared())
        return found and (found.run, found.params, found.state)

    def _branched(self, name: str, seed: int) -> tuple[Run, Tree, Tree] | None:
        """Returns where a branch begins; None for what is no branch.

        Raises:
          ValueError: the run that it branches from has not come to that step.
        """
        trunk = ARMS[name].branch_of
        if not trunk:
            return None
        step = ARMS[name].begin(self.config)
        found = self._restored(trunk, seed, step)
        if found is None:
            raise ValueError(
                f"{name} continues {trunk}: train that with seed {seed} first, in the same folder, or in another if "
                f"it ended before there was {name}; {self.path(trunk, seed)} has no checkpoint after step {step}"
            )
        run, params, state = found
        before = sum(i < self.config.steps for i in run.val_steps)  # the last one is its own
        run = replace(run, arm=name, val_steps=run.val_steps[:before], val=run.val[:before])
        return replace(run, seconds=0.0, timed_steps=0), params, state


def initial(seed: int, config: Config, arm: Arm) -> tuple[Tree, Tree]:
    """Returns the weights and the optimizer state of a run before its first step."""
    params = init_params(jax.random.key(seed), config)
    return params, init_optimizer(params) | ({} if arm.resets is None else {"watched": watched(params)})


class Checkpoint(NamedTuple):
    """Holds a run as it was after a step: sizes, hash of its text, losses, weights and optimizer state."""

    config: Config
    sha256: str
    run: Run
    params: Tree
    state: Tree


def read_checkpoint(folder: Path, step: int | None = None, wanted: dict[str, Any] | None = None) -> Checkpoint | None:
    """Reads a checkpoint of a run.

    Args:
      folder: of the run.
      step: after which it was written; None for the latest one.
      wanted: what it must have; None for anything.

    Returns:
      the checkpoint, or None where there is none.

    Raises:
      ValueError: it has not what it must have.
    """
    import orbax.checkpoint as ocp

    if not folder.is_dir():
        return None
    with ocp.CheckpointManager(folder.resolve()) as manager:
        step = manager.latest_step() if step is None else step
        if step not in manager.all_steps():
            return None
        shown = manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore())).run
        for what, value in (wanted or {}).items():
            if shown[what] != value:
                raise ValueError(f"{folder} has a run of another {what}: {shown[what]}, not {value}")
        config, arm = Config(**shown["config"]), ARMS[shown["run"]["arm"]]
        params, state = jax.eval_shape(lambda: initial(0, config, arm))
        like = ocp.args.StandardRestore({"params": params, "state": state})
        tree = manager.restore(step, args=ocp.args.Composite(tree=like)).tree
    return Checkpoint(config, shown["sha256"], Run(**shown["run"]), tree["params"], tree["state"])


def read_finished(folder: Path) -> Checkpoint:
    """Reads the last checkpoint of a finished run.

    Raises:
      ValueError: there is none.
    """
    found = read_checkpoint(folder)
    if found is None or not found.run.is_done(found.config):
        steps = "no checkpoint" if found is None else f"{int(found.state['step'])} of {found.config.steps} steps"
        raise ValueError(f"{folder} must have a finished run, got {steps}")
    return found


# Pairs


@dataclass(frozen=True)
class Gap:
    """Holds by how many percent a validation loss lies above another: mean over pairs, and its standard error."""

    mean: float
    error: float | None  # None for one pair
    pairs: int

    def __str__(self) -> str:
        spread = "one seed" if self.error is None else f"± {self.error:.2f}"
        return f"{round(self.mean, 2) + 0.0:+.2f} {spread}"  # without the sign of -0.00


def gap(losses: dict[int, float], others: dict[int, float]) -> Gap | None:
    """Compares the final losses by seed with those of another arm, over the seeds that both have."""
    seeds = sorted(losses.keys() & others.keys())
    if not seeds:
        return None
    percent = [100 * (losses[seed] / others[seed] - 1) for seed in seeds]
    error = float(np.std(percent, ddof=1) / len(seeds) ** 0.5) if len(seeds) > 1 else None
    return Gap(float(np.mean(percent)), error, len(seeds))


def block_weights(params: Tree) -> int:
    """Counts the weights of the linear layers of the blocks: N of D/N."""
    return sum(w.size for name, w in params["layers"].items() if "norm" not in name)

"""Trains MaxText's Llama and Mixtral, small and with random weights, by its own trainer in NVFP4 beside bfloat16.

    pip install ".[qwix]" maxtext  # and what it imports: docs/models.md
    python examples/existing_models/maxtext_trainer.py

Prints what is quantized and the losses. MaxText's synthetic data are one batch, which the model learns by heart.
"""

import argparse
import json
import pathlib
import tempfile
from typing import Any

import jax
import maxtext
from maxtext.layers import quantizations
from maxtext.trainers.pre_train import train

import jnvfp4
from jnvfp4 import Policy, Rule, recipes

BASE = pathlib.Path(maxtext.__path__[0]) / "configs" / "base.yml"
OPTIONS = {
    "skip_jax_distributed_system": True,
    "hardware": "cpu",
    "attention": "dot_product",
    "dataset_type": "synthetic",
    "enable_checkpointing": False,
    "enable_goodput_recording": False,
    "monitor_goodput": False,
    "log_config": False,
    "per_device_batch_size": 8,
    "max_target_length": 32,
    "vocab_size": 128,
    "base_emb_dim": 128,
    "base_mlp_dim": 256,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 32,
    "base_num_decoder_layers": 3,
    "learning_rate": 1e-3,
    "warmup_steps_fraction": 0.1,
    "scan_layers": False,  # for last_bf16, and for the random bits of pretrain()
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "base_moe_mlp_dim": 256,
    "megablox": False,  # a kernel for TPUs; without it experts are jax.lax.ragged_dot
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"decoder_block": "llama2"},
    "mixture of experts": {"decoder_block": "mixtral", **EXPERTS},
}


def quantize_maxtext(policy: Policy) -> jnvfp4.qwix.Provider:
    """Makes MaxText quantize by the policy where its options have use_qwix_quantization. Its users add these lines."""
    provider = jnvfp4.qwix.Provider(policy)
    quantizations.get_qt_provider = lambda config: provider
    plain = train.train_step

    def with_key(model: Any, config: Any, shardings: Any, of_params: Any, state: Any, *data: Any) -> Any:
        step = state["optimizer"]["step"][...]
        with jnvfp4.step_key(jax.random.fold_in(jax.random.key(0), step)):
            return plain(model, config, shardings, of_params, state, *data)

    train.train_step = with_key
    return provider


def losses(**options: Any) -> list[float]:
    """Runs MaxText's trainer and returns the loss of each step."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = pathlib.Path(folder) / "metrics.jsonl"
        options |= {"run_name": "tiny", "base_output_directory": folder, "metrics_file": str(metrics)}
        train.main(["", str(BASE), *(f"{name}={value}" for name, value in (OPTIONS | options).items())])
        return [json.loads(line)["learning/loss"] for line in metrics.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    steps, plain = parser.parse_args().steps, train.train_step
    for name, options in MODELS.items():
        bf16 = losses(steps=steps, **options)
        rules = [Rule("decoder/.*layers.*", recipes.pretrain())]
        if "num_experts" in options:
            rules.insert(0, Rule(".*/gate", None))  # the router
        provider = quantize_maxtext(Policy(rules, last_bf16=1))
        nvfp4 = losses(steps=steps, quantization="int8", use_qwix_quantization=True, **options)
        train.train_step = plain
        print(provider.explain())
        for kind, curve in (("bfloat16", bf16), ("pretrain()", nvfp4)):
            print(f"{name}, {kind}: loss {curve[0]:.3f} -> {curve[-1]:.3f} in {len(curve)} steps")


if __name__ == "__main__":
    main()

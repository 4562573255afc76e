"""Reads checkpoints with compressed-tensors and transformers, for test_checkpoints_peers.py. Runs without JAX.

python peers.py decompress DIR OUT    weights as compressed-tensors decodes them
python peers.py modelopt DIR OUT      layout modelopt to compressed-tensors, by the converter of compressed-tensors
python peers.py model DIR DECODED     DIR in transformers, against a checkpoint of its decoded weights; JSON
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in sorted(directory.glob("*.safetensors")) for name, t in load_file(path).items()}


def decompress(directory: Path, out: Path) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    tensors, decoded = tensors_of(directory), {}
    for scheme in QuantizationConfig.model_validate(config).config_groups.values():
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        suffix = ".weight" if scheme.format == "float-quantized" else ".weight_packed"
        coded = (n for n, t in tensors.items() if suffix == ".weight_packed" or t.dtype == torch.float8_e4m3fn)
        for module in [n.removesuffix(suffix) for n in coded if n.endswith(suffix)]:
            names = {n.rpartition(".")[2]: n for n in tensors if n.startswith(f"{module}.")}
            state = {p: tensors[names[p]] for p in compressor.compression_param_names(scheme) if p in names}
            # [1], as in their modules. Their converter leaves [], which torch divides bfloat16 by in bfloat16.
            if "weight_global_scale" in state:
                state["weight_global_scale"] = state["weight_global_scale"].reshape(1)
            decoded[f"{module}.weight"] = compressor.decompress(state, scheme)["weight"].to(torch.bfloat16).contiguous()
    out.mkdir()
    save_file(decoded, out / "model.safetensors")


def modelopt(directory: Path, out: Path) -> None:
    from compressed_tensors.entrypoints.convert import ModelOptNvfp4Converter, convert_checkpoint

    ignore = json.loads((directory / "hf_quant_config.json").read_text())["quantization"]["exclude_modules"]
    converter = ModelOptNvfp4Converter(ignore=ignore, targets=["re:.*_proj$"])
    convert_checkpoint(directory, out, converter, max_workers=1, device="cpu")


def model(directory: Path, decoded: Path) -> None:
    from transformers import AutoModelForCausalLM

    def load(path: Path):
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, output_loading_info=True)

    (theirs, info), (ours, info_of_ours) = load(directory), load(decoded)
    assert not info_of_ours["missing_keys"], info_of_ours
    tokens = torch.randint(theirs.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        a, b = theirs(tokens).logits, ours(tokens).logits
    weights, want = dict(theirs.named_parameters()), dict(ours.named_parameters())
    found = {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "mismatched": sorted(info["mismatched_keys"]),
        "weights": len(want),
        "different weights": [n for n, w in want.items() if not torch.equal(weights[n], w)],
        "logits": b.numel(),
        "different logits": int((a != b).sum()),
        "largest logit": float(b.abs().max()),
        "largest difference": float((a - b).abs().max()),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    command, *paths = sys.argv[1:]
    {"decompress": decompress, "modelopt": modelopt, "model": model}[command](*map(Path, paths))

"""Converted checkpoints read by other people's software: compressed-tensors and transformers, on a CPU.

The maps of vLLM and SGLang are read from their sources, where PYTHONPATH or the environment has them.

    pip install torch==2.13.0 compressed-tensors==0.20.0 "transformers>=5"

They need not be where JAX is: JNVFP4_PEERS_PYTHON names a Python that has them. Model families are compared with
those of transformers 4, where it and torch are installed beside JAX.
"""

import ast
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import EXPERTS, FAMILIES, KV, WIDE, H
from test_checkpoints_mixed import mixed

import jnvfp4
from jnvfp4.checkpoints import CheckpointError, ConvertOptions, convert_checkpoint, verify_checkpoint
from jnvfp4.checkpoints._files.source import Source, open_source
from jnvfp4.checkpoints._layouts.layouts import COMPRESSED_TENSORS, MODELOPT
from jnvfp4.checkpoints._layouts.names import FUSED, groups_of
from jnvfp4.checkpoints._layouts.stored import Stored, open_stored
from jnvfp4.checkpoints.rewrite import dequantize_checkpoint
from jnvfp4.checkpoints.verify import compare_with_peer

GOLDEN = Path(__file__).parent / "data" / "checkpoints"
ELEMENTS = {"llama": 688_128, "moe": 147_456}  # of quantized weights
MODELS = tuple(ELEMENTS)
PYTHON = os.environ.get("JNVFP4_PEERS_PYTHON", sys.executable)
PEER = Path(__file__).parent / "peers.py"


def peer(*arguments: object, needs: tuple[str, ...]) -> str:
    """What peers.py prints, in a process of its own."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([PYTHON, *command], env=environment, capture_output=True, text=True, timeout=300)

    find = "import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, sys.argv[1:])))"
    if run("-c", find, *needs).returncode:
        pytest.skip(f"needs {', '.join(needs)}")
    done = run(str(PEER), *map(str, arguments))
    assert done.returncode == 0, done.stderr
    return done.stdout


def ulps(stored: Stored, decoded: Source) -> np.ndarray:
    """How far apart the weights are in bfloat16, in units of the last place."""
    assert sorted(decoded.places) == sorted(f"{m}.weight" for m in stored.modules)
    out = []
    for module in stored.modules:
        got, want = decoded.array(f"{module}.weight"), stored.weight(module).values().astype(ml_dtypes.bfloat16)
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        out.append(np.abs(got.view(np.int16).astype(int) - want.view(np.int16)).reshape(-1))
    return np.concatenate(out)


OPTIONS = {
    "nvfp4": ConvertOptions(layout="compressed-tensors"),
    "weight only": ConvertOptions(layout="compressed-tensors", weight_only=True),
    "4over6 448": ConvertOptions(layout="compressed-tensors", spec=jnvfp4.spec.four_over_six(e4m3_max=448)),
}


@pytest.mark.long
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("model", MODELS)
def test_compressed_tensors_decodes_the_same(tmp_path, model, options):
    convert_checkpoint(GOLDEN / model / "input", tmp_path / "out", options)
    peer("decompress", tmp_path / "out", tmp_path / "decoded", needs=("torch", "compressed_tensors"))
    found = ulps(open_stored(tmp_path / "out"), open_source(tmp_path / "decoded"))
    assert (found.size, int(found.sum())) == (ELEMENTS[model], 0)


@pytest.mark.long
@pytest.mark.parametrize("stored", ["llama/ct_f32stats", "llama/ct_nativestats", "moe/ct_f32stats"])
def test_what_they_have_written_is_read_alike(tmp_path, stored):
    peer("decompress", GOLDEN / stored, tmp_path / "decoded", needs=("torch", "compressed_tensors"))
    apart = ulps(open_stored(GOLDEN / stored), open_source(tmp_path / "decoded"))
    assert apart.size == ELEMENTS[stored.partition("/")[0]]
    assert not apart.any()


@pytest.mark.long
@pytest.mark.parametrize("granularity", ["per tensor", "per channel", "128x128"])
def test_mixed_checkpoints_are_decoded_alike(tmp_path, granularity):
    """Their models of configs take the fixtures, and their decoders give the same bfloat16 values, of FP8 too."""
    path, values = mixed(tmp_path, "compressed-tensors", granularity)
    peer("decompress", path, tmp_path / "decoded", needs=("torch", "compressed_tensors"))
    dequantize_checkpoint(path, tmp_path / "ours")
    ours, theirs = open_source(tmp_path / "ours"), open_source(tmp_path / "decoded")
    assert set(theirs.places) == set(values)
    for name in values:
        np.testing.assert_array_equal(ours.array(name), theirs.array(name))


@pytest.mark.long
def test_compressed_tensors_rounds_ties_of_256_in_its_own_way(tmp_path):
    """amax / 1536 times 15 can be halfway between two bfloat16: q (s / S_enc) and q (s S_dec) lie on either side."""
    options = ConvertOptions(layout="compressed-tensors", spec=jnvfp4.spec.four_over_six(e4m3_max=256))
    convert_checkpoint(GOLDEN / "moe" / "input", tmp_path / "out", options)
    peer("decompress", tmp_path / "out", tmp_path / "decoded", needs=("torch", "compressed_tensors"))
    found = ulps(open_stored(tmp_path / "out"), open_source(tmp_path / "decoded"))
    assert found.max() == 1
    assert found.mean() < 0.01


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_model_optimizer_output_is_taken_by_their_converter(tmp_path, model):
    convert_checkpoint(GOLDEN / model / "input", tmp_path / "out")
    peer("modelopt", tmp_path / "out", tmp_path / "theirs", needs=("torch", "compressed_tensors"))
    ours, theirs = open_stored(tmp_path / "out"), open_stored(tmp_path / "theirs")
    assert theirs.layout.name == "compressed-tensors"
    assert ours.modules == theirs.modules
    for module in ours.modules:
        a, b = ours.weight(module), theirs.weight(module)
        np.testing.assert_array_equal(a.codes, b.codes)
        np.testing.assert_array_equal(a.scales, b.scales)
        np.testing.assert_array_equal(np.float32(1) / a.global_scale.reshape(()), b.global_scale.reshape(()))
    peer("decompress", tmp_path / "theirs", tmp_path / "decoded", needs=("torch", "compressed_tensors"))
    found = ulps(ours, open_source(tmp_path / "decoded"))
    assert (found.size, int(found.sum())) == (ELEMENTS[model], 0)


@pytest.mark.long
@pytest.mark.parametrize("weight_only", [False, True], ids=["W4A4", "W4A16"])
def test_transformers_loads_a_dense_model(tmp_path, weight_only):
    options = ConvertOptions(layout="compressed-tensors", weight_only=weight_only)
    convert_checkpoint(GOLDEN / "llama" / "input", tmp_path / "out", options)
    dequantize_checkpoint(tmp_path / "out", tmp_path / "decoded")
    needs = ("torch", "compressed_tensors", "transformers")
    found = json.loads(peer("model", tmp_path / "out", tmp_path / "decoded", needs=needs).splitlines()[-1])
    assert not found["missing"] + found["unexpected"] + found["mismatched"]
    assert (found["weights"], found["different weights"]) == (21, [])
    assert found["logits"] == 2 * 24 * 96
    if weight_only:  # else they quantize activations
        assert found["different logits"] == 0
        assert found["largest logit"] > 0.1


@pytest.mark.long
def test_verification_asks_them_where_they_are_installed(tmp_path):
    pytest.importorskip("compressed_tensors")
    convert_checkpoint(GOLDEN / "llama" / "input", tmp_path / "out", OPTIONS["nvfp4"])
    records = [r for r in verify_checkpoint(GOLDEN / "llama" / "input", tmp_path / "out") if r.error]
    assert [r.peer_differs for r in records] == [0] * 14
    stored = open_stored(tmp_path / "out")
    other = stored.weight(records[0].name.removesuffix(".weight"))
    theirs = other.values().astype(ml_dtypes.bfloat16)
    assert compare_with_peer(theirs, other, stored) == 0
    with pytest.raises(CheckpointError, match="decodes 1 other values"):
        compare_with_peer(
            np.where(np.arange(theirs.size).reshape(theirs.shape) == 5, 3 * theirs + 1, theirs), other, stored
        )


# ---------------------------------------------------------------- models of transformers
SIZES = {
    **dict(hidden_size=H, intermediate_size=WIDE, moe_intermediate_size=WIDE, vocab_size=64, num_hidden_layers=1),
    **dict(num_attention_heads=8, num_key_value_heads=4, head_dim=64, q_lora_rank=KV, kv_lora_rank=KV, v_head_dim=64),
    **dict(qk_rope_head_dim=16, qk_nope_head_dim=48, num_experts_per_tok=1, first_k_dense_replace=1),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS),
}


@pytest.mark.parametrize("name", [n for n in FAMILIES if n != "Mistral"])  # which has the names of Mistral's own files
def test_families_have_the_weights_of_transformers(name):
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    if int(transformers.__version__.partition(".")[0]) > 4:
        pytest.skip("transformers 5 gives weights other names in memory than in files")
    config, table = FAMILIES[name]
    config = {**SIZES, **config, **{k: {**SIZES, **v} for k, v in config.items() if k == "text_config"}}
    try:
        config = transformers.AutoConfig.for_model(**config)
    except ValueError:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shapes = {n: tuple(t.shape) for n, t in model.state_dict().items() if t.ndim > 1}
    if config.get_text_config().tie_word_embeddings:
        shapes.pop("lm_head.weight")
    for old, new in getattr(model, "_checkpoint_conversion_mapping", {}).items():
        table = {re.sub(old, new, n): shape for n, shape in table.items()}
    beyond = re.compile(rf"vision|multi_modal|layers\.{config.get_text_config().num_hidden_layers}\.")  # the last: MTP
    ours, theirs = ({n: s for n, s in t.items() if len(s) > 1 and not beyond.search(n)} for t in (table, shapes))
    assert ours == theirs


# ---------------------------------------------------------------- what loaders fuse
FOLDERS = {
    "vllm": ("model_executor/models", "models"),
    "sglang": ("srt/models", "multimodal_gen/configs", "multimodal_gen/runtime/models"),
}
# Maps of no weights that are quantized; of names of several models for one part; and of Qwen 1, whose w2 is another
# model's down_proj.
NO_GROUP = re.compile(r"conv1d|_padding|bias$|_scale|svdq|awq|^skip$|^auto$")
SEVERAL = (
    ("q_proj", "k_proj", "v_proj", "wq", "wk", "wv"),
    ("gate_proj", "up_proj", "w1", "w3"),
    ("down_proj", "w2"),
    ("w1", "w2"),
)


def literal(node: ast.AST) -> object:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return None


def maps_of(source: str):
    """The fused name and the names of the parts, of each map in a file: a dict of lists, or by part, or rows."""
    for node in ast.walk(ast.parse(source)):
        found = defaultdict(list)
        if isinstance(node, ast.Dict):
            for key, value in zip(map(literal, filter(None, node.keys)), map(literal, node.values), strict=False):
                if isinstance(value, list) and all(isinstance(v, str) for v in value):
                    found[key] += value
                elif isinstance(value, tuple) and len(value) in (2, 3) and isinstance(value[0], str):
                    found[value[0]].append(key)
        elif isinstance(node, ast.List | ast.Tuple):
            for row in map(literal, node.elts):
                if isinstance(row, tuple) and len(row) == 3 and all(isinstance(v, str) for v in row[:2]):
                    found[row[0]].append(row[1])
        for name, parts in found.items():
            if isinstance(name, str) and all(isinstance(part, str) for part in parts):
                yield name, tuple(sorted({*map(plain, parts)}))


def plain(name: str) -> str:
    """A name without what a regular expression has beside it."""
    while (shorter := re.sub(r"\([^()]*\)", "", name)) != name:
        name = shorter
    return re.sub(r"\.\.+", ".", re.sub(r"[\\^$]", "", name).removesuffix(".weight")).strip(".")


# What a loader does with different global scales, or blocks of 32: where, and the words. Global scales of
# compressed-tensors are reciprocals of S_dec, so that the largest has the smallest S_dec.
VLLM, SGLANG = "model_executor/layers/quantization", "srt/layers/quantization"
_CT = "compressed_tensors/schemes/compressed_tensors"
MERGES = {
    ("vllm", MODELOPT, "linear", "largest"): (f"{VLLM}/modelopt.py", "layer.weight_scale_2.max()"),
    ("vllm", COMPRESSED_TENSORS, "linear", "smallest"): (
        f"{VLLM}/{_CT}_w4a4_nvfp4.py",
        "layer.weight_global_scale.max()",
    ),
    ("vllm", COMPRESSED_TENSORS, "experts", "first"): (
        f"{VLLM}/compressed_tensors/compressed_tensors_moe/compressed_tensors_moe_w4a4_nvfp4.py",
        "layer.w13_weight_global_scale[:, 0].contiguous()",
    ),
    ("sglang", MODELOPT, "linear", "largest"): (f"{SGLANG}/modelopt_quant.py", "layer.weight_scale_2.max()"),
    ("sglang", MODELOPT, "experts", "first"): (f"{SGLANG}/modelopt_quant.py", "= layer.w13_weight_scale_2[:, 0]"),
    ("sglang", COMPRESSED_TENSORS, "linear", "smallest"): (
        f"{SGLANG}/{_CT}_w4a4_nvfp4.py",
        "layer.weight_global_scale.max()",
    ),
    ("sglang", COMPRESSED_TENSORS, "experts", "first"): (
        f"{SGLANG}/{_CT}_w4a4_nvfp4_moe.py",
        "1 / layer.w13_weight_global_scale[:, 0]",
    ),
    ("sglang", COMPRESSED_TENSORS, "equal_if_weight_only", True): (
        f"{SGLANG}/{_CT}_w4a16_nvfp4.py",
        "torch.unique(global_scale).numel() != 1",
    ),
    ("vllm", MODELOPT, "", "blocks of 32"): (
        f"{VLLM}/modelopt.py",
        "shapes.input_size_per_partition // ctx.group_size",
    ),
    ("vllm", COMPRESSED_TENSORS, "", "blocks of 32"): (
        f"{VLLM}/compressed_tensors/compressed_tensors.py",
        "is_group_size_16 = quant_args.group_size == 16",
    ),
    ("sglang", MODELOPT, "", "blocks of 32"): (
        f"{SGLANG}/modelopt_quant.py",
        "Marlin requires group_size=16",
    ),
    ("sglang", COMPRESSED_TENSORS, "", "blocks of 32"): (
        f"{SGLANG}/compressed_tensors/compressed_tensors.py",
        "layout (tensor_group, group_size 16)",
    ),
}


@pytest.mark.parametrize("merge", MERGES, ids=lambda merge: "-".join(map(str, (merge[0], merge[1].name, *merge[2:]))))
def test_scales_are_read_as_the_loaders_do(merge):
    loader, layout, field, how = merge
    assert not field or getattr(layout.loaders[{"vllm": "vLLM", "sglang": "SGLang"}[loader]], field) == how
    if not (found := find_spec(loader)):
        pytest.skip(f"needs the sources of {loader}")
    file, words = MERGES[merge]
    assert words in Path(found.submodule_search_locations[0], file).read_text()


def test_the_groups_are_those_of_the_loaders():
    """Each map of a loader is in one group, and each row of the table is in a map."""
    roots = {loader: find_spec(loader) for loader in FOLDERS}
    if not all(roots.values()):
        pytest.skip("needs the sources of vLLM and SGLang")
    seen = set()
    for loader, folders in FOLDERS.items():
        for file in (
            f for folder in folders for f in Path(roots[loader].submodule_search_locations[0], folder).rglob("*.py")
        ):
            text = file.read_text()
            for name, parts in maps_of(text) if "mapp" in text or "stacked" in text else ():
                if len(parts) > 1 and all(parts) and not any(map(NO_GROUP.search, (name, *parts))):
                    seen.add(parts)
    split = [parts for parts in seen if len(groups_of(parts)) > 1]
    assert sorted(split) == sorted(tuple(sorted(parts)) for parts in SEVERAL)
    known = [{part.rpartition(".")[2] for part in parts} for parts in seen]
    assert [row for row in FUSED if not any({end.rpartition(".")[2] for end in row} <= ends for ends in known)] == []

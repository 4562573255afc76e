"""The Llama of examples/lm: its checkpoints, decoding with a cache, serving, and GPTQ of a layer at a time."""

import dataclasses
import importlib
import importlib.util
import json
import re
import shlex
import sys
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import scripts
from helpers import assert_same_tensor
from scripts import EXAMPLES, ROOT, run

import jnvfp4
from jnvfp4 import recipes
from jnvfp4.checkpoints import ConvertOptions, convert_checkpoint, open_checkpoint, save_checkpoint
from jnvfp4.cli import main
from jnvfp4.spec import name_of


@pytest.mark.long
def test_quantize_checkpoint_computes_what_the_model_does(tmp_path, hugging_face, cpu):
    """With a smaller error than without hessians, on text that it has not seen. Layer 1 sees a quantized layer 0."""
    from lm.data import spread
    from lm.model import converted_linear, logits
    from quantize_checkpoint import hessians, run

    config, params = small_llama(width=64)
    config = dataclasses.replace(config, seq=32)
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
    save_checkpoint(
        hugging_face.to_hugging_face(params, config), tmp_path / "model", config=hugging_face.llama_config(config)
    )
    text = (ROOT / "README.md").read_bytes()
    (tmp_path / "text").write_bytes(text[:-2048])
    out = scripts.run("quantize_checkpoint.py", "model", "text", "out", "--sequences", "64", cwd=tmp_path)
    assert "layer 2 of 2\n14 of 14 weights in out rounded by the hessians in out-hessians" in out

    tokens = jnp.asarray(spread(np.frombuffer(text[:-2048], np.uint8), 64, 32))
    x = params["embedding"][tokens]
    model, quantized = (open_checkpoint(tmp_path / name) for name in ("model", "out"))
    first, second = (hugging_face.layer_from_hugging_face(model, i) for i in range(2))
    after = [
        hessians(run(x, layer, config), second, config)["mlp_down"]
        for layer in (first, hugging_face.layer_from_hugging_face(quantized, 0))
    ]
    written = open_checkpoint(tmp_path / "out-hessians")["model.layers.1.mlp.down_proj.weight"]
    unlike, like = (float(jnp.linalg.norm(h - written) / jnp.linalg.norm(written)) for h in after)
    assert like < 1e-3 < 1e-2 < unlike

    options = ConvertOptions(spec=jnvfp4.QuantSpec(select="search"), weight_only=True)
    convert_checkpoint(tmp_path / "model", tmp_path / "plain", options)
    unseen = jnp.asarray(np.frombuffer(text[-2048:], np.uint8).reshape(64, 32))
    computed = jax.jit(lambda params: logits(params, unseen, config, converted_linear, jax.random.key(0)))
    want = computed(params)
    found = (hugging_face.from_hugging_face(open_checkpoint(tmp_path / name)) for name in ("out", "plain"))
    by_gptq, plain = (float(jnp.linalg.norm(computed(tree) - want)) for tree in found)
    assert by_gptq < 0.9 * plain


def test_quantize_checkpoint_reads_tokens(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from lm.data import spread
    from quantize_checkpoint import read_tokens

    (tmp_path / "text").write_text("ab" * 50)
    np.testing.assert_array_equal(
        spread(read_tokens(tmp_path, tmp_path / "text", 256), 3, 20), np.tile([97, 98], (3, 10))
    )
    with pytest.raises(ValueError, match="must have 101 tokens or more, got 100"):
        spread(read_tokens(tmp_path, tmp_path / "text", 256), 3, 101)
    with pytest.raises(ValueError, match=r"tokenizer.json is missing, and 512 tokens are no bytes"):
        read_tokens(tmp_path, tmp_path / "text", 512)
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert read_tokens(tmp_path, tmp_path / "text", 512).tolist() == 50 * [2]
    with pytest.raises(
        ValueError, match=r"tokenizer.json: tokens must be below the vocab_size of config.json, 2, got 2"
    ):
        read_tokens(tmp_path, tmp_path / "text", 2)
    (tmp_path / "text").write_bytes(b"a\xff")
    with pytest.raises(ValueError, match=r"text must be UTF-8: 'utf-8' codec can't decode"):
        read_tokens(tmp_path, tmp_path / "text", 512)
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(ValueError, match=r"tokenizer.json must be a tokenizer of the package tokenizers: "):
        read_tokens(tmp_path, tmp_path / "text", 512)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"the package tokenizers, which is missing: pip install tokenizers$"):
        read_tokens(tmp_path, tmp_path / "text", 512)


def spoiled_llama(tmp_path, hugging_face, spoil=lambda tensors: None, options=None, **sizes):
    """A small Llama's files and a text beside them, after a change of its tensors; quantized, if options are given."""
    config, params = small_llama()
    config = dataclasses.replace(config, **sizes)
    if sizes:
        params = importlib.import_module("lm.model").init_params(jax.random.key(0), config)
    tensors = hugging_face.to_hugging_face(jax.tree.map(lambda w: np.array(w, ml_dtypes.bfloat16), params), config)
    tensors = {name: np.array(w) for name, w in tensors.items()}
    spoil(tensors)
    written = tmp_path / "model" if options is None else tmp_path / "plain"
    save_checkpoint(tensors, written, config=hugging_face.llama_config(config))
    if options is not None:
        convert_checkpoint(written, tmp_path / "model", options)
    (tmp_path / "text").write_bytes(bytes(range(256)))
    return config


def a_nan(tensors):
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan


GATE = "model.layers.1.mlp.gate_proj"
SPOILED = {
    "NaN": (dict(spoil=a_nan), "tensor 'model.layers.1.mlp.up_proj.weight': has 1 values that are not finite"),
    "K": (dict(mlp_width=40), "tensor 'model.layers.0.mlp.down_proj.weight': K is 40; expected a multiple of 16"),
    "quantized": (dict(options=ConvertOptions(weight_only=True)), "model/config.json: is quantized already (modelopt)"),
    "missing": (
        dict(spoil=lambda t: t.pop("model.layers.1.mlp.down_proj.weight")),
        "model: model.layers.1.mlp.down_proj.weight must have the shape (32, 48) by config.json, got None",
    ),
    "bias": (
        dict(spoil=lambda t: t.update({f"{GATE}.bias": np.ones(48, np.float32)})),
        f"model: {GATE}.bias is not computed with, must be absent by config.json, got (48,)",
    ),
    "shape": (
        dict(spoil=lambda t: t.update({"model.norm.weight": np.ones(16, np.float32)})),
        "model: model.norm.weight must have the shape (32,) by config.json, got (16,)",
    ),
    "disk": (
        {},
        f"must have room for {2 * 41_784 + 4 * 2 * (3 * 32**2 + 48**2):,} bytes, hessians included, got 100,000",
    ),
}


@pytest.mark.parametrize("case", SPOILED)
def test_quantize_checkpoint_refuses_before_it_calibrates(hugging_face, tmp_path, monkeypatch, case):
    arguments, text = SPOILED[case]
    spoiled_llama(tmp_path, hugging_face, **arguments)
    script = importlib.import_module("quantize_checkpoint")
    monkeypatch.setattr(script, "write_hessians", None)
    monkeypatch.setattr(sys, "argv", ["quantize_checkpoint.py", "model", "text", "out"])
    monkeypatch.chdir(tmp_path)
    if case == "disk":
        monkeypatch.setattr(script.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=100_000))
    with pytest.raises(SystemExit, match=re.escape(text)):
        script.main()
    assert not [*tmp_path.glob("out*")]


@pytest.mark.long
def test_quantize_checkpoint_names_the_command_that_finishes_it(hugging_face, tmp_path, monkeypatch, capsys):
    """Of a model without a head of its own, whose heads are wider, and whose files have angles."""

    def spoil(tensors):
        del tensors["lm_head.weight"]
        tensors |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32) for i in range(2)}

    spoiled_llama(tmp_path, hugging_face, spoil, tied=True, head_size=16)
    script = importlib.import_module("quantize_checkpoint")
    monkeypatch.setattr(sys, "argv", ["quantize_checkpoint.py", "model", "text", "out", "--format", "te"])
    monkeypatch.chdir(tmp_path)

    def stopped(*args, dry_run=False, **options):
        if dry_run:
            return convert_checkpoint(*args, dry_run=True, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "convert_checkpoint", stopped)
    with pytest.raises(SystemExit) as error:
        script.main()
    assert "warning: text has 256 tokens, and 128 sequences of 8 overlap\n" in capsys.readouterr().err
    message, _, command = str(error.value).rpartition(": ")
    assert message == "quantize_checkpoint: interrupted\nall hessians are written; this converts by them"
    program, *arguments = shlex.split(command)
    assert program == "jnvfp4"
    assert main(arguments) == 0
    assert "14 weights, of which 14 by GPTQ" in capsys.readouterr().out
    stored = json.loads((tmp_path / "out" / "config.json").read_text())
    assert stored["quantization_config"]["recipe"] == "nvfp4-search-gptq"
    loaded = hugging_face.from_hugging_face(open_checkpoint(tmp_path / "out"), tied=True)
    np.testing.assert_array_equal(loaded["head"], loaded["embedding"])
    assert loaded["layers"].keys() == small_llama()[1]["layers"].keys()


# ---------------------------------------------------------------- examples/lm
@pytest.fixture
def hugging_face(monkeypatch):
    """The module lm.hugging_face; lm.config and lm.model can be imported, too."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("lm.hugging_face")


def small_llama(seed: int = 0, heads: int = 4, kv_heads: int = 2, width: int = 32):
    """A configuration, and weights whose norms differ from each other."""
    from lm.config import Config
    from lm.model import init_params

    config = Config(
        layers=2, width=width, heads=heads, kv_heads=kv_heads, mlp_width=48, seq=8, batch=3, steps=1, peak_lr=1e-3,
        val_batches=1, architecture="llama",
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    params = init_params(jax.random.key(seed), config)
    return config, jax.tree.map(lambda w: w + 0.2 * rng.normal(size=w.shape).astype(np.float32), params)


def llama_logits(weights, tokens, config):
    """Computes the logits of one sequence in float64, from the tensors and the config.json of a Hugging Face Llama."""
    weights = {name.removesuffix(".weight"): np.asarray(w, np.float64) for name, w in weights.items()}
    seq, head_dim = len(tokens), config["head_dim"]
    half = head_dim // 2
    angle = np.arange(seq)[:, None] * np.tile(inverse_frequencies(config), 2)

    def norm(x, name):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + config["rms_norm_eps"]) * weights[name]

    def rotate(x):
        return x * np.cos(angle) + np.concatenate([-x[..., half:], x[..., :half]], axis=-1) * np.sin(angle)

    x = weights["model.embed_tokens"][tokens]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        y = norm(x, f"{layer}.input_layernorm")
        q, k, v = (
            (y @ weights[f"{layer}.self_attn.{p}_proj"].T).reshape(seq, -1, head_dim).swapaxes(0, 1) for p in "qkv"
        )
        k, v = (np.repeat(t, config["num_attention_heads"] // config["num_key_value_heads"], axis=0) for t in (k, v))
        scores = rotate(q) @ rotate(k).swapaxes(1, 2) / np.sqrt(head_dim)
        p = np.exp(np.where(np.tri(seq), scores, -np.inf))
        mixed = (p / p.sum(axis=-1, keepdims=True) @ v).swapaxes(0, 1).reshape(seq, -1)
        x = x + mixed @ weights[f"{layer}.self_attn.o_proj"].T
        y = norm(x, f"{layer}.post_attention_layernorm")
        gate, up = (y @ weights[f"{layer}.mlp.{p}_proj"].T for p in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{layer}.mlp.down_proj"].T
    return norm(x, "model.norm") @ weights["model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"].T


def inverse_frequencies(config):
    """Computes, in float64, what transformers calls by this name."""
    plain = config["rope_theta"] ** -np.arange(0, 1, 2 / config["head_dim"])
    if not (scaling := config.get("rope_scaling")):
        return plain
    factor, low, high, positions = scaling["factor"], *(scaling[f"{end}_freq_factor"] for end in ("low", "high")), 40
    assert scaling["original_max_position_embeddings"] == positions
    length = 2 * np.pi / plain
    smooth = (positions / length - low) / (high - low)
    medium = (1 - smooth) * plain / factor + smooth * plain
    return np.where(length < positions / high, plain, np.where(length > positions / low, plain / factor, medium))


@pytest.mark.long
def test_microbatches_with_carried_amaxes_and_weights_quantized_once_train_with_the_same_bits(hugging_face):
    """As microbatches that find the amaxes and quantize each time, over two updates."""
    pytest.importorskip("tqdm", reason="needs the extra [examples]")
    from lm.model import amaxes, quantized_linear
    from lm.train import init_optimizer, make_train_step

    config, params = small_llama()
    recipe, config = recipes.pretrain(), dataclasses.replace(config, batch=4, steps=20)
    batches = np.random.default_rng(1).integers(0, 256, (2, 4, config.seq + 1)).astype(np.uint8)

    def trained(of):
        tree = jax.tree.map(jnp.array, params)
        state, step = init_optimizer(tree, of), make_train_step(quantized_linear(recipe), config, 0, of, 2)
        for batch in batches:
            tree, state, *_ = step(tree, state, batch)
        return tree, state

    (tree, state), want = trained(recipe), trained(None)
    assert_same_tensor(state.pop("amax"), amaxes(tree))
    assert_same_tensor((tree, state), want)


@pytest.mark.parametrize("name", ["plain", "Llama 3.2"])
def test_llama_computes_what_its_hugging_face_tensors_mean(hugging_face, name):
    """Also, as in Llama 3.2, with scaled angles and an embedding that is the head; with heads of another width."""
    from lm.config import RotaryScaling
    from lm.model import bf16_linear, init_params, logits

    config, params = small_llama()
    if name != "plain":  # the angles of some elements are divided, of others in part or not, within 48 positions
        config = dataclasses.replace(
            config, seq=48, rotary_scaling=RotaryScaling(8.0, 1.0, 4.0, 40.0), head_size=32, tied=True
        )
        params = init_params(jax.random.key(1), config)
    tensors, declared = hugging_face.to_hugging_face(params, config), hugging_face.llama_config(config)
    loaded = hugging_face.from_hugging_face(tensors, config.tied)
    tokens = np.random.default_rng(1).integers(0, 256, (3, config.seq))
    got = jax.jit(logits, static_argnums=(2, 3))(loaded, jnp.asarray(tokens), config, bf16_linear, jax.random.key(0))
    want = np.stack([llama_logits(tensors, row, declared) for row in tokens])
    assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want)
    if not config.tied:
        jax.tree.map(np.testing.assert_array_equal, loaded, params)


@pytest.mark.parametrize("spec", [jnvfp4.NVFP4, jnvfp4.ROW_SCALED], ids=name_of)
def test_join_rows_of_quantized_weights_is_quantizing_the_joined_ones(hugging_face, spec):
    w = jnp.asarray(np.random.default_rng(0).normal(size=(2, 12, 32)), jnp.float32)
    whole = jnvfp4.quantize(w, spec)
    amax = None if spec is jnvfp4.ROW_SCALED else whole.amax
    parts = [jnvfp4.quantize(part, spec, amax=amax) for part in jnp.split(w, [4, 6], axis=1)]
    joined = hugging_face.join_rows(*parts)
    assert_same_tensor(joined, whole)


def test_join_rows_refuses_what_no_tensor_can_hold(hugging_face):
    w = jnp.ones((1, 4, 16))
    with pytest.raises(ValueError, match=r"^join_rows: parts must have the same amax, got 1\.0 and 2\.0$"):
        hugging_face.join_rows(jnvfp4.quantize(w), jnvfp4.quantize(2 * w))
    with pytest.raises(ValueError, match=r"^join_rows: parts must have the same format, got Format\("):
        hugging_face.join_rows(jnvfp4.quantize(w), jnvfp4.quantize(w, jnvfp4.ROW_SCALED))


LLAMA_3_1 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
OTHERS = {  # another entry of a config -> what read_config then has in place of what it had
    "defaults": ({"rms_norm_eps": None, "rope_theta": None}, {"norm_epsilon": 1e-6, "rotary_base": 10_000.0}),
    "num_key_value_heads": ({"num_key_value_heads": None}, {"kv_heads": 4}),
    "rope_parameters": ({"rope_theta": None, "rope_parameters": {"rope_theta": 5}}, {"rotary_base": 5.0}),
    "head_dim": ({"head_dim": 24}, {"head_size": 24}),
    "no head_dim": ({"head_dim": None}, {}),
    "tied": ({"tie_word_embeddings": True}, {"tied": True}),
    "llama3": ({"rope_scaling": {"rope_type": "llama3", **LLAMA_3_1}}, {"rotary_scaling": (8.0, 1.0, 4.0, 8192.0)}),
    "old name": ({"rope_scaling": {"type": "llama3", **LLAMA_3_1}}, {"rotary_scaling": (8.0, 1.0, 4.0, 8192.0)}),
    "new place": (
        {"rope_theta": None, "rope_parameters": {"rope_type": "llama3", "rope_theta": 7.0, **LLAMA_3_1}},
        {"rotary_base": 7.0, "rotary_scaling": (8.0, 1.0, 4.0, 8192.0)},
    ),
}
COUNT, KINDS = "must be a whole number, 1 or more, got", "rope_type must be 'default' or 'llama3', got"
REFUSED = {
    "model_type": ({"model_type": "gemma"}, "model_type must be 'llama', got 'gemma'"),
    "hidden_act": ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
    "attention_bias": ({"attention_bias": True}, "attention_bias must be False, got True"),
    "mlp_bias": ({"mlp_bias": True}, "mlp_bias must be False, got True"),
    "partial": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1, got 0.5"),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, f"{KINDS} 'yarn'"),
    "linear": ({"rope_scaling": {"type": "linear", "factor": 4.0}}, f"{KINDS} 'linear'"),
    "dynamic": ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, f"{KINDS} 'dynamic'"),
    "longrope": ({"rope_scaling": {"rope_type": "longrope"}}, f"{KINDS} 'longrope'"),
    "no object": ({"rope_scaling": "llama3"}, "rope_scaling must be an object or null, got 'llama3'"),
    "factor": (
        {"rope_scaling": {**LLAMA_3_1, "rope_type": "llama3", "factor": None}},
        "factor must be a number above 0",
    ),
    "frequencies": (
        {"rope_scaling": {**LLAMA_3_1, "rope_type": "llama3", "low_freq_factor": 4.0}},
        "high_freq_factor must be above low_freq_factor, 4, got 4",
    ),
    "hidden_size": ({"hidden_size": None}, f"hidden_size {COUNT} None"),
    "heads": ({"num_attention_heads": "4"}, f"num_attention_heads {COUNT} '4'"),
    "layers": ({"num_hidden_layers": 2.0}, f"num_hidden_layers {COUNT} 2.0"),
    "vocabulary": ({"vocab_size": True}, f"vocab_size {COUNT} True"),
    "norm": ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number above 0, got '1e-5'"),
    "odd head": ({"head_dim": 7}, "head_dim must be even, got 7"),
    "uneven heads": (
        {"head_dim": None, "num_attention_heads": 3},
        "hidden_size must be a multiple of num_attention_head",
    ),
    "groups": ({"num_key_value_heads": 3}, "num_key_value_heads must divide num_attention_heads, 4, got 3"),
}


def test_config_of_a_checkpoint_is_read(hugging_face, tmp_path):
    config = dataclasses.replace(small_llama()[0], rotary_base=500_000.0, norm_epsilon=1e-5)
    file = tmp_path / "config.json"
    training = {name: getattr(config, name) for name in ("batch", "steps", "peak_lr", "val_batches")}
    for change, read in (({}, {}), *OTHERS.values()):
        file.write_text(json.dumps(hugging_face.llama_config(config) | change))
        got = dataclasses.replace(hugging_face.read_config(tmp_path), **training)
        assert got == dataclasses.replace(config, **read)
        declared = hugging_face.llama_config(got)
        file.write_text(json.dumps(declared))
        assert dataclasses.replace(hugging_face.read_config(tmp_path), **training) == got


@pytest.mark.parametrize("case", REFUSED)
def test_configs_that_are_refused(hugging_face, tmp_path, case):
    change, text = REFUSED[case]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(hugging_face.llama_config(small_llama()[0]) | change))
    with pytest.raises(ValueError, match="^" + re.escape(f"{file}: {text}")):
        hugging_face.read_config(tmp_path)


@pytest.mark.parametrize("content", ["[]", "{", b"\xff"])
def test_files_that_are_no_config_are_refused(hugging_face, tmp_path, content):
    (tmp_path / "config.json").write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError, match=r"config.json must be (a JSON object, got \[\]|JSON in UTF-8: )"):
        hugging_face.read_config(tmp_path)


LLAMAS = {
    "2": {"rope_theta": 10_000.0, "num_key_value_heads": None, "head_dim": None},
    "3.1": {"rope_theta": 500_000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA_3_1}},
    "3.2": {
        "rope_theta": 500_000.0,
        "rope_scaling": {"rope_type": "llama3", **LLAMA_3_1, "factor": 32.0},
        "head_dim": 64,
    },
    "short": {  # all angles are divided, in part or not at all within 48 positions
        "rope_scaling": {"rope_type": "llama3", **LLAMA_3_1, "original_max_position_embeddings": 40},
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
}


@pytest.mark.parametrize("name", LLAMAS)
def test_angles_are_those_of_transformers(hugging_face, tmp_path, name):
    pytest.importorskip("torch", reason="transformers needs it")
    transformers = pytest.importorskip("transformers")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    from lm.model import angles

    declared = hugging_face.llama_config(small_llama(width=512)[0]) | LLAMAS[name]
    (tmp_path / "config.json").write_text(json.dumps(declared))
    config = transformers.LlamaConfig.from_pretrained(tmp_path)
    want = llama.LlamaRotaryEmbedding(config).inv_freq
    np.testing.assert_allclose(angles(hugging_face.read_config(tmp_path)), want.numpy(), rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", ["2", "short"])
def test_llamas_compute_what_transformers_does(hugging_face, decode, tmp_path, name):
    """Also a token at a time through a cache; heads wider than their part of the width; files with angles in them."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    from lm.model import converted_linear, init_params, logits

    declared = hugging_face.llama_config(small_llama(width=64)[0]) | LLAMAS[name] | {"max_position_embeddings": 48}
    (tmp_path / "config.json").write_text(json.dumps(declared))
    config = hugging_face.read_config(tmp_path)
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), init_params(jax.random.key(1), config))
    if config.tied:  # transformers 5 does not tie a head that differs, transformers 4 does
        params["head"] = params["embedding"]
    tensors = hugging_face.to_hugging_face(params, config)
    for i in range(2):
        tensors[f"model.layers.{i}.self_attn.rotary_emb.inv_freq"] = np.zeros(config.head_dim // 2, np.float32)
    save_checkpoint(tensors, tmp_path / "model", config=declared)
    loaded = hugging_face.from_hugging_face(open_checkpoint(tmp_path / "model"), config.tied)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    tokens = np.random.default_rng(1).integers(0, 256, (2, 48))
    want = model(torch.asarray(tokens)).logits.detach().numpy()
    got = logits(loaded, jnp.asarray(tokens), config, converted_linear, jax.random.key(0))
    assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want)
    stored = open_checkpoint(tmp_path / "model")
    hugging_face.check_shapes(stored, config, tmp_path)
    layer = hugging_face.layer_from_hugging_face(stored, 1)
    jax.tree.map(lambda w, all_: np.testing.assert_array_equal(w, all_[1]), layer, loaded["layers"])
    batch = jnp.asarray(tokens, jnp.int32)
    loss = float(
        torch.nn.functional.cross_entropy(
            torch.asarray(want[:, :-1].reshape(-1, 256)), torch.asarray(tokens[:, 1:].reshape(-1))
        )
    )
    assert float(decode.forced_loss(decode.unstack(loaded), batch, config)) == pytest.approx(loss, rel=0.01)


# ---------------------------------------------------------------- examples/lm/decode.py, examples/serve.py
@pytest.fixture
def decode(hugging_face):
    """The module lm.decode."""
    return importlib.import_module("lm.decode")


def served_llama(decode, name: str):
    """A configuration, stacked weights, the product of the linear layers, and whether the KV cache is quantized."""
    config, params = small_llama(heads=2, kv_heads=1, width=128)  # two queries share a key of 64 elements
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
    if name != "bf16":
        quantize = jax.jit(jax.vmap(jnvfp4.quantize))
        layers = {key: quantize(w) if w.ndim == 3 else w for key, w in params["layers"].items()}
        params = {**params, "layers": layers}
    return config, params, decode.row_scaled_linear if "W4A4" in name else decode.converted_linear, "KV4" in name


@pytest.mark.long
@pytest.mark.parametrize("name", ["bf16", "W4A16", "W4A4"])
def test_decoding_with_a_cache_is_decoding_without(decode, name):
    from lm.model import logits

    config, params, linear, _ = served_llama(decode, name)
    prompt = jnp.asarray(np.random.default_rng(1).integers(0, 256, (3, 5)), jnp.int32)
    served, lengths = decode.unstack(params), jnp.array([5, 1, 3], jnp.int32)
    first, caches = decode.prefill(served, prompt, lengths, 16, config, linear)
    others, caches, positions = decode.generate(served, first, caches, lengths, 6, config, linear)
    more, _, _ = decode.generate(served, others[:, -1], caches, positions, 4, config, linear)
    new = jnp.concatenate([first[:, None], others, more], axis=1)
    for text, length, written in zip(prompt, lengths, new, strict=True):
        tokens = jnp.concatenate([text[:length], written])[None]
        want = logits(params, tokens, config, decode.on_rows(linear), jax.random.key(0))[0]
        of_new = want[length - 1 : -1]
        chosen = jnp.take_along_axis(of_new, written[:, None], axis=-1)[:, 0]
        assert (jnp.max(of_new, axis=-1) - chosen).max() <= 0.05 * jnp.std(want)  # the best, or as good


@pytest.mark.long
def test_a_sequence_that_ends_leaves_the_others_alone(decode):
    """What it would have gone on with is not appended, and the others have the same tokens."""
    config, params, linear, _ = served_llama(decode, "W4A16 KV4")
    served, lengths = decode.unstack(params), jnp.array([5, 2, 3], jnp.int32)
    prompt = jnp.asarray(np.random.default_rng(1).integers(0, 256, (3, 5)), jnp.int32)

    def run(stop):
        first, caches = decode.prefill(served, prompt, lengths, 64, config, linear, True)
        return decode.generate(served, first, caches, lengths, 8, config, linear, stop)

    free, _, ends = run(-1)
    stop = int(free[1, 3])
    assert ends.tolist() == [13, 10, 11]
    tokens, caches, ends = run(stop)
    for b in range(3):
        found = np.flatnonzero(free[b] == stop)
        length = int(found[0]) if len(found) else 8
        np.testing.assert_array_equal(tokens[b, :length], free[b, :length])
        assert (np.asarray(tokens[b, length:]) == stop).all()
        appended = int(lengths[b]) + min(length + 1, 8)
        assert not np.asarray(caches[0].keys.amax[b, :, max(appended, 5) :]).any()
        assert (int(ends[b]) == -1) == (length < 7)


def test_a_full_cache_is_refused(decode):
    config, _ = small_llama(heads=2, width=128)
    caches = [decode.empty_cache(config, 2, 100, True)]
    decode.check_room(caches, [3, 128], 0)
    with pytest.raises(
        ValueError, match=r"cache is full: it has room for 128 tokens .* and 129 are needed; make it lar"
    ):
        decode.check_room(caches, jnp.array([120, 3]), 9)


@pytest.mark.long
@pytest.mark.parametrize("name", ["bf16", "W4A16 KV4"])
def test_perplexity_through_the_cache_is_that_of_the_model(decode, name):
    from lm.model import loss_fn

    config, params, linear, quantized_cache = served_llama(decode, name)
    batch = jnp.asarray(np.random.default_rng(2).integers(0, 256, (3, 9)), jnp.int32)
    got = decode.forced_loss(decode.unstack(params), batch, config, linear, quantized_cache)
    want = loss_fn(params, batch, config, decode.on_rows(linear), jax.random.key(0))
    assert got == pytest.approx(float(want), rel=0.02 if quantized_cache else 1e-3)
    assert got != want or not quantized_cache


def test_prompts_in_the_cache_are_quantized_rows(decode):
    config, _ = small_llama(heads=2, width=128)
    x = np.random.default_rng(3).normal(size=(2, 8, config.kv_heads, 64)) * np.geomspace(1e-3, 1e3, 8)[:, None, None]
    x = jnp.asarray(x, jnp.bfloat16)
    kept = jax.jit(decode.put_prompts)(decode.empty_cache(config, 2, 8, True).keys, x)
    assert kept.shape == (2, config.kv_heads, 64, 64)
    got = jax.tree.map(lambda part: part[:, :, :8], kept)
    assert_same_tensor(got, jnvfp4.quantize(x.swapaxes(1, 2), jnvfp4.ROW_SCALED))


def test_cache_is_written_in_place(decode):
    config, params, linear, quantized_cache = served_llama(decode, "W4A4 KV4")
    served, lengths = decode.unstack(params), jnp.full(3, 5, jnp.int32)
    prompts = jnp.zeros((3, 5), jnp.int32)
    token, caches = decode.prefill(served, prompts, lengths, 23, config, linear, quantized_cache)
    program = decode.generate.lower(served, token, caches, lengths, 4, config, linear).compile()
    parts = jax.tree.leaves(caches)
    assert program.memory_analysis().alias_size_in_bytes == sum(part.nbytes for part in parts)
    where = [part.unsafe_buffer_pointer() for part in parts]
    _, caches, _ = program(served, token, caches, lengths)
    assert [part.unsafe_buffer_pointer() for part in jax.tree.leaves(caches)] == where


@pytest.mark.long
def test_serve_serves_its_checkpoint(tmp_path):
    pytest.importorskip("tqdm", reason="needs the extra [examples]")
    out = run("serve.py", "--steps", "20", "--batch", "1", "3", "--new", "8", "--out", "served", cwd=tmp_path)
    assert "14 of 21 tensors converted, from served/bf16 to served/nvfp4" in out
    results = json.loads((tmp_path / "served/serve.json").read_text())
    names = ["bf16", "W4A16", "W4A4", "W4A16 KV4", "W4A4 KV4"]
    assert list(results["prompts"]["32"]) == ["1", "3"]
    for row in results["prompts"]["32"].values():
        assert list(row) == names
        assert all(found["tokens_per_second"] > 0 for found in row.values())
        assert row["bf16"]["times_bf16"] == 1
        assert row["W4A16"]["cache_bytes"] == row["bf16"]["cache_bytes"] > 2.5 * row["W4A16 KV4"]["cache_bytes"]
    memory = results["memory"]
    assert memory["weight_ratio"]["linear"] < 0.29 < memory["weight_ratio"]["all"] < 0.5
    assert memory["cache_bytes_per_token"] == {"bf16": 2 * 2 * 64 * 2, "nvfp4": 2 * 2 * (64 * 9 // 16 + 4)}
    assert list(results["text"]) == names
    exact = results["text"]["bf16"]["perplexity"]
    assert 5 < exact < 50
    for found in results["text"].values():
        assert found["perplexity"] == pytest.approx(exact, rel=0.05)
        assert len(found["text"]) == 3
        assert all(len(line) <= 8 and "\n" not in line for line in found["text"])

    options = ("--checkpoint", "served/nvfp4", "--batch", "1", "--new", "8", "--out", "again", "--prompt", "32", "9")
    again = run("serve.py", *options, cwd=tmp_path)
    assert (tmp_path / "again/serve.png").read_bytes().startswith(b"\x89PNG")
    assert "2 layers, width 128, vocabulary 256" in again
    loaded = json.loads((tmp_path / "again/serve.json").read_text())
    for name in names[1:]:
        assert loaded["text"][name] == results["text"][name]
    assert loaded["text"]["bf16"]["perplexity"] == pytest.approx(loaded["text"]["W4A16"]["perplexity"], rel=1e-3)

    with pytest.raises(
        AssertionError, match=r"cannot be served: served/bf16 has no weights in NVFP4: convert it first"
    ):
        run("serve.py", "--checkpoint", "served/bf16", "--out", "refused", cwd=tmp_path)

    # The stored scale of activations is used: one that is too small clips them.
    # A quantized head changes what W4A16 computes, a little.
    convert_checkpoint(tmp_path / "served/bf16", tmp_path / "clipped", ConvertOptions(input_amax=0.01))
    options = ("--checkpoint", "clipped", "--activations", "stored", "--kv", "bf16", "--batch", "1", "--new", "2")
    texts, weights = [], []
    for head in ("bf16", "nvfp4"):
        run("serve.py", *options, "--head", head, "--out", head, cwd=tmp_path)
        found = json.loads((tmp_path / head / "serve.json").read_text())
        texts.append(found["text"])
        weights.append(found["memory"]["weight_bytes"]["NVFP4"]["all"])
    text, quantized = texts
    assert weights[0] - weights[1] == 256 * 128 * 2 - 256 * 128 * 9 // 16 - 4
    assert text["W4A16"]["perplexity"] == loaded["text"]["W4A16"]["perplexity"]
    assert quantized["bf16"] == text["bf16"]
    assert quantized["W4A16"]["perplexity"] == pytest.approx(text["W4A16"]["perplexity"], rel=0.05)
    assert quantized["W4A16"]["perplexity"] != text["W4A16"]["perplexity"]
    assert text["W4A4"]["perplexity"] > 1.1 * exact


def test_activations_are_quantized_by_stored_amaxes(decode, hugging_face, tmp_path):
    """They are quantized by the largest stored amax of the weights that are joined, not by their own."""
    x, w = (jax.random.normal(jax.random.key(i), (16, 32), jnp.bfloat16) for i in range(2))
    got = decode.calibrated_linear(x, decode.Calibrated(jnvfp4.quantize(w), jnp.float32(3)), None, "")
    clipped = jnvfp4.dequantize(jnvfp4.quantize(x, amax=jnp.float32(3)))
    np.testing.assert_allclose(got, clipped @ jnvfp4.dequantize(jnvfp4.quantize(w)).T, rtol=1e-2, atol=1e-2)
    modules = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    names = [f"model.layers.0.{module}" for module in modules]
    save_checkpoint({f"{name}.weight": w for name in names}, tmp_path / "bf16", config={"model_type": "llama"})
    (tmp_path / "f.json").write_text(json.dumps({name: i + 1.0 for i, name in enumerate(names)}))
    for layout in ("modelopt", "compressed-tensors"):
        options = ConvertOptions(layout=layout, input_amax=tmp_path / "f.json")
        convert_checkpoint(tmp_path / "bf16", tmp_path / layout, options)
        (amaxes,) = hugging_face.input_amaxes(open_checkpoint(tmp_path / layout), 1)
        assert {k: round(float(a), 4) for k, a in amaxes.items()} == dict(qkv=3, attention_out=4, mlp_up=6, mlp_down=7)
    convert_checkpoint(tmp_path / "bf16", tmp_path / "w4a16", ConvertOptions(weight_only=True))
    with pytest.raises(ValueError, match=r"model.layers.0.self_attn.q_proj.weight has no stored scale of activations"):
        hugging_face.input_amaxes(open_checkpoint(tmp_path / "w4a16"), 1)


@pytest.mark.long
def test_serve_measures_random_weights(decode, monkeypatch, capsys, tmp_path):
    pytest.importorskip("tqdm")
    serve = importlib.import_module("serve")
    tiny = dataclasses.replace(serve.LLAMA_8B, width=256, heads=4, kv_heads=2, mlp_width=160, vocabulary=300)
    monkeypatch.setattr(serve, "LLAMA_8B", tiny)
    arguments = "--preset llama-8b --layers 1 --batch 2 --prompt 3 --new 2 --kv nvfp4 --out"
    monkeypatch.setattr(sys, "argv", ["serve.py", *arguments.split(), str(tmp_path)])
    serve.main()
    assert "linear layers of the blocks: 0.6 MB bf16, 0.2 MB NVFP4 (0.281)" in capsys.readouterr().out
    results = json.loads((tmp_path / "serve.json").read_text())
    assert "text" not in results
    assert list(results["prompts"]["3"]["2"]) == ["bf16", "W4A16 KV4", "W4A4 KV4"]
    linear = (8 * 64 + 256 + 2 * 160) * 256 + 256 * 160
    assert results["memory"]["weight_bytes"]["NVFP4"] == {
        "linear": linear * 9 // 16 + 4 * 4,
        "all": linear * 9 // 16 + 4 * 4 + 2 * (3 * 256 + 2 * 300 * 256),
    }

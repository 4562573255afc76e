"""Options of a conversion and of its command: wrong ones are refused in one line, right ones are documented."""

import dataclasses
import io
import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import jax
import pytest
from checkpoints import (
    DOWN,
    GATE,
    INDEX,
    TE_MODELOPT,
    UP,
    draw_nothing,
    environment,
    files_of,
    model_of,
    refused,
    weight,
    write,
    write_model,
)

import jnvfp4
from jnvfp4 import cli
from jnvfp4.checkpoints import (
    CheckpointError,
    ConvertOptions,
    Exit,
    Record,
    VerificationError,
    convert_checkpoint,
    inspect,
    repack_checkpoint,
    verify_checkpoint,
)
from jnvfp4.checkpoints._convert.plan import make_plan
from jnvfp4.checkpoints._files.source import open_source
from jnvfp4.checkpoints.console import inspect_table, table
from jnvfp4.cli import main

DOCS = Path(__file__).parents[1] / "docs" / "checkpoints.md"


@pytest.fixture
def model(tmp_path) -> Path:
    return model_of(tmp_path / "in", {GATE: weight(16, 32), UP: weight(16, 32, 1), DOWN: weight(32, 16)})


# ---------------------------------------------------------------- ConvertOptions
@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"layout": "x"}, "layout is 'x'; expected modelopt or compressed-tensors or te"),
        ({"spec": "nvfp4"}, "spec is 'nvfp4'; expected a QuantSpec"),
        *(
            ({"spec": spec}, "expected rounding to nearest, no rht, and an amax per tensor or row")
            for spec in (jnvfp4.NVFP4_SR, jnvfp4.NVFP4_RHT, jnvfp4.WINDOW64)
        ),
        ({"experts": None}, "experts is None; expected keep or per-expert or stacked"),
        ({"strict": "no"}, "strict is 'no'; expected False or True"),
        ({"targets": "model.a"}, "targets is 'model.a'; expected a tuple of texts"),
        ({"ignore": (1,)}, "ignore is (1,); expected a tuple of texts"),
        ({"start_layers": -1}, "start_layers is -1; expected an integer, 0 or more"),
        ({"start_layers": True}, "start_layers is True; expected an integer, 0 or more"),
        ({"end_layers": 0.5}, "end_layers is 0.5; expected an integer, 0 or more"),
        ({"chunk_bytes": 0}, "chunk_bytes is 0; expected an integer, 1 or more"),
        ({"chunk_bytes": None}, "chunk_bytes is None; expected an integer, 1 or more"),
        ({"max_shard_bytes": 0}, "max_shard_bytes is 0; expected an integer, 1 or more"),
        ({"input_amax": "1.0"}, "input_amax is '1.0'; expected a number or the Path of a JSON file"),
        ({"input_amax": True}, "input_amax is True; expected a number or the Path of a JSON file"),
        *(
            ({"input_amax": x}, f"input_amax is {x!r}; expected a number above 1e-30 and below 1e30")
            for x in (0, -1.0, float("nan"), float("inf"), 1e-50, 1e39, 10**400)
        ),
        ({"spec": jnvfp4.ROW_SCALED}, "spec has an amax per row and layout is modelopt; expected layout te"),
        ({"ignore": ("re:(",)}, "ignore has 're:(', which is no regular expression"),
        ({"share": ("re:(",)}, "share has 're:(', which is no regular expression"),
        ({"share": (".*_proj",)}, "share has '.*_proj' without a group; expected one for the parent's name"),
        ({"input_amax": 0.5, "weight_only": True}, "input_amax is 0.5 and weight_only is used; expected one of them"),
        ({"input_amax": Path("s.json"), "layout": "te"}, "input_amax is s.json and layout is te; expected one of them"),
        ({"on_missing_amax": "siblings"}, "on_missing_amax is siblings and input_amax is None; expected a JSON file"),
        ({"hessians": "h"}, "hessians is 'h'; expected the Path of a file, or of a folder"),
        (
            {"hessians": Path("h"), "spec": jnvfp4.NVFP4_2D},
            "hessians is h and spec has 16x16 blocks; expected 1x16 blo",
        ),
        ({"hessians": Path("h"), "dequantize_input": "mxfp4"}, "hessians is h and dequantize_input is mxfp4; expected"),
        ({"kv_cache": "mxfp4"}, "kv_cache is 'mxfp4'; expected none or fp8"),
        ({"kv_cache": "fp8", "layout": "te"}, "kv_cache is fp8 and layout is te"),
        ({"kv_cache": "fp8", "layout": "compressed-tensors"}, "kv_cache is fp8 and layout is compressed-tensors"),
    ],
)
def test_options_that_are_refused(values, text):
    with pytest.raises(CheckpointError, match=re.escape(text)) as e:
        ConvertOptions(**values)
    assert e.value.code == 2


# ---------------------------------------------------------------- the command
WRONG_USAGE = [
    ("--workers 0", "argument --workers: invalid number '0'; expected 1 or more"),
    ("--workers -1", "--workers"),
    ("--workers two", "invalid number 'two'"),
    ("--format gguf", "argument --format: invalid choice: 'gguf'"),
    ("--recipe row-scaled --format te --2d", "--2d is used and --recipe is row-scaled; expected 1x16"),
    ("--recipe row-scaled", "--recipe has an amax per row and --format is modelopt; expected layout te"),
    ("--share (a)?.*_project", "--share has '(a)?.*_project', which puts no two modules together"),
    ("--share .*_proj", "--share has '.*_proj' without a group"),
    ("--ignore re:(", "--ignore has 're:(', which is no regular expression"),
    ("--targets re:(", "--targets has 're:(', which is no regular expression"),
    ("--ignore nothing", "--ignore has 'nothing', which matches no tensor"),
    ("--targets model nothing", "--targets has 'nothing', which matches no tensor"),
    ("--num-layers-at-start-in-bf16 -1", "--num-layers-at-start-in-bf16 is -1; expected an integer, 0 or more"),
    ("--num-layers-at-end-in-bf16 -1", "--num-layers-at-end-in-bf16 is -1; expected an integer, 0 or more"),
    ("--num-layers-at-end-in-bf16 1", "0 layers at the start and 1 at the end are kept, of 1; expected fewer"),
    ("--kv-cache fp8 --format te", "error: --kv-cache is fp8 and --format is te; expected layout modelopt"),
    ("--device tpu", "--device is 'tpu'; expected auto, cpu, or cuda:N"),
    ("--device cpu:99", "--device is 'cpu:99'; expected auto, cpu, or cuda:N"),
    ("--device cpu --backend cuda", "--backend is cuda and --device is cpu; expected a device of the"),
    ("--e4m3-max 448", "--e4m3-max is 448 and --recipe is nvfp4; expected --recipe 4over6"),
    ("--e4m3-max 256", "--e4m3-max is 256 and --recipe is nvfp4; expected --recipe 4over6"),
    ("--4over6-err-mode mae", "--4over6-err-mode is mae and --recipe is nvfp4; expected --recipe 4over6"),
    ("--4over6-err-mode mse --recipe row-scaled --format te", "--4over6-err-mode is mse and --recipe is row-scaled;"),
    ("--scales search --2d", "--scales is search and --2d is used; expected 1x16 blocks of recipe nvfp4 or row-scaled"),
    ("--scales search --backend cuda", "--scales is search and --backend is cuda; expected another one, as GPUs"),
    ("--scales search --recipe 4over6", "--scales is search and --recipe is 4over6; expected 1x16 blocks of recipe"),
    ("--hessians h --2d", "--hessians is h and --recipe has 16x16 blocks; expected 1x16 blocks, which GPTQ rounds"),
    ("--input-amax 1 --weight-only", "--input-amax is 1.0 and --weight-only is used; expected one of them"),
    ("--input-amax 1.0 --format te", "--input-amax is 1.0 and --format is te; expected one of them"),
    ("--input-amax nofile.json", "'nofile.json' is no file; expected a number or a JSON file"),
    ("--input-amax nan", "--input-amax is nan; expected a number above 1e-30 and below 1e30"),
    ("--max-shard-size 5xb", "invalid size '5xb'; expected a size such as 500MB or 5GB"),
    ("--max-shard-size 0", "invalid size '0'"),
    ("--device-chunk 0.5", "invalid size '0.5'"),
    ("--device-chunk 1ib", "invalid size '1ib'"),
    ("--subfolder ../in", "--subfolder is '../in'; expected a folder in the input"),
    ("--subfolder /", "--subfolder is '/'"),
]


@pytest.mark.parametrize(("arguments", "text"), WRONG_USAGE)
def test_wrong_usage_is_one_line(model, tmp_path, capsys, arguments, text):
    refused(model, tmp_path, re.escape(text), 2, *arguments.split(" "), capsys=capsys)


@pytest.mark.parametrize("size", ["2048", "2KiB", "2kib", "2.048kb", "0.000002048GB", "2048b"])
def test_sizes(size):
    assert cli._size(size) == 2048


def test_shards_are_of_at_most_the_size(model):
    """One byte less than two weights have is too little for both; a weight alone may have more."""
    plan = make_plan(open_source(model), ConvertOptions())
    sizes = [item.nbytes for item in plan.items.values()]
    two = sum(sizes[:2])
    for max_bytes, count in ((sum(sizes), 1), (sum(sizes) - 1, 2), (two, 2), (two - 1, 3), (1, 3)):
        cut = make_plan(open_source(model), ConvertOptions(max_shard_bytes=max_bytes))
        assert (INDEX in cut.files) == (count > 1)
        assert [item.name for items in cut.shards.values() for item in items] == sorted(plan.items)
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        assert list(cut.shards) == (names if count > 1 else ["model.safetensors"])


def test_shards_have_the_names_of_the_input(tmp_path):
    a, b = {DOWN: weight(32, 16)}, {"model.layers.0.self_attn.o_proj.weight": weight(16, 32)}
    one = write_model(tmp_path / "one", {"weights.safetensors": a})
    two = write_model(tmp_path / "two", {"a.safetensors": a, "b.safetensors": b})
    empty = write_model(tmp_path / "empty", {"a.safetensors": a, "b.safetensors": {}})
    (empty / INDEX).unlink()
    for directory, names in ((one, ["weights"]), (two, ["a", "b"]), (empty, ["model"])):
        plan = make_plan(open_source(directory), ConvertOptions())
        assert list(plan.shards) == [f"{name}.safetensors" for name in names]


COMMANDS = ("convert", "inspect", "lint", "verify", "repack", "dequantize", "diff")
FOUR_OVER_SIX = ["--recipe", "4over6"]
SEARCH = jnvfp4.QuantSpec(select="search")
SPECS = [
    ([], jnvfp4.NVFP4),
    (["--2d"], jnvfp4.NVFP4_2D),
    (FOUR_OVER_SIX, jnvfp4.spec.four_over_six("mse", e4m3_max=448)),
    ([*FOUR_OVER_SIX, "--2d"], jnvfp4.spec.four_over_six("mse", e4m3_max=448, block_rows=16)),
    ([*FOUR_OVER_SIX, "--e4m3-max", "256"], jnvfp4.spec.four_over_six("mse")),
    ([*FOUR_OVER_SIX, "--4over6-err-mode", "mae"], jnvfp4.spec.four_over_six(e4m3_max=448)),
    ([*FOUR_OVER_SIX, "--4over6-err-mode", "mae", "--e4m3-max", "256"], jnvfp4.spec.four_over_six()),
    (["--recipe", "row-scaled", "--format", "te"], jnvfp4.ROW_SCALED),
    (["--scales", "max6", "--2d"], jnvfp4.NVFP4_2D),
    (["--scales", "search"], SEARCH),
    (
        ["--scales", "search", "--recipe", "row-scaled", "--format", "te"],
        dataclasses.replace(jnvfp4.ROW_SCALED, select="search"),
    ),
]
FLAGS = {
    "--preset moe-experts": {"preset": "moe-experts"},
    "--targets a b": {"targets": ("a", "b")},
    "--ignore a b": {"ignore": ("a", "b")},
    "--num-layers-at-start-in-bf16 2": {"start_layers": 2},
    "--num-layers-at-end-in-bf16 3": {"end_layers": 3},
    "--weight-only": {"weight_only": True},
    "--input-amax 0.5": {"input_amax": 0.5},
    f"--input-amax {__file__} --on-missing-amax siblings": {
        "input_amax": Path(__file__),
        "on_missing_amax": "siblings",
    },
    "--kv-cache fp8": {"kv_cache": "fp8"},
    "--hessians h.safetensors": {"hessians": Path("h.safetensors")},
    "--experts stacked": {"experts": "stacked"},
    "--expert-layout kn": {"expert_layout": "kn"},
    "--dequantize-input fp8": {"dequantize_input": "fp8"},
    "--share (a)b (c)d": {"share": ("(a)b", "(c)d")},
    "--max-shard-size 5GB": {"max_shard_bytes": 5_000_000_000},
    "--on-nonfinite skip": {"on_nonfinite": "skip"},
    "--on-bad-shape keep": {"on_bad_shape": "keep"},
    "--strict": {"strict": True},
    "--device-chunk 1MiB": {"chunk_bytes": 1 << 20},
}
EVERY_FLAG = [(flags.split(" "), values) for flags, values in FLAGS.items()]
EVERY_FLAG += [(arguments, {"spec": spec}) for arguments, spec in SPECS]


@pytest.fixture
def called(model, tmp_path, monkeypatch):
    """Runs the command, and gives what the converter is called with."""

    def run(*arguments):
        found = []

        def convert(source, output, options, **others):
            found.append((options, others))
            raise CheckpointError("called")

        monkeypatch.setattr(cli, "convert_checkpoint", convert)
        assert main(["convert", str(model), str(tmp_path / "out"), *arguments]) == 3
        return found[0]

    return run


@pytest.mark.parametrize(("arguments", "values"), EVERY_FLAG, ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_flags_are_options(called, arguments, values):
    options, _ = called(*arguments)
    assert options == ConvertOptions(layout="te" if "te" in arguments else "modelopt", **values)


BACKENDS = {  # the device, and the implementation
    "": (None, None),
    "--backend cpu": ("cpu", "native"),
    "--backend jnp": (None, "reference"),
    "--backend jnp --device cpu:0": ("cpu", "reference"),
    "--device cpu": ("cpu", None),
}


@pytest.mark.parametrize("arguments", BACKENDS)
def test_backends_choose_device_and_kernels(called, arguments):
    (_, others), (device, implementation) = called(*arguments.split()), BACKENDS[arguments]
    assert others["device"] == (None if device is None else jax.devices(device)[0])
    assert others["implementation"] == implementation


def test_every_option_has_a_flag():
    named = {name for _, values in EVERY_FLAG for name in values} | {"layout"}
    assert named == {f.name for f in dataclasses.fields(ConvertOptions)}


def test_a_subfolder_is_the_whole_input(model, tmp_path, capsys, monkeypatch):
    draw_nothing(monkeypatch)
    (tmp_path / "top").mkdir()
    (tmp_path / "top" / "config.json").write_text("of the parent")
    model.rename(tmp_path / "top" / "text")
    (tmp_path / "top" / "text" / "tokenizer.json").write_text("{}")
    convert = ["convert", "--json", str(tmp_path / "top"), str(tmp_path / "out"), "--report"]
    assert main([*convert, str(tmp_path / "report"), "--subfolder", "text"]) == 0
    assert json.loads(capsys.readouterr().out)["quantized"] == 3
    convert_checkpoint(tmp_path / "top" / "text", tmp_path / "want")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "want")
    assert main([*convert, str(tmp_path / "report"), "--subfolder", "vae"]) == 3
    assert "top/vae: does not exist" in capsys.readouterr().err


def test_warnings_and_notes(tmp_path, capsys, monkeypatch):
    model = model_of(tmp_path / "in", {DOWN: weight(32, 16)})
    (model / "config.json").unlink()  # of which opening warns
    convert = ["convert", "--weight-only", str(model)]
    assert main([*convert, str(tmp_path / "a"), "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert re.search(r"bytes in all; .*\nwarning    \S*config.json: missing", out)
    assert not err
    draw_nothing(monkeypatch)
    report = ["--report", str(tmp_path / "report")]
    assert main([*convert, str(tmp_path / "a"), *report]) == 0
    warning, note = capsys.readouterr().err.splitlines()
    text = "config.json: missing, so the number of layers and the model type are unknown"
    assert re.fullmatch(f"warning: .*{text}", warning)
    assert note == "note: no report.png, as matplotlib is not installed"
    assert sorted(files_of(tmp_path / "report")) == ["report.csv", "report.json"]
    assert main([*convert, str(tmp_path / "b"), "--quiet", *report]) == 0
    assert not capsys.readouterr().err


def test_a_report_of_what_verification_found(model, tmp_path, capsys, monkeypatch):
    def failing(*_, **__):
        record = Record("b", (1,), "BF16", None, None, sha256="")
        raise VerificationError([CheckpointError("is another", tensor="a")], [record])

    monkeypatch.setattr(cli, "verify_checkpoint", failing)
    arguments = ["convert", str(model), str(tmp_path / "out"), "--report", str(tmp_path / "report")]
    assert main(arguments) == Exit.VERIFICATION
    assert "error: tensor 'a': is another" in capsys.readouterr().err
    assert [t["name"] for t in json.loads((tmp_path / "report" / "report.json").read_text())["tensors"]] == ["b"]


def test_a_report_that_cannot_be_written(model, tmp_path, capsys, monkeypatch):
    draw_nothing(monkeypatch)
    (tmp_path / "file").write_text("")
    for path in ("file", "file/report"):
        refused(model, tmp_path, "file: is a file; expected a directory", 2, "--report", str(tmp_path / path),
                capsys=capsys)  # fmt: skip
    refused(model, tmp_path, "proc: cannot be written into", 6, "--report", "/proc/report", capsys=capsys)
    out = tmp_path / "out"
    assert main(["convert", str(model), str(out), "--report", str(out / "report")]) == 0
    assert "report.json" in files_of(out / "report")


def test_who_reads_has_enough(model, monkeypatch, capsys):
    """No word of it; 141 as of a process that SIGPIPE ended."""
    read, write_end = os.pipe()
    os.close(read)
    with open(write_end, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main(["inspect", str(model)]) == 141
    assert not capsys.readouterr().err


def help_of(capsys, *arguments) -> str:
    with pytest.raises(SystemExit) as e:
        main([*arguments, "--help"])
    assert e.value.code == 0
    return capsys.readouterr().out


def every_help(capsys) -> list[str]:
    top = help_of(capsys)
    commands = re.findall(r"^    (\S+)  +\S", top, re.M)
    assert commands == [*COMMANDS, "doctor", "support", "conform"]
    return [top, *(help_of(capsys, command) for command in commands)]


def test_help_says_what_every_option_is_for(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for text in every_help(capsys):
        assert "--debug" in text
        options = re.findall(r"^  (-\S.*?)(?:  +|\n {20,})(\S.*)?$", text.partition("options:")[2], re.M)
        listed = re.findall(r"^  (-\S+)", text, re.M)
        assert len(options) == len(listed) > 0
        assert all(explanation for _, explanation in options)


def test_help_is_wrapped_at_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for text in every_help(capsys):
        usage, description = (part.splitlines() for part in text.split("\n\n")[:2])
        assert len(usage) <= 3
        assert all(len(line) < 80 for line in text.splitlines())
        assert all(len(line) + 1 + len(after.split()[0]) > 78 for line, after in pairwise(description))


def test_version_and_a_doctor_that_finds_something(monkeypatch, capsys):
    with pytest.raises(SystemExit) as e:
        main(["--version"])
    assert e.value.code == 0
    assert capsys.readouterr().out == f"jnvfp4 {jnvfp4.__version__}\n"
    for right in (False, True):
        monkeypatch.setattr(cli.doctor, "doctor", lambda full, right=right: right)
        assert main(["doctor"]) == (0 if right else 5)
        assert capsys.readouterr().err == ("" if right else "error: a kernel gives other bits than the reference\n")


def test_options_of_the_page_exist(capsys):
    """The page names the options that matter, and leaves the list to ``jnvfp4 convert --help``."""
    page = re.sub(r"^```.*?^```", "", DOCS.read_text(), flags=re.M | re.S)
    assert "`jnvfp4 convert --help`" in page
    documented = set(re.findall(r"(?<![\w-])--\w[\w-]+", page))
    assert len(documented) > 15
    offered = "".join(help_of(capsys, command) for command in ("convert", "lint", "verify"))
    assert documented <= set(re.findall(r"(?<![\w-])--\w[\w-]+", offered))


# ---------------------------------------------------------------- how the commands are used


def test_options_are_in_groups_with_an_example_each(capsys):
    text = help_of(capsys, "convert")
    groups = re.findall(r"^(\S.*):\n  example: ", text, re.M)
    assert re.findall(r"\[(.*?)\]", text.partition("\n\n")[0]) == groups
    listed = [len(re.findall(r"^  -", part, re.M)) for part in re.split(r"^\S.*:\n  example: ", text, flags=re.M)[1:]]
    assert all(2 <= n <= 15 for n in listed)


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_of_the_help_are_understood(capsys, monkeypatch, tmp_path, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "amaxes.json").write_text("{}")
    examples = re.findall(r"^ *example: (.*)$", help_of(capsys, command), re.M)
    assert examples
    for jnvfp4_, *arguments in map(shlex.split, examples):
        assert (jnvfp4_, arguments[0]) == ("jnvfp4", command)
        assert main(arguments) == 3
        assert re.search("error: MODEL(-NVFP4|-A)?: does not exist", capsys.readouterr().err)


def test_source_and_output_stand_where_they_do_in_every_command(model, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert main(["convert", "--quiet", str(model), "--dry-run", out]) == 0
    for wrong in ([str(model)], [], ["--model-dir", str(model), "--save-dir", out], ["--ignore", "x", str(model), out]):
        capsys.readouterr()
        assert main(["convert", *wrong]) == 2
        assert re.search("error: (the following arguments are required|unrecognized)", capsys.readouterr().err)
    for command in ("convert", "verify", "repack", "dequantize"):
        assert "SOURCE OUTPUT" in help_of(capsys, command).partition("\n\n")[0].replace("\n", " ")
    assert "SOURCE" in help_of(capsys, "inspect")


def test_a_verification_prints_a_table_and_ends_with_a_verdict(model, tmp_path, capsys):
    out = tmp_path / "out"
    convert_checkpoint(model, out)
    assert main(["verify", str(model), str(out)]) == 0
    printed, err = capsys.readouterr()
    header, *rows, last = printed.splitlines()
    assert not err
    assert header.split("  ")[0] == "weight"
    assert [row.split()[0] for row in rows] == sorted((DOWN, GATE, UP))
    errors = [r.error.relative_error for r in verify_checkpoint(model, out)]
    assert [float(row.split()[1]) for row in rows] == [round(e, 4) for e in errors]
    mean, worst = sum(errors) / 3, max(errors)
    sizes = f"{mean:.4f} on average and {worst:.4f} at most"
    assert last.startswith(f"verified: 3 weights have a relative error of {sizes}")
    assert last.endswith("; 0 other tensors are unchanged")
    assert main(["verify", str(model), str(out), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["verdict"], values["failures"], len(values["tensors"])) == (last, [], 3)


def test_convert_and_diff_print_text_for_people(model, tmp_path, capsys, monkeypatch):
    draw_nothing(monkeypatch)
    a, b = tmp_path / "a", tmp_path / "b"
    convert = ["convert", str(model), "--weight-only", "--quiet"]
    assert main([*convert, str(a)]) == 0
    did = capsys.readouterr().out
    assert re.fullmatch(r"quantized  3 weights\nkept       0 tensors\nbytes      \d+, 0.\d{3} of the source\n", did)
    assert main([*convert, str(b), "--report", str(tmp_path / "report")]) == 0
    header, *rows, last = capsys.readouterr().out.removesuffix(did).splitlines()
    assert (header.split()[0], len(rows), last.partition(":")[0]) == ("weight", 3, "verified")
    assert main(["diff", str(a), str(b)]) == 0
    assert capsys.readouterr().out == "no difference\n"
    assert main([*convert, str(b), "--overwrite", "--ignore", DOWN.removesuffix(".weight")]) == 0
    capsys.readouterr()
    assert main(["diff", str(a), str(b)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [["difference", "tensor"], ["others", DOWN]]


def test_a_source_and_its_conversion_are_not_exchanged(model, tmp_path, capsys):
    out = tmp_path / "out"
    convert_checkpoint(model, out)
    assert main(["verify", str(out), str(model)]) == 3
    error = capsys.readouterr().err
    assert f"{model}: is not quantized; expected the converted checkpoint\n" in error
    assert f"hint: the source comes first: swap it with '{out}', which is quantized" in error


def test_a_verification_that_fails_says_so_at_the_end(model, tmp_path, capsys):
    out = tmp_path / "out"
    convert_checkpoint(model, out)
    arguments = ["verify", str(model), str(out), "--max-rel-error", "0.01"]
    assert main(arguments) == 5
    printed, err = capsys.readouterr()
    *rows, last = printed.splitlines()
    assert len(rows) == 4
    finding = f"{out}: tensor '{DOWN}': relative error is 0.09"
    assert last.startswith(f"NOT VERIFIED: {finding}")
    assert last.endswith("; expected at most 0.01, and 2 more")
    assert err.startswith(f"error: {finding}")
    assert main([*arguments, "--json"]) == 5
    values = json.loads(capsys.readouterr().out)
    assert (values["verdict"], len(values["failures"])) == (last, 3)
    for wrong in ("-1", "nan"):
        assert main([*arguments[:4], wrong]) == 2
        assert f"--max-rel-error is {float(wrong)}; expected a number, 0 or more" in capsys.readouterr().err


def test_repack_and_dequantize_say_what_they_did(model, tmp_path, capsys):
    out = tmp_path / "out"
    weights = {GATE: weight(16, 32), UP: weight(16, 32, 1), DOWN: weight(32, 16)}
    write(model / "model.safetensors", {**weights, "norm": weight(1, 4)})
    convert_checkpoint(model, out)
    changed = repack_checkpoint(out, tmp_path / "x", "compressed-tensors")
    repack, did = ["repack", str(out), "--format", "compressed-tensors"], {"weights": 3, "fp8": 0, "copied": 1}
    assert main([*repack, str(tmp_path / "a")]) == 0
    assert capsys.readouterr().out == (
        "repacked 3 weights from modelopt to compressed-tensors, with the same codes and block scales, and copied 1 "
        f"other tensors\n{changed} global scales would change in the last bit on the way back\n"
    )
    assert main([*repack, str(tmp_path / "b"), "--json"]) == 0
    layouts = {"from": "modelopt", "to": "compressed-tensors"}
    assert json.loads(capsys.readouterr().out) == {**layouts, **did, "globals_that_do_not_come_back": changed}
    assert main(["dequantize", str(out), str(tmp_path / "c")]) == 0
    assert capsys.readouterr().out == "decoded 3 NVFP4 weights and 0 FP8 weights to bf16, and copied 1 other tensors\n"
    assert main(["dequantize", str(out), str(tmp_path / "d"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"from": "modelopt", "dtype": "bf16", **did}
    assert main(["repack", str(out), str(tmp_path / "e"), "--format", "te"]) == 2
    assert "error: --format is te, which stores an amax" in capsys.readouterr().err


# ---------------------------------------------------------------- where the output goes
def test_stdout_may_be_text_in_memory(monkeypatch):
    """It has no encoding."""
    for arguments in (["inspect", str(TE_MODELOPT)], ["inspect", str(TE_MODELOPT), "--json"]):
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        assert main(arguments) == 0
        assert "modelopt" in sys.stdout.getvalue()


PRINTING = [[command, "--help"] for command in COMMANDS]
PRINTING += [["--version"], ["inspect", str(TE_MODELOPT)], ["support"], ["doctor"], ["doctor", "--json"]]
needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
unwritable = pytest.mark.parametrize("stream", ["closed", pytest.param("/dev/full", marks=needs_full)])


def opened(stream):
    """A stream that the caller has closed, by ``>&-``, is None."""
    return nullcontext() if stream == "closed" else open(stream, "w")


@unwritable
@pytest.mark.parametrize("arguments", PRINTING, ids=lambda arguments: " ".join(Path(a).name for a in arguments))
def test_a_stdout_that_cannot_be_written(monkeypatch, capsys, stream, arguments):
    monkeypatch.setattr(cli.doctor, "report", lambda full: {"ok": True})
    monkeypatch.setattr(cli.doctor, "doctor", lambda full: print("ok"))
    with opened(stream) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(arguments) == 6
    reason = "Bad file descriptor" if stream == "closed" else "No space left on device"
    assert capsys.readouterr().err == f"error: stdout: cannot be written ({reason})\n"


@unwritable
def test_a_stderr_that_cannot_be_written_changes_no_exit_code(model, tmp_path, monkeypatch, capsys, stream):
    with opened(stream) as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        assert main(["convert", str(model), str(tmp_path / "out")]) == 0  # with a warning
        assert main(["inspect", str(tmp_path / "none")]) == 3
    assert capsys.readouterr().out.startswith("quantized  3 weights\n")


def test_no_file_takes_the_descriptor_of_a_closed_stream(model):
    """Into which libraries would write their messages."""
    code = (
        "import os, sys; from jnvfp4.cli import main; sys.exit(10 * main(sys.argv[1:]) + (os.open(os.devnull, 0) > 2))"
    )
    shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code, "inspect", str(model)]
    assert subprocess.run(shell, env=environment(), timeout=120).returncode == 10 * Exit.IO + 1


def test_inspect_merges_what_differs_in_the_numbers_of_layers_and_experts():
    """All layers but 3 have two experts, layer 3 has a third one."""
    experts = [(layer, expert) for layer in range(12) for expert in range(2 + (layer == 3))]
    roles = [[f"layers.{i}.q_proj", f"layers.{i}.k_proj"] for i in (2, 0, 10, 11)]
    description = inspect(TE_MODELOPT) | {
        "kept": ["norm", "w.0", "w.1", *(f"layers.{layer}.mlp.{e}.weight0" for layer, e in experts), "w.02", "a1.b"],
        "groups": [*roles, ["a", "b"], ["a.0.x", "b.0.x"], ["a.1.x", "b.1.x"]],
        "fp8": {"layers.1.o_proj": "tensor", "layers.2.o_proj": "tensor", "layers.3.o_proj": "channel"},
    }
    lines = inspect_table(description).splitlines()
    assert lines[lines.index("FP8        layers.{1-2}.o_proj, tensor") :] == [
        "FP8        layers.{1-2}.o_proj, tensor",
        "FP8        layers.3.o_proj, channel",
        "kept       norm",
        "kept       w.{0-1}",
        "kept       layers.{0-2,4-11}.mlp.{0-1}.weight0",
        "kept       layers.3.mlp.{0-2}.weight0",
        "kept       w.02",
        "kept       a1.b",
        "group      layers.{0,2,10-11}: q_proj, k_proj",
        "group      a, b",
        "group      a.0.x, b.0.x",
        "group      a.1.x, b.1.x",
    ]


def test_one_long_name_does_not_widen_all_lines():
    long = "x" * 5000
    first, second, third = table(("weight", "error"), [("a", "0.1"), (long, "0.2")]).splitlines()
    assert max(len(first), len(second)) < 200
    assert third.split() == [long, "0.2"]

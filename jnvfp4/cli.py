"""The command: jnvfp4 convert, inspect, verify, repack, dequantize, diff, doctor, support."""

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import jax

import jnvfp4
from jnvfp4 import support
from jnvfp4.convert.compare import diff, inspect
from jnvfp4.convert.console import inspect_table, plan_table, progress, tell
from jnvfp4.convert.convert import convert_checkpoint
from jnvfp4.convert.encode import CHUNK_BYTES
from jnvfp4.convert.errors import CheckpointError, Exit
from jnvfp4.convert.layouts import LAYOUTS
from jnvfp4.convert.options import ConvertOptions, check_meaning
from jnvfp4.convert.plan import Plan, make_plan
from jnvfp4.convert.policy import tensor_of
from jnvfp4.convert.report import summary, write_report
from jnvfp4.convert.rewrite import dequantize, repack
from jnvfp4.convert.source import open_source
from jnvfp4.convert.verify import VerificationError, as_json, verify

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_BROKEN_PIPE = 141  # as a shell says of a process that SIGPIPE ended


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmg]?i?b?)", text.lower(), re.ASCII)
    size = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"invalid size {text!r}; expected such as 500MB or 5GB")
    return size


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"invalid number {text!r}; expected 1 or more")
    return int(text)


def _input_scale(text: str) -> float | Path:
    try:
        return float(text)
    except ValueError:
        if not os.path.isfile(text):
            raise argparse.ArgumentTypeError(f"{text!r} is no file; expected a number or a JSON file") from None
        return Path(text)


def _device(text: str) -> jax.Device | None:
    """`cpu`, `cuda:N`, or `auto` for the converter's own choice."""
    if text == "auto":
        return None
    platform, _, number = text.partition(":")
    try:
        return jax.devices(platform)[int(number or 0)]
    except (RuntimeError, IndexError, ValueError) as e:
        raise CheckpointError(
            f"device is {text!r}", "auto, cpu, or cuda:N of a GPU that JAX has", code=Exit.USAGE
        ) from e


def _implementation(backend: str, device: str) -> Literal["native", "reference"] | None:
    if device != "auto" and backend in ("cuda", "cpu") and not device.startswith(backend):
        raise CheckpointError(f"backend is {backend} and device {device}", "a device of the backend", code=Exit.USAGE)
    return {"auto": None, "jnp": "reference"}.get(backend, "native")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CheckpointError(message, hint=f"{self.prog} --help", code=Exit.USAGE)


def _parser() -> argparse.ArgumentParser:
    common = _Parser(add_help=False)
    common.add_argument("--debug", action="store_true", help="an error with its traceback")
    text = "NVFP4 for JAX: Hugging Face checkpoints, and what runs here."
    parser = _Parser(prog="jnvfp4", description=text, parents=[common])
    parser.add_argument("--version", action="version", version=f"jnvfp4 {jnvfp4.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, parents=[common])

    _convert_arguments(command("convert", "quantize a checkpoint"))
    p = command("inspect", "what is in a checkpoint")
    p.add_argument("directory", type=Path, metavar="DIR", help="the checkpoint")
    p.add_argument("--json", action="store_true", help="JSON instead of a table")
    p = command("verify", "compare a converted checkpoint with its source")
    p.add_argument("source", type=Path, metavar="SRC", help="what was converted")
    p.add_argument("output", type=Path, metavar="OUT", help="what it became")
    p.add_argument("--max-rel-error", type=float, default=0.2, metavar="X", help="of a weight; 0.2 by default")
    p.add_argument("--expert-layout", choices=("auto", "nk", "kn"), default="auto", help=_EXPERT_LAYOUT)
    p = command("repack", "another layout, the same codes and block scales")
    p.add_argument("directory", type=Path, metavar="DIR", help="the checkpoint")
    p.add_argument("output", type=Path, metavar="OUT", help="a new or empty directory")
    p.add_argument("--format", choices=LAYOUTS, required=True, help="layout of the output")
    p = command("dequantize", "back to an ordinary checkpoint")
    p.add_argument("directory", type=Path, metavar="DIR", help="the checkpoint")
    p.add_argument("output", type=Path, metavar="OUT", help="a new or empty directory")
    p.add_argument("--dtype", choices=("bf16", "f16", "f32"), default="bf16", help="of decoded weights")
    p = command("diff", "where two checkpoints differ")
    p.add_argument("first", type=Path, metavar="A", help="a checkpoint")
    p.add_argument("second", type=Path, metavar="B", help="another")
    command("doctor", "what was built, what runs here, and whether its bits are right")
    command("support", "which operation has which kernels")
    return parser


_EXPERT_LAYOUT = "axes of experts in one tensor: [E, N, K] or [E, K, N]; auto goes by the model type"


def _convert_arguments(p: argparse.ArgumentParser) -> None:
    add, pattern = p.add_argument, "a module, all below it, re: and an expression, or with *"
    add("--model-dir", type=Path, required=True, metavar="DIR", help="the input: a directory or a file of safetensors")
    add("--subfolder", type=Path, metavar="NAME", help="the folder of the input that is converted, config included")
    add("--save-dir", type=Path, required=True, metavar="DIR", help="the output: a new or empty directory")
    add("--format", choices=LAYOUTS, default="modelopt", help="layout of the output; modelopt by default")
    add("--recipe", choices=("nvfp4", "4over6", "row-scaled"), default="nvfp4", help="how weights are quantized")
    add("--preset", choices=("linear", "moe-experts"), default="linear", help="which weights: all, or those of experts")
    add("--targets", nargs="+", default=(), metavar="PATTERN", help=f"only these weights: {pattern}")
    add("--ignore", nargs="+", default=(), metavar="PATTERN", help=f"kept: {pattern}")
    add("--num-layers-at-start-in-bf16", type=int, default=0, metavar="N", help="first decoder layers, kept")
    add("--num-layers-at-end-in-bf16", type=int, default=0, metavar="N", help="last decoder layers, kept")
    add(
        "--extra-high-precision-layers-hf",
        nargs="+",
        default=(),
        metavar="TEXT",
        help="kept: tensors with it in their name",
    )
    add("--extra-high-precision-layers-megatron", nargs="+", default=(), metavar="TEXT",
        help="the same where names are Megatron's")  # fmt: skip
    add("--4over6-err-mode", dest="error", choices=("mae", "mse"), help="error that 4over6 makes least; mae by default")
    add("--e4m3-max", type=int, choices=(448, 256), help="largest block scale of 4over6; 256 by default")
    add("--2d", dest="two_d", action="store_true", help="16x16 blocks instead of 1x16")
    add("--weight-only", action="store_true", help="activations stay in high precision")
    add("--input-scale", type=_input_scale, metavar="NUMBER|FILE",
        help="of all activations, 1.0 by default, or a JSON file with the amax of each module")  # fmt: skip
    add("--kv-cache", choices=("none", "fp8"), default="none", help="what the config says of the KV cache")
    add("--experts", choices=("keep", "per-expert", "stacked"), default="keep", help="one by one, or in one tensor")
    add("--expert-layout", choices=("auto", "nk", "kn"), default="auto", help=_EXPERT_LAYOUT)
    add("--dequantize-input", choices=("none", "fp8-block"), default="none", help="decode FP8 with 128x128 blocks")
    add("--high-precision-dtype", choices=("keep", "bf16"), default="keep", help="of kept tensors of real numbers")
    add("--zero-amax", choices=("one", "te-reference"), default="one", help="S_enc of a weight of zeros")
    add("--share", nargs="+", default=(), metavar="EXPRESSION", help=r"further groups: (PARENT)\.ROLE")
    add("--no-share-qkv", action="store_true", help="q, k and v each have their own global")
    add("--device", default="auto", metavar="auto|cpu|cuda:N", help="where, auto is cpu; the bytes are the same")
    add("--backend", choices=("auto", "cuda", "cpu", "jnp"), default="auto", help="kernels; the bytes are the same")
    add("--device-chunk", type=_size, default=CHUNK_BYTES, metavar="SIZE", help="of a weight at once; 64MiB by default")
    add("--workers", type=_count, default=2, metavar="N", help="tensors at once, 2 by default; the bytes are the same")
    add("--report", type=Path, metavar="DIR", help="verify, and write report.json, .csv and .png there")
    add("--max-shard-size", type=_size, metavar="SIZE", help="of output files, such as 5GB, instead of the input's")
    add("--on-nonfinite", choices=("error", "skip"), default="error", help="skip keeps a group with NaN or infinity")
    add("--on-bad-shape", choices=("error", "keep"), default="error", help="keep keeps K that is no multiple of 16")
    for flag, text in (
        ("--allow-empty", "a conversion may quantize nothing"),
        ("--allow-unmatched", "a rule may match nothing"),
        ("--strict", "a rule that splits a group is an error"),
        ("--cast-f64", "quantize F64 too, from float32"),
        ("--resume", "go on with what an interrupted conversion left"),
        ("--overwrite", "the output may have files"),
        ("--dry-run", "say what would be done, write nothing"),
        ("--json", "JSON instead of the table of --dry-run"),
        ("--json-progress", "progress and warnings as JSON, an object a line"),
        ("--quiet", "no progress, no warnings"),
    ):
        add(flag, action="store_true", help=text)


def _options(a: argparse.Namespace) -> ConvertOptions:
    # None is not given: what is given must mean something, also where it is what the default is.
    given = {name: v for name in ("error", "e4m3_max", "input_scale") if (v := getattr(a, name)) is not None}
    options = ConvertOptions(
        format=a.format,
        recipe=a.recipe,
        preset=a.preset,
        targets=tuple(a.targets),
        ignore=tuple(a.ignore),
        start_layers=a.num_layers_at_start_in_bf16,
        end_layers=a.num_layers_at_end_in_bf16,
        keep_containing=tuple(a.extra_high_precision_layers_hf),
        keep_containing_megatron=tuple(a.extra_high_precision_layers_megatron),
        block_rows=16 if a.two_d else 1,
        weight_only=a.weight_only,
        kv_cache=a.kv_cache,
        experts=a.experts,
        expert_layout=a.expert_layout,
        dequantize_input=a.dequantize_input,
        high_precision_dtype=a.high_precision_dtype,
        zero_amax=a.zero_amax,
        share=tuple(a.share),
        share_qkv=not a.no_share_qkv,
        max_shard_bytes=a.max_shard_size,
        on_nonfinite=a.on_nonfinite,
        on_bad_shape=a.on_bad_shape,
        allow_empty=a.allow_empty,
        allow_unmatched=a.allow_unmatched,
        strict=a.strict,
        cast_f64=a.cast_f64,
        chunk_bytes=a.device_chunk,
        **given,
    )
    check_meaning(options, given)
    return options


def _model(a: argparse.Namespace) -> Path:
    """The directory that is converted."""
    if a.subfolder is None:
        return a.model_dir
    if a.subfolder.is_absolute() or ".." in a.subfolder.parts:
        raise CheckpointError(f"subfolder is {str(a.subfolder)!r}", "a folder in --model-dir", code=Exit.USAGE)
    return a.model_dir / a.subfolder


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """What a conversion would do."""
    groups = {tensor_of(plan.decisions, m): list(g.members) for g in plan.groups for m in g.members}
    return {
        "format": plan.options.format,
        "ignore": plan.ignore,
        "tensors": [
            {
                "name": name,
                "action": "quantize" if d.quantizes else "keep",
                "reason": d.reason or None,
                "group": groups.get(name),
                "bytes": sum(p.nbytes for p in plan.outputs(d.entry)),
            }
            for name, d in sorted(plan.decisions.items())
        ],
        "bytes": plan.nbytes,
        "warnings": plan.source.warnings,
    }


def _check_directory(path: Path) -> None:
    """Whether a directory can be made there, or written into; leaves nothing, as it may be within the output."""
    there = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    if not there.is_dir():
        raise CheckpointError("is a file", "a directory", file=there, code=Exit.USAGE)
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as e:
        raise CheckpointError(f"cannot be written into ({e.strerror})", file=there, code=Exit.IO) from e


def _convert(a: argparse.Namespace) -> object:
    options, model = _options(a), _model(a)
    source = open_source(model)
    if a.dry_run:
        plan = plan_as_json(make_plan(source, options))
        return plan if a.json else plan_table(plan)
    if a.report is not None:
        _check_directory(a.report)
    total = sum(e.nbytes for e in source.entries())
    with progress(total, quiet=a.quiet, as_json=a.json_progress) as report:
        result = convert_checkpoint(
            model,
            a.save_dir,
            options,
            device=_device(a.device if a.device != "auto" or a.backend == "jnp" else a.backend),
            implementation=_implementation(a.backend, a.device),
            workers=a.workers,
            overwrite=a.overwrite,
            resume=a.resume,
            report=report,
        )
    if not a.quiet:
        for warning in result.warnings:
            tell("warning", warning, as_json=a.json_progress)
    if a.report is not None:
        try:
            records = verify(model, a.save_dir, expert_layout=a.expert_layout)
        except VerificationError as e:
            write_report(a.report, e.records, result)
            raise
        written = write_report(a.report, records, result)
        if not a.quiet and not any(path.suffix == ".png" for path in written):
            tell("note", "no report.png, as matplotlib is not installed", as_json=a.json_progress)
        return summary(records, result)
    return {
        "quantized": len(result.amaxes),
        "kept": sum(not d.quantizes for d in result.plan.decisions.values()),
        "bytes_before": result.bytes_before,
        "bytes_after": result.bytes_after,
    }


def _inspect(a: argparse.Namespace) -> object:
    found = inspect(a.directory)
    return found if a.json else inspect_table(found)


def _verify(a: argparse.Namespace) -> object:
    records = verify(a.source, a.output, a.max_rel_error, a.expert_layout)
    return {**summary(records), "tensors": as_json(records)}


def _warn(text: str) -> None:
    tell("warning", text)


def _repack(a: argparse.Namespace) -> object:
    return {"globals_that_do_not_come_back": repack(a.directory, a.output, a.format, warn=_warn)}


def _dequantize(a: argparse.Namespace) -> object:
    dequantize(a.directory, a.output, a.dtype.upper(), warn=_warn)
    return None


def _diff(a: argparse.Namespace) -> object:
    return vars(diff(a.first, a.second))


def _doctor(a: argparse.Namespace) -> object:
    if not support.doctor():
        raise CheckpointError("a kernel gives other bits than the reference", code=Exit.VERIFICATION)
    return None


def _support(a: argparse.Namespace) -> object:
    return support.support_table().removesuffix("\n")


_RUN: dict[str, Callable[[argparse.Namespace], object]] = {
    "convert": _convert,
    "inspect": _inspect,
    "verify": _verify,
    "repack": _repack,
    "dequantize": _dequantize,
    "diff": _diff,
    "doctor": _doctor,
    "support": _support,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: results to stdout, as JSON or a table; errors to stderr."""
    try:
        try:
            return _main(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # who reads has enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE


def _main(arguments: list[str]) -> int:
    debug = "--debug" in arguments
    try:
        a = _parser().parse_args(arguments)
        result = _RUN[a.command](a)
    except CheckpointError as e:
        if debug:
            raise
        print(f"error: {e}", file=sys.stderr)
        return int(e.code)
    except BrokenPipeError:
        raise
    except OSError as e:
        if debug:
            raise
        print(f"error: {e.filename or 'a file'}: {e.strerror}", file=sys.stderr)
        return int(Exit.IO)
    except KeyboardInterrupt:
        hint = "; finished shards are kept\nhint: --resume goes on" if "convert" in arguments[:1] else ""
        print(f"error: interrupted{hint}", file=sys.stderr)
        return int(Exit.INTERRUPTED)
    if result is not None:
        print(result if isinstance(result, str) else json.dumps(result, indent=2, ensure_ascii=False))
    return int(Exit.OK)

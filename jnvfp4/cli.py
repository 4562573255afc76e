"""Runs the command ``jnvfp4``: convert, inspect, verify, repack, dequantize, diff, doctor, support."""

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NoReturn

import jax

from . import __version__, support
from .checkpoints._convert.options import ConvertOptions, check_clashes
from .checkpoints._convert.plan import make_plan
from .checkpoints._files.errors import CheckpointError, CommandError, Exit
from .checkpoints._files.files import CHUNK_BYTES, checked_path, existing_parent
from .checkpoints._files.source import open_source
from .checkpoints._layouts.layouts import LAYOUTS
from .checkpoints.compare import diff, inspect
from .checkpoints.console import inspect_table, plan_as_json, plan_table, progress, tell
from .checkpoints.convert import convert_checkpoint
from .checkpoints.report_files import summary, write_report
from .checkpoints.rewrite import dequantize_checkpoint, repack_checkpoint
from .checkpoints.verify import VerificationError, as_json, verify_checkpoint
from .spec import NVFP4, NVFP4_2D, ROW_SCALED, QuantSpec, four_over_six

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_BROKEN_PIPE = 141  # the exit code that a shell shows for a process that SIGPIPE ended


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmg]?i?b?)", text.lower(), re.ASCII)
    size = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"invalid size {text!r}; expected a size such as 500MB or 5GB")
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
    """Finds the device ``cpu`` or ``cuda:N``; None for ``auto``, where the converter chooses."""
    if text == "auto":
        return None
    platform, _, number = text.partition(":")
    try:
        return jax.devices(platform)[int(number or 0)]
    except (RuntimeError, IndexError, ValueError) as e:
        raise CommandError(f"device is {text!r}", "auto, cpu, or cuda:N of a GPU that JAX has") from e


def _implementation(backend: str, device: str) -> Literal["native", "reference"] | None:
    if device != "auto" and backend in ("cuda", "cpu") and not device.startswith(backend):
        raise CommandError(f"backend is {backend} and device {device}", "a device of the backend")
    return {"auto": None, "jnp": "reference"}.get(backend, "native")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CommandError(message, hint=f"{self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    common = _Parser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    text = "NVFP4 for JAX: Hugging Face checkpoints, and what runs here."
    parser = _Parser(prog="jnvfp4", description=text, parents=[common])
    parser.add_argument("--version", action="version", version=f"jnvfp4 {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, parents=[common])

    _convert_arguments(command("convert", "quantize a checkpoint"))
    p = command("inspect", "describe a checkpoint: layout, kept tensors, groups, sizes")
    p.add_argument("directory", type=Path, metavar="DIR", help="the checkpoint")
    p.add_argument("--json", action="store_true", help="print JSON instead of a table")
    p = command("verify", "compare a converted checkpoint with its source")
    p.add_argument("source", type=Path, metavar="SRC", help="the checkpoint that was converted")
    p.add_argument("output", type=Path, metavar="OUT", help="the converted checkpoint")
    p.add_argument(
        "--max-rel-error", type=float, default=0.2, metavar="X", help="largest relative error of a weight (default 0.2)"
    )
    p.add_argument("--expert-layout", choices=("auto", "nk", "kn"), default="auto", help=_EXPERT_LAYOUT)
    p = command("repack", "write a checkpoint in another layout, with the same codes and block scales")
    p.add_argument("directory", type=Path, metavar="DIR", help="the checkpoint")
    p.add_argument("output", type=Path, metavar="OUT", help="a new or empty directory")
    p.add_argument("--format", choices=LAYOUTS, required=True, help="layout of the output")
    p = command("dequantize", "decode a checkpoint to an ordinary one")
    p.add_argument("directory", type=Path, metavar="DIR", help="the checkpoint")
    p.add_argument("output", type=Path, metavar="OUT", help="a new or empty directory")
    p.add_argument("--dtype", choices=("bf16", "f16", "f32"), default="bf16", help="dtype of the decoded weights")
    p = command("diff", "count where two checkpoints differ")
    p.add_argument("first", type=Path, metavar="A", help="a checkpoint")
    p.add_argument("second", type=Path, metavar="B", help="another checkpoint")
    command("doctor", "show what was built and what runs here, and check its bits")
    command("support", "show which operation has which kernels")
    return parser


_EXPERT_LAYOUT = "axes of experts in one tensor: [E, N, K] or [E, K, N]; auto decides by the model type"


def _convert_arguments(p: argparse.ArgumentParser) -> None:
    add, pattern = p.add_argument, "a module and all below it, re: and an expression, or a name with *"
    add(
        "--model-dir",
        type=Path,
        required=True,
        metavar="DIR",
        help="input: a directory of safetensors files, or one such file",
    )
    add("--subfolder", type=Path, metavar="NAME", help="convert this folder of the input instead, with its config")
    add("--save-dir", type=Path, required=True, metavar="DIR", help="output: a new or empty directory")
    add("--format", choices=LAYOUTS, default="modelopt", help="layout of the output (default modelopt)")
    add(
        "--recipe",
        choices=("nvfp4", "4over6", "row-scaled"),
        default="nvfp4",
        help="how weights are quantized (default nvfp4)",
    )
    add(
        "--preset",
        choices=("linear", "moe-experts"),
        default="linear",
        help="quantize all projections or those of experts",
    )
    add("--targets", nargs="+", default=(), metavar="PATTERN", help=f"quantize only these weights: {pattern}")
    add("--ignore", nargs="+", default=(), metavar="PATTERN", help=f"keep these weights: {pattern}")
    add("--num-layers-at-start-in-bf16", type=int, default=0, metavar="N", help="keep the first N decoder layers")
    add("--num-layers-at-end-in-bf16", type=int, default=0, metavar="N", help="keep the last N decoder layers")
    add(
        "--extra-high-precision-layers-hf",
        nargs="+",
        default=(),
        metavar="TEXT",
        help="keep tensors that have TEXT in their name",
    )
    add("--extra-high-precision-layers-megatron", nargs="+", default=(), metavar="TEXT",
        help="the same for a model with Megatron's names")  # fmt: skip
    add("--4over6-err-mode", dest="error", choices=("mae", "mse"), help="error that 4over6 minimizes (default mae)")
    add("--e4m3-max", type=int, choices=(448, 256), help="largest block scale of 4over6 (default 256)")
    add("--2d", dest="two_d", action="store_true", help="use 16x16 blocks instead of 1x16")
    add("--weight-only", action="store_true", help="keep activations in high precision")
    add("--input-scale", type=_input_scale, metavar="NUMBER|FILE",
        help="scale of all activations (default 1.0), or a JSON file with the amax of each module")  # fmt: skip
    add("--kv-cache", choices=("none", "fp8"), default="none", help="KV cache that the config asks for (default none)")
    add("--experts", choices=("keep", "per-expert", "stacked"), default="keep",
        help="leave experts as they are, give each its own tensors, or put all in one")  # fmt: skip
    add("--expert-layout", choices=("auto", "nk", "kn"), default="auto", help=_EXPERT_LAYOUT)
    add("--dequantize-input", choices=("none", "fp8-block"), default="none", help="decode FP8 with 128x128 blocks")
    add("--high-precision-dtype", choices=("keep", "bf16"), default="keep", help="cast kept floating-point tensors")
    add("--zero-amax", choices=("one", "te-reference"), default="one", help="S_enc of a weight of zeros")
    add(
        "--share",
        nargs="+",
        default=(),
        metavar="EXPRESSION",
        help=r"share a global scale in further groups: (PARENT)\.ROLE",
    )
    add("--no-share-qkv", action="store_true", help="give q, k and v global scales of their own")
    add(
        "--device",
        default="auto",
        metavar="auto|cpu|cuda:N",
        help="device that quantizes; auto is cpu (does not change the output)",
    )
    add(
        "--backend",
        choices=("auto", "cuda", "cpu", "jnp"),
        default="auto",
        help="which kernels to use (does not change the output)",
    )
    add(
        "--device-chunk",
        type=_size,
        default=CHUNK_BYTES,
        metavar="SIZE",
        help="bytes of a weight processed at once (default 64MiB)",
    )
    add(
        "--workers",
        type=_count,
        default=2,
        metavar="N",
        help="tensors processed at once (default 2; does not change the output)",
    )
    add("--report", type=Path, metavar="DIR", help="verify, and write report.json, .csv and .png into DIR")
    add(
        "--max-shard-size", type=_size, metavar="SIZE", help="size of output files, such as 5GB, instead of the input's"
    )
    add("--on-nonfinite", choices=("error", "skip"), default="error", help="skip: keep a group with NaN or infinity")
    add(
        "--on-bad-shape",
        choices=("error", "keep"),
        default="error",
        help="keep: keep a weight whose K is no multiple of 16",
    )
    for flag, text in (
        ("--allow-empty", "accept a conversion that quantizes nothing"),
        ("--allow-unmatched", "accept a rule that matches nothing"),
        ("--strict", "refuse a rule that splits a group"),
        ("--cast-f64", "quantize F64 weights too, after a cast to float32"),
        ("--resume", "continue an interrupted conversion"),
        ("--overwrite", "accept an output that has files"),
        ("--dry-run", "show what would be done, write nothing"),
        ("--json", "print JSON instead of the table of --dry-run"),
        ("--json-progress", "print progress and warnings as JSON, one object per line"),
        ("--quiet", "print no progress and no warnings"),
    ):
        add(flag, action="store_true", help=text)


def _options(a: argparse.Namespace) -> ConvertOptions:
    # None: the flag was not used. A flag without effect is an error, also with its default as value.
    explicit = {} if a.input_scale is None else {"input_scale": a.input_scale}
    options = ConvertOptions(
        layout=a.format,
        spec=_spec(a),
        preset=a.preset,
        targets=tuple(a.targets),
        ignore=tuple(a.ignore),
        start_layers=a.num_layers_at_start_in_bf16,
        end_layers=a.num_layers_at_end_in_bf16,
        keep_containing=tuple(a.extra_high_precision_layers_hf),
        keep_containing_megatron=tuple(a.extra_high_precision_layers_megatron),
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
        **explicit,
    )
    check_clashes(options, explicit)
    return options


def _spec(a: argparse.Namespace) -> QuantSpec:
    """Translates --recipe, --4over6-err-mode, --e4m3-max and --2d."""
    if a.recipe == "4over6":
        return four_over_six(a.error or "mae", e4m3_max=a.e4m3_max or 256, block_rows=16 if a.two_d else 1)
    for flag, value in (("--4over6-err-mode", a.error), ("--e4m3-max", a.e4m3_max)):
        if value is not None:
            raise CommandError(f"{flag} is {value} and --recipe is {a.recipe}", f"--recipe 4over6 with {flag}")
    if a.recipe == "row-scaled":
        if a.two_d:
            raise CommandError("--2d is used and --recipe is row-scaled", "1x16 blocks, without --2d")
        if a.format != "te":
            raise CommandError(
                f"--recipe is row-scaled and --format is {a.format}", "--format te, which has an amax for each row"
            )
        return ROW_SCALED
    return NVFP4_2D if a.two_d else NVFP4


def _model(a: argparse.Namespace) -> Path:
    """Finds the directory or file that is converted."""
    if a.subfolder is None:
        return a.model_dir
    if a.subfolder.is_absolute() or ".." in a.subfolder.parts:
        raise CommandError(f"subfolder is {str(a.subfolder)!r}", "a folder in --model-dir")
    return a.model_dir / a.subfolder


def _check_directory(path: Path) -> None:
    """Raises if a directory cannot be made or written into. It is not made, since it may be inside of the output."""
    directory = existing_parent(checked_path(path))
    if not directory.is_dir():
        raise CheckpointError("is a file", "a directory", file=directory, code=Exit.USAGE)
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as e:
        raise CheckpointError(f"cannot be written into ({e.strerror})", file=directory, code=Exit.IO) from e


def _convert(a: argparse.Namespace) -> object:
    options, model = _options(a), _model(a)
    source = open_source(model)
    if a.dry_run:
        plan = plan_as_json(make_plan(source, options))
        return plan if a.json else plan_table(plan)
    if a.report is not None:
        _check_directory(a.report)
    with progress(source.nbytes, quiet=a.quiet, as_json=a.json_progress) as on_progress:
        result = convert_checkpoint(
            model,
            a.save_dir,
            options,
            device=_device(a.device if a.device != "auto" or a.backend == "jnp" else a.backend),
            implementation=_implementation(a.backend, a.device),
            workers=a.workers,
            overwrite=a.overwrite,
            resume=a.resume,
            on_progress=on_progress,
        )
    if not a.quiet:
        for warning in result.warnings:
            tell("warning", warning, as_json=a.json_progress)
    if a.report is not None:
        try:
            records = verify_checkpoint(model, a.save_dir, expert_layout=a.expert_layout)
        except VerificationError as e:
            write_report(a.report, e.records, result)
            raise
        written = write_report(a.report, records, result)
        if not a.quiet and not any(path.suffix == ".png" for path in written):
            tell("note", "no report.png, as matplotlib is not installed", as_json=a.json_progress)
        return summary(records, result)
    return {
        "quantized": len(result.amaxes),
        "kept": sum(not item.decision.quantizes for item in result.plan.items.values()),
        "bytes_before": result.bytes_before,
        "bytes_after": result.bytes_after,
    }


def _inspect(a: argparse.Namespace) -> object:
    description = inspect(a.directory)
    return description if a.json else inspect_table(description)


def _verify(a: argparse.Namespace) -> object:
    records = verify_checkpoint(a.source, a.output, a.max_rel_error, a.expert_layout)
    return {**summary(records), "tensors": as_json(records)}


def _warn(text: str) -> None:
    tell("warning", text)


def _repack(a: argparse.Namespace) -> object:
    return {"globals_that_do_not_come_back": repack_checkpoint(a.directory, a.output, a.format, warn=_warn)}


def _dequantize(a: argparse.Namespace) -> object:
    dequantize_checkpoint(a.directory, a.output, a.dtype.upper(), warn=_warn)
    return None


def _diff(a: argparse.Namespace) -> object:
    return vars(diff(a.first, a.second))


def _doctor(a: argparse.Namespace) -> object:
    if not support.doctor():
        raise CommandError("a kernel gives other bits than the reference", code=Exit.VERIFICATION)
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
    """Runs the command and returns its exit code. Results go to stdout as JSON or a table, errors to stderr."""
    try:
        try:
            return _main(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader stopped reading, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE


def _main(arguments: list[str]) -> int:
    debug = "--debug" in arguments
    try:
        a = _parser().parse_args(arguments)
        result = _RUN[a.command](a)
    except CommandError as e:
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

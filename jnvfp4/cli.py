"""The command: jnvfp4 convert, inspect, verify, repack, dequantize, diff, doctor, support."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import jax

from jnvfp4 import support
from jnvfp4.convert.compare import diff, inspect
from jnvfp4.convert.console import inspect_table, plan_table, progress
from jnvfp4.convert.convert import convert_checkpoint
from jnvfp4.convert.errors import CheckpointError, Exit
from jnvfp4.convert.layouts import LAYOUTS
from jnvfp4.convert.options import ConvertOptions
from jnvfp4.convert.plan import Plan, make_plan
from jnvfp4.convert.policy import tensor_of
from jnvfp4.convert.report import summary, write_report
from jnvfp4.convert.rewrite import dequantize, repack
from jnvfp4.convert.source import open_source
from jnvfp4.convert.verify import as_json, verify

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def _size(text: str) -> int:
    for unit, factor in _UNITS.items():
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * factor)
    return int(text)


def _input_scale(text: str) -> float | Path:
    try:
        return float(text)
    except ValueError:
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
    parser = _Parser(prog="jnvfp4", description="NVFP4 for JAX: Hugging Face checkpoints, and what runs here.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)

    p = commands.add_parser("convert", help="quantize a checkpoint")
    p.add_argument("--model-dir", type=Path, required=True)
    p.add_argument("--save-dir", type=Path, required=True)
    p.add_argument("--format", choices=LAYOUTS, default="modelopt")
    p.add_argument("--recipe", choices=("nvfp4", "4over6", "row-scaled"), default="nvfp4")
    p.add_argument("--preset", choices=("linear", "moe-experts"), default="linear")
    p.add_argument("--targets", nargs="+", default=(), metavar="PATTERN")
    p.add_argument("--ignore", nargs="+", default=(), metavar="PATTERN")
    p.add_argument("--num-layers-at-start-in-bf16", type=int, default=0, metavar="N")
    p.add_argument("--num-layers-at-end-in-bf16", type=int, default=0, metavar="N")
    p.add_argument("--extra-high-precision-layers-hf", nargs="+", default=(), metavar="TEXT")
    p.add_argument("--extra-high-precision-layers-megatron", nargs="+", default=(), metavar="TEXT")
    p.add_argument("--4over6-err-mode", dest="error", choices=("mae", "mse"), default="mae")
    p.add_argument("--e4m3-max", type=int, choices=(448, 256), default=256)
    p.add_argument("--2d", dest="two_d", action="store_true", help="16x16 blocks")
    p.add_argument("--weight-only", action="store_true")
    p.add_argument("--input-scale", type=_input_scale, default=1.0, metavar="NUMBER|FILE")
    p.add_argument("--kv-cache", choices=("none", "fp8"), default="none")
    p.add_argument("--experts", choices=("keep", "per-expert", "stacked"), default="keep")
    p.add_argument("--expert-layout", choices=("auto", "nk", "kn"), default="auto")
    p.add_argument("--dequantize-input", choices=("none", "fp8-block"), default="none")
    p.add_argument("--high-precision-dtype", choices=("keep", "bf16"), default="keep")
    p.add_argument("--zero-amax", choices=("one", "te-reference"), default="one")
    p.add_argument("--share", nargs="+", default=(), metavar="EXPRESSION")
    p.add_argument("--no-share-qkv", action="store_true")
    p.add_argument("--device", default="auto", metavar="auto|cpu|cuda:N", help="where; the bytes are the same")
    p.add_argument("--backend", choices=("auto", "cuda", "cpu", "jnp"), default="auto", help="the bytes are the same")
    p.add_argument("--device-chunk", type=_size, default=64 << 20, metavar="SIZE", help="of a weight at once")
    p.add_argument("--workers", type=int, default=2, metavar="N", help="tensors at once; the bytes are the same")
    p.add_argument("--report", type=Path, metavar="DIR", help="verify, and write report.json, .csv and .png there")
    p.add_argument("--max-shard-size", type=_size, metavar="SIZE")
    p.add_argument("--on-nonfinite", choices=("error", "skip"), default="error")
    p.add_argument("--on-bad-shape", choices=("error", "keep"), default="error")
    for flag in (
        "--allow-empty",
        "--allow-unmatched",
        "--strict",
        "--cast-f64",
        "--resume",
        "--overwrite",
        "--dry-run",
        "--json",
        "--json-progress",
        "--quiet",
    ):
        p.add_argument(flag, action="store_true")

    p = commands.add_parser("inspect", help="what is in a checkpoint")
    p.add_argument("directory", type=Path)
    p.add_argument("--json", action="store_true")
    p = commands.add_parser("verify", help="compare a converted checkpoint with its source")
    p.add_argument("source", type=Path)
    p.add_argument("output", type=Path)
    p.add_argument("--max-rel-error", type=float, default=0.2)
    p.add_argument("--expert-layout", choices=("auto", "nk", "kn"), default="auto")
    p = commands.add_parser("repack", help="another layout, the same codes and block scales")
    p.add_argument("directory", type=Path)
    p.add_argument("output", type=Path)
    p.add_argument("--format", choices=LAYOUTS, required=True)
    p = commands.add_parser("dequantize", help="back to an ordinary checkpoint")
    p.add_argument("directory", type=Path)
    p.add_argument("output", type=Path)
    p.add_argument("--dtype", choices=("bf16", "f16", "f32"), default="bf16")
    p = commands.add_parser("diff", help="where two checkpoints differ")
    p.add_argument("first", type=Path)
    p.add_argument("second", type=Path)
    commands.add_parser("doctor", help="what was built, what runs here, and whether its bits are right")
    commands.add_parser("support", help="which operation has which kernels")
    return parser


def _options(a: argparse.Namespace) -> ConvertOptions:
    return ConvertOptions(
        format=a.format,
        recipe=a.recipe,
        preset=a.preset,
        targets=tuple(a.targets),
        ignore=tuple(a.ignore),
        start_layers=a.num_layers_at_start_in_bf16,
        end_layers=a.num_layers_at_end_in_bf16,
        keep_containing=tuple(a.extra_high_precision_layers_hf),
        keep_containing_megatron=tuple(a.extra_high_precision_layers_megatron),
        error=a.error,
        e4m3_max=a.e4m3_max,
        block_rows=16 if a.two_d else 1,
        weight_only=a.weight_only,
        input_scale=a.input_scale,
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
    )


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


def _convert(a: argparse.Namespace) -> object:
    options = _options(a)
    source = open_source(a.model_dir)
    if a.dry_run:
        plan = plan_as_json(make_plan(source, options))
        return plan if a.json else plan_table(plan)
    total = sum(e.nbytes for e in source.entries())
    with progress(total, quiet=a.quiet, as_json=a.json_progress) as report:
        result = convert_checkpoint(
            a.model_dir,
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
            print(f"warning: {warning}", file=sys.stderr)
    if a.report is not None:
        records = verify(a.model_dir, a.save_dir, expert_layout=a.expert_layout)
        write_report(a.report, records, result)
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


def _repack(a: argparse.Namespace) -> object:
    return {"globals_that_do_not_come_back": repack(a.directory, a.output, a.format)}


def _dequantize(a: argparse.Namespace) -> object:
    dequantize(a.directory, a.output, a.dtype.upper())
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
    debug = "--debug" in (arguments := list(sys.argv[1:] if arguments is None else arguments))
    try:
        a = _parser().parse_args([x for x in arguments if x != "--debug"])
        result = _RUN[a.command](a)
    except CheckpointError as e:
        if debug:
            raise
        print(f"error: {e}", file=sys.stderr)
        return int(e.code)
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

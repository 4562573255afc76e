"""Public quantizers of other libraries on the large case, each imported only when asked for.

None of them promises this library's bytes; how each is called is all that stands here. fouroversix, gemlite and
torchao run in torch and are timed by CUDA events around each call, so that launch gaps count.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from .timing import CALLS, WARM_UP, Timing, summary

BYTES_GIVEN, BYTES_INCLUDED = 2.5625, 4.5625  # an element of bfloat16: amax given, and found in a pass of its own


@dataclass(frozen=True)
class Peer:
    """``make`` imports the library and, from an amax, returns the quantizer of a [M, K] bfloat16 array."""

    name: str
    framework: Literal["jax", "torch"]
    bytes_per_element: float
    make: Callable[[float], Callable]


def _jax(amax: float) -> Callable:
    quantize = importlib.import_module("jax._src.cudnn.scaled_matmul_stablehlo").quantize
    config = jax.nn.get_scaled_dot_general_config("nvfp4", jnp.full((1,), amax / 2688, jnp.float32))
    return lambda x: quantize(x, config)


def _qwix(_amax: float) -> Callable:
    qwix = importlib.import_module("qwix")
    return lambda x: qwix.quantize(x, "nvfp4", channelwise_axes=(0,), tiled_axes={1: 16})


def _torchao(amax: float) -> Callable:
    torch = importlib.import_module("torch")
    quantize = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor").nvfp4_quantize
    scale = torch.tensor(amax / 2688, dtype=torch.float32, device="cuda")
    compiled = torch.compile(lambda x: quantize(x, 16, scale))
    return lambda x: compiled(x)


def _gemlite(_amax: float) -> Callable:
    return importlib.import_module("gemlite.quant_utils").scale_activations_nvfp4_triton_v5


def _fouroversix(rule: str, **options: Any) -> Callable[[float], Callable]:
    def make(_amax: float) -> Callable:
        library = importlib.import_module("fouroversix")
        config = library.QuantizationConfig(backend="triton", scale_rule=rule, **options)
        return lambda x: library.quantize_to_fp4(x, config)

    return make


PEERS = [
    Peer("jax.nn's nvfp4, scale given", "jax", BYTES_GIVEN, _jax),
    Peer("qwix, no tensor scale", "jax", BYTES_GIVEN, _qwix),
    Peer("torchao compiled, scale given", "torch", BYTES_GIVEN, _torchao),
    Peer("gemlite, amax included", "torch", BYTES_INCLUDED, _gemlite),
    *(
        Peer(
            f"fouroversix {rule}{' 2d' * tiles}, amax included", "torch", BYTES_INCLUDED, _fouroversix(rule, **options)
        )
        for tiles, options in ((False, {}), (True, {"block_scale_2d": True}))
        for rule in ("static_6", "mae", "mse")
    ),
]


def importable(x: jax.Array) -> list[tuple[Peer, Callable]]:
    """The peers that can be had here for such an array, ready to call; says of each other one why not."""
    found, amax = [], float(jnp.max(jnp.abs(x)))
    for peer in PEERS:
        try:
            f = peer.make(amax)
            if peer.framework == "jax":
                jax.jit(f).lower(x).compile()
            found.append((peer, f))
        except Exception as error:  # whatever another library does when it does not fit this machine
            _skip(peer, error)
    return found


def time_torch(found: list[tuple[Peer, Callable]], shape: tuple[int, ...]) -> list[tuple[Peer, Timing]]:
    """The torch ones on normal data, two tensors in turn."""
    timings = []
    for peer, f in found:
        if peer.framework == "torch":
            try:
                timings.append((peer, _by_events(f, shape)))
            except Exception as error:
                _skip(peer, error)
    return timings


def _skip(peer: Peer, error: Exception) -> None:
    print(f"peer skipped: {peer.name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


def _by_events(f: Callable, shape: tuple[int, ...]) -> Timing:
    torch = importlib.import_module("torch")
    inputs = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(WARM_UP + CALLS)]
    with torch.no_grad():
        for i, (start, end) in enumerate(events):
            start.record()
            f(inputs[i % 2])
            end.record()
    torch.cuda.synchronize()
    return Timing(*summary([1e3 * start.elapsed_time(end) for start, end in events[WARM_UP:]]), clock="cuda events")

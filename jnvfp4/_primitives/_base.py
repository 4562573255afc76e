"""How every primitive of jnvfp4 is put together.

A primitive's lowering is a ``custom_partitioning`` function whose body runs on one device's block: the FFI
call of the platform, or the reference. docs/internals.md says why each part is needed.
"""

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from .._core.mesh import AnyMesh, Axes, Shape, axes_of_dims, match_varying
from .._native import compat, load, self_check
from .._native.self_check import CASES, Refusal, Unchecked


class Backend(NamedTuple):
    """Says which code computes one device's block."""

    name: str  # "reference", "cpu" or "cuda"
    capability: int | None = 0  # of a GPU: 10 * major + minor; None if no device is known
    kernel: str | None = None  # the kernel of a product, if ``implementation`` names one
    refused: tuple[Refusal, ...] = ()  # what the self-check has found wrong
    split: bool = False  # whether a device may have a part of the operands; only ``CASES`` are told

    def refusal(self, kernel: str) -> str:
        """Says why a kernel is not used; empty if it may be."""
        return next((reason for name, reason in self.refused if name == kernel), "")


Body = Callable[..., Sequence[jax.Array]]


class Proposal(NamedTuple):
    """Holds the shardings that XLA proposes for a call."""

    mesh: AnyMesh
    operands: list[Axes]
    shapes: list[Shape]  # of the operands
    results: list[Axes]


# (operand axes, result axes, wrap): how one device computes its block. XLA moves the data if it differs from the
# proposal. `wrap` adds collectives to the computation of one device, which takes the operands, and by the keyword
# `params` other parameters.
Partition = tuple[list[Axes], list[Axes], Callable[[Body], Body]]

PRIMITIVES: list[Primitive] = []  # all that make_primitive has made


def bind(primitive: Primitive, *operands: jax.Array, params: Hashable, implementation: str | None) -> Any:
    """Calls ``primitive``; inside shard_map some operands may vary over devices that others are equal on."""
    return primitive.bind(*match_varying(*operands), params=params, implementation=implementation)


def make_primitive(
    name: str,
    *,
    abstract: Callable[..., Sequence[ShapedArray]],
    local: Callable[..., Sequence[jax.Array]],
    batch: Callable[..., tuple[Sequence[jax.Array], Sequence[int]]],
    partition: Callable[..., Partition],
    rule: Callable[..., tuple[list[list], list[list]]],
    empty: Callable[..., Sequence[jax.Array]] | None = None,
    missing: Callable[..., str] | None = None,
    sums: bool = False,
) -> Primitive:
    """Builds and registers a primitive with several results.

    Args:
      name: of the primitive, also of its FFI target.
      abstract: ``(params, *avals)`` -> result avals; all validation of shapes and dtypes.
      local: ``(params, backend, *arrays)`` -> results, on one device.
      batch: the vmap rule, ``(params, bind, args, dims)``; ``bind(params, *arrays)`` calls the primitive.
      partition: ``(params, Proposal)`` -> ``Partition``.
      rule: ``(params, *operand shapes)`` -> for each operand, then for each result, a name for every dimension.
        Dimensions of one name are sharded alike; a dimension named None is never sharded.
      empty: ``(params, *arrays)`` -> results where an operand has no elements; zeros if None.
      missing: ``(params, platform)`` -> why a platform that has kernels has none for these parameters; empty if it has.
      sums: whether results can be sums over devices. What takes them decides then how they are sharded, also on an
        Explicit mesh: a sum that is split at once is a reduce-scatter, and half of the bytes of an all-reduce.

    The primitive has two parameters: ``params``, one value that the hooks see, and ``implementation``, the lowering's.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    @functools.cache
    def eager(params: Hashable, implementation: Any) -> Callable:
        return jax.jit(lambda *operands: primitive.bind(*operands, params=params, implementation=implementation))

    def impl(*operands, params, implementation):
        with jax.disable_jit(False):  # there is nothing below jit: an eager call is a compiled one
            return eager(params, implementation)(*operands)

    def batcher(args, dims, *, params, implementation):
        def bind(params, *operands):
            return primitive.bind(*operands, params=params, implementation=implementation)

        return batch(params, bind, args, dims)

    primitive.def_impl(impl)
    primitive.def_abstract_eval(lambda *avals, params, implementation: list(abstract(params, *avals)))
    batching.primitive_batchers[primitive] = batcher
    ad.primitive_jvps[primitive] = functools.partial(_no_derivative, name)
    lower = _lowering_rule(name, _device_bodies(local, partition, rule), empty, missing, sums)
    mlir.register_lowering(primitive, functools.partial(lower, None))
    for platform in load.extensions():
        mlir.register_lowering(primitive, functools.partial(lower, platform), platform=platform)
    compat.needs_devices_in_lowering(primitive)
    PRIMITIVES.append(primitive)
    return primitive


def _lowering_rule(
    name: str, bodies: Callable, empty: Callable | None, missing: Callable | None, sums: bool
) -> Callable:
    """Returns the lowering of a primitive for a platform, or for all without kernels (None)."""

    def lower(platform: str | None, ctx, *operands, params, implementation):
        backend = _backend(name, platform, implementation, ctx)
        if missing and backend.name != "reference" and (reason := missing(params, backend.name)):
            backend = _reference_instead(name, implementation, reason)
        if name in CASES and backend.name != "reference" and not isinstance(implementation, Unchecked):
            backend = _without_refused(name, backend, ctx, params, implementation)
        # Where shard_map has made all axes manual, the block is that of one device.
        manual = any(AxisType.Manual in aval.sharding.mesh.axis_types for aval in ctx.avals_in)
        whole, rest = compat.partly_manual(ctx) if manual else (None, None)
        one_device, partitioned = bodies(backend, params, whole)
        body = one_device if manual and rest is None else partitioned
        if any(0 in aval.shape for aval in ctx.avals_in):  # kernels need not take arrays without elements
            zeros = lambda *_, **__: [jnp.zeros(aval.shape, aval.dtype) for aval in ctx.avals_out]  # noqa: E731
            body = functools.partial(empty or zeros, params)
        inner = compat.with_mesh(ctx) if rest is None else rest
        # Without the axes of shard_map that operands vary over: a loop of the body begins with zeros that do not vary.
        inner = inner.replace(avals_in=[_off_mesh_aval(aval) for aval in ctx.avals_in])
        with compat.without_constant_folding():
            results = mlir.lower_fun(body, multiple_results=True)(inner, *operands)
        return results if sums else compat.with_explicit_shardings(ctx, results)

    return lower


def _backend(name: str, platform: str | None, implementation: str | Unchecked | None, ctx: Any) -> Backend:
    if isinstance(implementation, Unchecked):
        implementation = implementation.name
    if implementation not in (None, "reference") and platform is None:
        raise NotImplementedError(
            f"{name}: implementation={implementation!r} has no kernel for this platform; built: "
            f"{sorted(load.extensions())}; use implementation=None or 'reference'"
        )
    if platform is None or implementation == "reference":
        return Backend("reference")
    kernel = None if implementation in (None, "native") else implementation
    capability = 0 if platform == "cpu" else compat.gpu_capability(ctx)
    return Backend(platform, capability, kernel)


def _without_refused(name: str, backend: Backend, ctx: Any, params: Hashable, asked: str | None) -> Backend:
    """Checks the paths of a program on devices whose kind they never ran on, and leaves out those that fail."""
    split = len(compat.devices(ctx)) > 1
    of_program = lambda wrong: CASES[name](params, backend._replace(refused=wrong, split=split), ctx.avals_in)  # noqa: E731
    backend = backend._replace(refused=self_check.refused(of_program, compat.local_devices(ctx)))
    if not (reason := backend.refusal("native")):
        return backend
    return _reference_instead(name, asked, reason)


def _reference_instead(name: str, asked: str | Unchecked | None, reason: str) -> Backend:
    if asked is not None:
        raise NotImplementedError(f"{name}: implementation={asked!r} cannot run here: {reason}")
    return Backend("reference")


def _device_bodies(local: Callable, partition: Callable[..., Partition], rule: Callable) -> Callable:
    """Returns the function from backend and parameters to the computation of one device, and the one XLA partitions."""

    @functools.cache  # one custom_partitioning for each: a new one would be traced and compiled again
    def bodies(backend: Backend, params: Hashable, whole: AnyMesh | None = None) -> tuple[Body, Body]:
        def one_device(*operands, params=params):
            return tuple(local(params, backend, *operands))

        def shardings(mesh, arrays):
            return tuple(NamedSharding(mesh, PartitionSpec(*axes)) for axes in arrays)

        def plan(mesh, operands, result_axes):
            shapes = [tuple(v.shape) for v in operands]
            return partition(params, Proposal(mesh, [axes_of_dims(v) for v in operands], shapes, result_axes))

        def partition_callback(mesh, operands, results):
            operand_axes, result_axes, wrap = plan(mesh, operands, [axes_of_dims(v) for v in results])
            body = _off_mesh(wrap(one_device))
            # Shardings are those of the axes that shard_map left automatic; collectives name devices of the whole mesh.
            return whole or mesh, body, shardings(mesh, result_axes), shardings(mesh, operand_axes)

        def infer_callback(mesh, operands, results):  # only where Shardy is switched off
            return shardings(mesh, plan(mesh, operands, [[None] * len(v.shape) for v in results])[1])

        def rule_callback(_mesh, operands, _results):
            return _shardy_rule(*rule(params, *(tuple(v.shape) for v in operands)))

        partitioned = custom_partitioning(lambda *operands: one_device(*operands))
        partitioned.def_partition(
            partition_callback, infer_sharding_from_operands=infer_callback, sharding_rule=rule_callback
        )
        return one_device, lambda *operands: partitioned(*operands)

    return bodies


def _shardy_rule(operands: list[list], results: list[list]) -> str:
    """Writes the names as a Shardy rule, in which None becomes a factor of its own.

    K, K/2 and K/16 share one factor: JAX gives it the smallest of the sizes, so that Shardy seldom proposes an axis
    that would split a block, and the partition callback drops one that does. Compound factors, (k 16), stop the
    compiler where K/16 does not divide by the axis. No factor is marked as a reduction or as one to replicate: the
    callback decides both, and Shardy's proposals are the same.
    """
    unnamed = (f"u{i}" for i in itertools.count())
    terms = [
        [" ".join(next(unnamed) if d is None else d for d in dims) for dims in side] for side in (operands, results)
    ]
    return " -> ".join(", ".join(side) for side in terms)


def _off_mesh(body: Body) -> Body:
    """Traces ``body`` without the mesh of ``jax.set_mesh`` and without ``jax.ensure_compile_time_eval``.

    An Explicit mesh would put its shardings on local blocks; JAX 0.11 runs the partition callback under it.
    """

    def local_body(*operands):
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())), compat.without_constant_folding():
            return body(*operands)

    return local_body


def _off_mesh_aval(aval: ShapedArray) -> ShapedArray:
    """Returns ``aval`` without manual axes and without an explicit sharding, of which jnp functions would ask more."""
    sharding = NamedSharding(AbstractMesh((), ()), PartitionSpec(*[None] * aval.ndim))
    return ShapedArray(aval.shape, aval.dtype, aval.weak_type, sharding=sharding)


def _no_derivative(name: str, *_args: Any, **_params: Any) -> None:
    raise NotImplementedError(
        f"{name} has no derivative: quantized values are integers, and none is defined for an unquantized operand. "
        "Differentiate jnvfp4.linear, which takes an NVFP4Tensor as w too, jnvfp4.dot_general, jnvfp4.fake_quant or "
        "jax.nn.dot_product_attention, or wrap the call in jax.lax.stop_gradient. jnvfp4.linear has first derivatives "
        "in reverse mode only"
    )

"""How every primitive of jnvfp4 is put together.

A primitive's lowering is a ``custom_partitioning`` function whose body runs on one device's block: the FFI
call of the platform, or the reference. docs/ffi.md says why each part is needed.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from .. import _compat, _native

Spec = list  # one entry per dimension: None, a mesh axis name, or a tuple of them
Body = Callable[..., Sequence[jax.Array]]


# (mesh, operand specs, operand shapes, **params) -> (operand specs, result specs, wrap): how one device computes
# its block, from the shardings XLA proposes. `wrap` adds collectives to the local computation, which takes the
# operands, and parameters to change by keyword.
Layout = Callable[..., tuple[list[Spec], list[Spec], Callable[[Body], Body]]]


def axes_of(entry: Any) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def ways(mesh: Any, entry: Any) -> int:
    return math.prod(mesh.shape[axis] for axis in axes_of(entry))


def divisible(mesh: Any, entry: Any, size: int, unit: int = 1) -> Any:
    """``entry`` if it splits ``size`` elements into whole multiples of ``unit``, else None."""
    return entry if (size // unit) % ways(mesh, entry) == 0 else None


def some_axis_divides(mesh: Any, blocks: int) -> bool:
    return all(n == 1 for n in mesh.shape.values()) or any(n > 1 and blocks % n == 0 for n in mesh.shape.values())


def block_factors(mesh: Any, axis: str, blocks: int) -> tuple[list[str], set[str]]:
    """Shardy factors of an axis in elements, bytes, blocks and windows, and those of them that must stay whole.

    One factor for all, if a mesh axis can split the blocks. Compound factors break where K/16 does not divide.
    """
    if some_axis_divides(mesh, blocks):
        return [axis] * 4, set()
    names = [f"{axis}{i}" for i in range(4)]
    return names, set(names)


def sharding_rule(ins: list[list[str]], outs: list[list[str]], whole: set[str], reduced: tuple[str, ...] = ()) -> Any:
    """The Shardy rule of these dimensions; ``whole`` factors must not be split, ``reduced`` ones may be summed over."""
    text = ", ".join(map(" ".join, ins)) + " -> " + ", ".join(map(" ".join, outs))
    order = dict.fromkeys(name for term in ins + outs for name in term)  # special factors go in order of appearance
    options = {
        "need_replication_factors": tuple(name for name in order if name in whole),
        "reduction_factors": tuple(name for name in order if name in reduced and name not in whole),
    }
    options = {k: v for k, v in options.items() if v}
    return (text, options) if options else text


def spec_of(aval: Any) -> Spec:
    """The sharding of a traced value or an operand of a partitioning callback, one entry per dimension."""
    spec = list(aval.sharding.spec)
    return spec + [None] * (len(aval.shape) - len(spec))


def typed(like: ShapedArray, shape: tuple[int, ...], dtype: Any, spec: Spec) -> ShapedArray:
    """An aval of ``shape`` that keeps the mesh and manual axes of ``like``; ``spec`` is its explicit sharding."""
    changes = {}
    if not like.sharding.mesh.empty:
        changes["sharding"] = like.sharding.update(spec=PartitionSpec(*spec))
    return like.update(shape=shape, dtype=jax.numpy.dtype(dtype), weak_type=False, **changes)


def check_explicit(op: str, aval: ShapedArray, axis: int, unit: int) -> None:
    """On an Explicit mesh, refuses a sharding that would split a block."""
    mesh = aval.sharding.mesh
    if mesh.empty:
        return
    entry = spec_of(aval)[axis]
    if divisible(mesh, entry, aval.shape[axis], unit) != entry:
        raise ValueError(
            f"{op}: axis {axis} of shape {aval.shape} is sharded over {entry!r} ({ways(mesh, entry)} ways), which "
            f"must split it into multiples of {unit}; reshard it first"
        )


def match_varying(*operands: jax.Array) -> tuple[jax.Array, ...]:
    """Gives all operands the manual axes of shard_map that any of them varies over."""
    varying = [jax.typeof(x).manual_axis_type.varying for x in operands]
    union: frozenset = frozenset().union(*varying)
    return tuple(
        lax.pcast(x, tuple(sorted(union - own)), to="varying") if union - own else x
        for x, own in zip(operands, varying, strict=True)
    )


def bind(primitive: Primitive, *operands: jax.Array, **params: Any) -> Any:
    return primitive.bind(*match_varying(*operands), **params)


def make_primitive(
    name: str,
    *,
    abstract: Callable[..., Sequence[ShapedArray]],
    local: Callable[..., Sequence[jax.Array]],
    batch: Callable[..., tuple[Sequence[jax.Array], Sequence[int]]],
    layout: Layout,
    rule: Callable[..., Any],
) -> Primitive:
    """Builds and registers a primitive with several results.

    Args:
      name: of the primitive, also of its FFI target.
      abstract: ``(*avals, **params)`` -> result avals; all validation of shapes and dtypes.
      local: ``(backend, *arrays, **params)`` -> results, on one device; backend is "reference", "cpu", "cuda"
        or "empty" (an operand has no elements).
      batch: the vmap rule, ``(args, dims, **params)``.
      layout: see ``Layout``.
      rule: ``(mesh, operand types, result types, **params)`` -> Shardy rule, a string or (string, options).
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    @functools.cache
    def eager(params: tuple) -> Callable:
        return jax.jit(lambda *operands: primitive.bind(*operands, **dict(params)))

    def impl(*operands, **params):
        with jax.disable_jit(False):  # there is nothing below jit: an eager call is a compiled one
            return eager(_key(params))(*operands)

    primitive.def_impl(impl)
    primitive.def_abstract_eval(lambda *avals, **params: list(abstract(*avals, **_static(params))))
    batching.primitive_batchers[primitive] = lambda args, dims, **params: batch(args, dims, **params)
    ad.primitive_jvps[primitive] = functools.partial(_no_derivative, name)

    @functools.cache
    def bodies(backend: str, key: tuple) -> tuple[Body, Body]:
        params = _static(dict(key))

        def one_device(*operands, **changed):
            return tuple(local(backend, *operands, **{**params, **changed}))

        def plan(mesh, operands):
            return layout(mesh, [spec_of(o) for o in operands], [tuple(o.shape) for o in operands], **params)

        def shardings(mesh, specs):
            return tuple(NamedSharding(mesh, PartitionSpec(*s)) for s in specs)

        def partition(mesh, operands, _results):
            operand_specs, result_specs, wrap = plan(mesh, operands)
            return (
                mesh,
                _off_mesh(wrap(one_device)),
                shardings(mesh, result_specs),
                shardings(mesh, operand_specs),
            )

        def infer(mesh, operands, _results):  # only where Shardy is switched off
            return shardings(mesh, plan(mesh, operands)[1])

        partitioned = custom_partitioning(lambda *operands: one_device(*operands))
        partitioned.def_partition(
            partition,
            infer_sharding_from_operands=infer,
            sharding_rule=lambda mesh, ins, outs: rule(mesh, ins, outs, **params),
        )
        return one_device, lambda *operands: partitioned(*operands)

    def lower(platform: str | None, ctx, *operands, **params):
        if params["implementation"] == "native" and platform is None:
            raise NotImplementedError(
                f"{name}: implementation='native' has no kernel for this platform; built: "
                f"{sorted(_native.extensions())}; use implementation=None or 'reference'"
            )
        backend = "reference" if platform is None or params["implementation"] == "reference" else platform
        if any(math.prod(aval.shape) == 0 for aval in ctx.avals_in):
            backend = "empty"
        one_device, partitioned = bodies(backend, _key(params))
        # custom_partitioning has no mesh inside a manual region: the block is local there anyway.
        manual = any(AxisType.Manual in aval.sharding.mesh.axis_types for aval in ctx.avals_in)
        body = one_device if manual or backend == "empty" else partitioned
        return mlir.lower_fun(body, multiple_results=True)(_compat.with_mesh(ctx), *operands)

    mlir.register_lowering(primitive, functools.partial(lower, None))
    for platform in _native.extensions():
        mlir.register_lowering(primitive, functools.partial(lower, platform), platform=platform)
    _compat.needs_devices_in_lowering(primitive)
    return primitive


def _off_mesh(body: Body) -> Body:
    """Traces ``body`` without the mesh of ``jax.set_mesh``: an Explicit one would put its shardings on local blocks."""

    def local_body(*operands):
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            return body(*operands)

    return local_body


def _key(params: dict[str, Any]) -> tuple:
    return tuple(sorted(params.items(), key=lambda item: item[0]))


def _static(params: dict[str, Any]) -> dict[str, Any]:
    """What the rules see: every parameter but the choice of implementation, which is the lowering's."""
    return {k: v for k, v in params.items() if k != "implementation"}


def _no_derivative(name: str, *_args: Any, **_params: Any) -> None:
    raise NotImplementedError(
        f"{name} has no derivative: quantized values are integers, and none is defined for an unquantized operand. "
        "Differentiate jnvfp4.linear, jnvfp4.dot_general or jnvfp4.fake_quant, or wrap the call in "
        "jax.lax.stop_gradient"
    )

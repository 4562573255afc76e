"""Moves quantized tensors between devices as bytes, and finds the amaxes of all weights of a step at once.

docs/sharding.md says which layouts of ``linear`` need which collectives.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
from jax import lax
from jax.typing import ArrayLike

from ._arguments import Implementation, as_array, check_spec, no_tensor
from ._gather import Placement, as_gather
from ._keys import entered_amaxes
from ._linear import takes_weight_amax
from ._patterns import check_path_pattern, matches_path
from ._weight_amax import WeightAmax, find_weight_amaxes
from .ops import quantize
from .policy import Layer, Policy, path_of_weight, weights_in
from .spec import QuantSpec
from .tensor import NVFP4Tensor, with_float_scale, with_scale_bytes


# ---------------------------------------------------------------- gathers
def all_gather(q: NVFP4Tensor, axis_name: str | tuple[str, ...], *, axis: int = 0) -> NVFP4Tensor:
    """Concatenates the tensors of devices, inside ``jax.shard_map``; codes and scales travel as bytes.

    Args:
      q: the part [..., M, K] of each device, of the same shape on all.
      axis_name: the mesh axis, or a tuple of them, over which the parts are gathered: manual axes of the shard_map
        around the call.
      axis: along which axis of the values they are concatenated. Along the last one, K, parts begin with whole blocks.

    Returns:
      The whole, with the same values on all devices of ``axis_name``. (JAX still counts it as varying, as the result of
      ``lax.all_gather``: to return it from the shard_map as replicated, pass ``check_vma=False``.) Its amax is gathered
      only if it has that axis: for scope "row" and "window64", or where each matrix has an amax. Otherwise all devices
      must have the same amax: quantize with ``amax=jax.lax.pmax(jnp.max(jnp.abs(x)), axis_name)``, or for scope "row"
      the largest magnitude of each row.

    Raises:
      ValueError: there is no such axis of ``q`` or of the mesh; or the amax may differ between devices.
      TypeError: ``q`` is not an NVFP4Tensor.
    """
    op = "all_gather"
    if not isinstance(q, NVFP4Tensor):
        raise no_tensor(op, "q", q)
    if isinstance(axis, bool) or not isinstance(axis, int) or not -q.ndim <= axis < q.ndim:
        raise ValueError(
            f"{op}: axis must be an integer from {-q.ndim} to {q.ndim - 1} for shape {q.shape}, got {axis!r}"
        )
    axis %= q.ndim
    names = set(_axis_names(op, axis_name))
    manual = set(jax.sharding.get_abstract_mesh().manual_axes)
    if missing := sorted(names - manual, key=str):
        raise ValueError(
            f"{op}: axis_name must be manual axes of a shard_map around the call, {sorted(manual)}, got {missing[0]!r}"
        )
    whole_amax = axis < q.amax.ndim
    if not whole_amax and (varying := names & jax.typeof(q.amax).manual_axis_type.varying):
        raise ValueError(
            f"{op}: the amax of q, of shape {q.amax.shape}, must be the same on all devices, got one that varies over "
            f"{sorted(varying)}; quantize with amax=jax.lax.pmax({_amax_text(q)}, {axis_name!r})"
        )

    def gather(part: jax.Array) -> jax.Array:
        return lax.all_gather(part, axis_name, axis=axis, tiled=True)

    t = with_scale_bytes(q)
    amax = gather(t.amax) if whole_amax else t.amax
    return with_float_scale(replace(t, data=gather(t.data), scale=gather(t.scale), amax=amax))


def _axis_names(op: str, axis_name: Any) -> tuple[str, ...]:
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{op}: axis_name must be a string or a tuple of strings, got {axis_name!r}")
    return names


def _amax_text(q: NVFP4Tensor) -> str:
    return "jnp.max(jnp.abs(x), -1)" if q.format.amax_scope == "row" else "jnp.max(jnp.abs(x))"


def gather_quantized(
    w: ArrayLike,
    spec: QuantSpec,
    *,
    sharded: Placement,
    gathered: Placement,
    amax: ArrayLike | None = None,
    key: jax.Array | None = None,
    implementation: Implementation = None,
) -> NVFP4Tensor:
    """Quantizes an array where it is and gathers the bytes, on an Auto or an Explicit mesh.

    It has no derivative, because bytes have none. Training uses ``jnvfp4.linear(x, w, w_gather=(sharded, gathered))``.

    Args:
      w: [..., M, K], float32, bfloat16 or float16.
      spec: as in ``quantize``.
      sharded: how the values are split where they are quantized, as a NamedSharding or, where the mesh is known (that
        of w, or of ``jax.set_mesh``), a PartitionSpec. Each device must have whole blocks.
      gathered: how the result is split.
      amax: as in ``quantize``.
      key: as in ``quantize``.
      implementation: as in ``quantize``.

    Returns:
      The tensor of ``quantize(w, spec)``, bit for bit, with the sharding ``gathered``.

    Raises:
      ValueError, TypeError: as in ``quantize``; or a sharding splits a block or does not fit the mesh.
      NotImplementedError: it is differentiated with respect to w.
    """
    op = "gather_quantized"
    check_spec(op, "spec", spec)
    array = as_array(op, "w", w)
    for name, placement in (("sharded", sharded), ("gathered", gathered)):
        if not isinstance(placement, Placement):
            raise TypeError(f"{op}: {name} must be a PartitionSpec or a NamedSharding, got {placement!r}")
    if array.ndim < 2:
        raise ValueError(f"{op}: w must have rank 2 or more, got w.shape={array.shape}")
    units = (*(1,) * (array.ndim - 2), spec.block_rows, spec.unit)
    gather = as_gather(op, "", (sharded, gathered), array, array.shape, units)
    kept = gather.constrain(_without_derivative(array))
    return gather.gather(quantize(kept, spec, amax=amax, key=key, implementation=implementation))


@jax.custom_jvp
def _without_derivative(w: jax.Array) -> jax.Array:
    return w


@_without_derivative.defjvp
def _no_derivative(*_: Any) -> Any:
    raise NotImplementedError(
        "gather_quantized has no derivative, because packed bytes have none; training uses "
        "jnvfp4.linear(x, w, w_gather=(sharded, gathered)), and jax.lax.stop_gradient(w) says that w has no gradient"
    )


# ---------------------------------------------------------------- amaxes of weights
def weight_amax(params: Any, policy: Policy, *, stacked: str | Callable[[str], bool] | None = None) -> Any:
    """Finds the amax of every weight that a policy quantizes, over devices by one all-reduce for all of them.

    Call it inside the jitted step and outside a loop over layers. ``linear`` takes one as ``w_amax``;
    ``with step_amax(...)`` gives them to the layers of a model. Either rounds it to the dtype that the layer has cast
    the weight to.

    Args:
      params: a tree of parameters, as ``Policy.explain`` takes it: the layers are the arrays of two or more axes named
        kernel, weight or w. On a mesh they may be sharded in any way.
      policy: which of them are quantized, and how.
      stacked: a regular expression for the whole paths of layers, or a function of the path, that selects the weights
        [L, ...] whose first axis counts the layers of a loop, or experts: each has an amax of its own. There is none
        for weights with both axes, [L, E, ...]; ``linear`` finds theirs.

    Returns:
      A tree like ``params``: for a weight that is quantized by an amax of the whole, a ``WeightAmax``, whose value is
      float32 () or, if stacked, [L]; for all else None. They have no gradient.

    Raises:
      ValueError: as in ``Policy.plan``; or two arrays have the path of one layer.
      TypeError: an argument is of another type.
    """
    op = "weight_amax"
    if not isinstance(policy, Policy):
        raise TypeError(f"{op}: policy must be a jnvfp4.Policy, got {policy!r}")
    if stacked is not None:
        check_path_pattern(op, "stacked", stacked)
    found = weights_in(params)
    is_stacked = {path: stacked is not None and matches_path(stacked, path) for path in found}
    if stacked is not None and not any(is_stacked.values()):
        raise ValueError(
            f"{op}: stacked must select a layer, got {stacked!r}, which selects none of {', '.join(found)}"
        )
    layers = [Layer(path, tuple(w.shape), stacked=is_stacked[path]) for path, w in found.items()]
    plan = policy.plan(layers)
    wanted = [path for path, d in plan.items() if d.recipe is not None and takes_weight_amax(d.recipe)]
    amaxes = find_weight_amaxes([(path, found[path], is_stacked[path]) for path in wanted])
    by_path: dict[str | None, WeightAmax] = dict(zip(wanted, amaxes, strict=True))
    return jax.tree_util.tree_map_with_path(lambda keys, _: by_path.get(path_of_weight(keys)), params)


@contextmanager
def step_amax(amaxes: Any) -> Iterator[None]:
    """Gives the layers of a model the amaxes of their weights: ``with step_amax(weight_amax(params, policy)): ...``.

    Each layer takes that of its path; where it is stacked, the one that ``jnvfp4.layer_index`` says, which the loop
    over the stack must enter, and no other loop. The layers are those of ``jnvfp4.flax`` and ``jnvfp4.qwix``, and every
    ``DotGeneral`` with a path. Enter it inside the jitted step, as ``jnvfp4.step_key``.

    Args:
      amaxes: the tree of ``weight_amax``. Where it has None, or where a layer's recipe takes no amax of weights, the
        layer does what it does without ``step_amax``.

    Raises:
      TypeError: ``amaxes`` is not such a tree.
      ValueError: from a layer: ``amaxes`` does not have its path, or has the amax of other weights, such as that of a
        whole stack, or the layer's place in the stack is not known; or they are constants of the function that is being
        traced, which would be the same in every step.
    """
    known = lambda leaf: leaf is None or isinstance(leaf, WeightAmax)  # noqa: E731
    leaves = jax.tree_util.tree_leaves_with_path(amaxes, is_leaf=known)
    wrong = [leaf for _, leaf in leaves if not known(leaf)] or ([] if leaves and amaxes is not None else [amaxes])
    if wrong:
        raise TypeError(f"step_amax: amaxes must be a tree of weight_amax, with WeightAmax and None, got {wrong[0]!r}")
    paths = ((path_of_weight(keys), amax) for keys, amax in leaves)
    with entered_amaxes({path: amax for path, amax in paths if path is not None}):
        yield

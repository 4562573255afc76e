"""``prepack_weight``, which puts the block scales of a frozen weight where Blackwell reads them."""

from ._arguments import no_tensor
from ._primitives._operands import check_parts
from .packed import PackedWeight, pack_tiles
from .tensor import NVFP4Tensor


def prepack_weight(w: NVFP4Tensor) -> PackedWeight:
    """Puts the block scales of ``w`` into the tiles that the FP4 tensor cores of Blackwell read.

    Call it once, when a program loads its weights. ``sm100_cublaslt_nvfp4``, the kernel of Blackwell for more than 64
    rows, then reads the tiles as they are, and does not make them on each call. This has been compiled, not run on such
    a GPU. Every other kernel gets the scales of the tiles as rows again, on each call, so nothing is gained there.

    Args:
      w: an NVFP4Tensor [..., N, K] of amax scope "tensor" or "row".

    Returns:
      The PackedWeight, for ``matmul_nt`` as ``b`` and ``linear`` as ``w``. Results are those of ``w``, bit for bit.

    Raises:
      TypeError, ValueError: ``w`` is no NVFP4Tensor, its parts do not fit together, or it has amax scope "window64".
    """
    op = "prepack_weight"
    if not isinstance(w, NVFP4Tensor):
        raise no_tensor(op, "w", w)
    check_parts(op, "w", (w.data, w.scale, w.amax), w.format)
    if w.format.amax_scope == "window64":
        raise ValueError(
            f'{op}: w must have amax_scope "tensor" or "row", got "window64", whose products read no tiles; pass w as '
            "it is"
        )
    return pack_tiles(w)

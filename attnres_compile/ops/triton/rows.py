"""What the kernels share: products of rows, and the gradient that reaches a source."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def products(a, b, c):
    """``<a, b>`` and ``<a, c>`` of rows, in one reduction: its barriers are what a row's warps wait for."""
    return tl.split(tl.sum(tl.join(a * b, a * c), axis=1))


@triton.jit
def rms_and_dot(x, k, eps, D):
    """``rsqrt(mean(x^2) + eps)`` and ``<x, k>`` of rows, with zeros where the tile is larger than d."""
    square, dot = products(x, x, k)
    return tl.rsqrt(square / D + eps), dot


@triton.jit
def source_gradient(g, weight, x, k, r, z, grad_dot, D):
    """Gradient ``[rows, d]`` of a source: through the weighted sum, and through its logit ``r * z``.

    Args:
        g: gradient of the weighted sum ``[rows, d]``.
        weight: the source's weight ``[rows]``.
        x: the source ``[rows, d]``.
        k: the key ``[1, d]``.
        r: ``1/rms`` of the source ``[rows]``.
        z: ``<x, k>`` ``[rows]``.
        grad_dot: gradient of ``z`` ``[rows]``.
        D: features.
    """
    # Not r * r * r, which underflows for sources near 1e18.
    along_x = grad_dot * z * r * r / D
    return weight[:, None] * g + grad_dot[:, None] * k - along_x[:, None] * x

"""What the kernels share: products of rows, a softmax over sources as they come, norms, a source's gradient."""

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
def softmax_step(m, l, s):
    """One more logit ``s`` in a softmax over sources as they come.

    Returns the largest logit, the sum of exponentials, and the factors of what was summed before and of what is added.
    A NaN stays one: phase 1 hands the largest logit on.
    """
    largest = tl.maximum(m, s, propagate_nan=tl.PropagateNan.ALL)
    before, now = tl.exp(m - largest), tl.exp(s - largest)
    return largest, l * before + now, before, now


@triton.jit
def normalise(h, valid, inside, norm_eps, CENTRED: tl.constexpr, D):
    """The norm of ``h [rows, d]`` without weight and bias, and the factor ``[rows]`` that it multiplied with."""
    if CENTRED:
        h = tl.where(inside, h - (tl.sum(h, axis=1) / D)[:, None], 0.0)
    # Rows past the end would be NaN with an eps of zero, and reach the sums over rows.
    r = tl.where(valid, tl.rsqrt(tl.sum(h * h, axis=1) / D + norm_eps), 0.0)
    return h * r[:, None], r


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

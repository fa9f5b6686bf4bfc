"""The kernels in plain PyTorch, on any device: factored, source by source, without a stack and without keys.

Every set of kernels (this one, ``cpu``, ``triton``) has these functions with these signatures. ``key`` is the product
of key-norm weight and pseudo-query, ``[d]`` or, for S reads, ``[S, d]``, in the compute dtype: fp32, and fp64 for fp64.
Sources may have any strides; results are contiguous. Nothing but the results is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for the half types, the dtype itself for fp32 and fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """``rsqrt(mean(x^2) + eps)`` over the last axis of ``x [..., d]``, without a full-size temporary."""
    return torch.rsqrt(torch.linalg.vector_norm(x, dim=-1).square() / x.shape[-1] + eps)


def depth_attention(sources: Sequence[Tensor], key: Tensor, eps: float, scale: float) -> Tensor:
    """``scale * sum_i softmax_i(inverse_rms(v_i) <v_i, key>) v_i``: ``[..., d]`` in the sources' dtype."""
    xs = [v.to(key.dtype) for v in sources]
    _, _, weights = _weights(xs, key, eps)
    return _weighted_sum(xs, weights * scale).to(sources[0].dtype)


def depth_attention_backward(
    grad: Tensor, sources: Sequence[Tensor], key: Tensor, eps: float, scale: float
) -> tuple[list[Tensor], Tensor]:
    """Gradients of the sources, in their dtype, and of ``key``."""
    xs = [v.to(key.dtype) for v in sources]
    rs, dots, weights = _weights(xs, key, eps)
    g = grad.to(key.dtype) * scale
    projected = torch.stack([(g * x).sum(-1) for x in xs])
    grad_logits = weights * (projected - (weights * projected).sum(0))
    grads, grad_key = [], torch.zeros_like(key)
    for source, x, r, z, weight, ds in zip(sources, xs, rs, dots, weights, grad_logits, strict=True):
        through_logits = _source_gradient(x, key.unsqueeze(0), r, z.unsqueeze(0), ds.unsqueeze(0))
        grads.append((weight.unsqueeze(-1) * g + through_logits).to(source.dtype))
        grad_key = grad_key + _key_gradient(x, r, ds.unsqueeze(0)).squeeze(0)
    return grads, grad_key


def inter_block(blocks: Sequence[Tensor], keys: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """``m = max_i s_i``, ``l = sum_i exp(s_i - m)`` and ``o = sum_i exp(s_i - m) b_i`` for S reads, compute dtype."""
    xs = [b.to(keys.dtype) for b in blocks]
    _, _, logits, m = _logits(xs, keys, eps)
    e = (logits - m).exp()
    return _weighted_sum(xs, e), m.contiguous(), e.sum(0).contiguous()


def inter_block_backward(
    grad_o: Tensor, grad_m: Tensor, grad_l: Tensor, blocks: Sequence[Tensor], keys: Tensor, eps: float
) -> tuple[list[Tensor], Tensor]:
    """Gradients of the blocks, in their dtype, and of ``keys``."""
    xs = [b.to(keys.dtype) for b in blocks]
    rs, dots, logits, m = _logits(xs, keys, eps)
    e = (logits - m).exp()
    grad_logits = e * (torch.stack([(grad_o * x).sum(-1) for x in xs]) + grad_l)
    # o and l fall when m rises; m follows its largest logit, the first of equals.
    chosen = logits.argmax(0)
    largest = torch.stack([chosen == i for i in range(len(xs))])
    grad_logits = grad_logits + largest * (grad_m - grad_logits.sum(0))
    grads, grad_keys = [], torch.zeros_like(keys)
    for block, x, r, z, weight, ds in zip(blocks, xs, rs, dots, e, grad_logits, strict=True):
        through_sum = (weight.unsqueeze(-1) * grad_o).sum(0)
        grads.append((through_sum + _source_gradient(x, keys, r, z, ds)).to(block.dtype))
        grad_keys = grad_keys + _key_gradient(x, r, ds)
    return grads, grad_keys


def merge(o: Tensor, m: Tensor, l: Tensor, partial: Tensor, key: Tensor, eps: float, scale: float) -> Tensor:
    """``scale * (a o + b x) / (a l + b)`` with the online-softmax weights a and b, in the dtype of ``partial``."""
    return _mix(o, m, l, partial.to(key.dtype), key, eps, scale).to(partial.dtype)


def merge_backward(
    grad: Tensor, o: Tensor, m: Tensor, l: Tensor, partial: Tensor, key: Tensor, eps: float, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of ``o``, ``m``, ``l``, ``partial``, in their dtypes, and of ``key``."""
    found = _mix_backward(grad.to(key.dtype) * scale, o, m, l, partial.to(key.dtype), key, eps)
    grad_o, grad_m, grad_l, grad_partial, grad_key = found
    return grad_o, grad_m, grad_l, grad_partial.to(partial.dtype), grad_key


def add_merge_norm(
    partial: Tensor,
    branch: Tensor,
    o: Tensor,
    m: Tensor,
    l: Tensor,
    key: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    norm_eps: float,
    scale: float,
    centred: bool,
) -> tuple[Tensor, Tensor]:
    """``partial + branch``, and the norm of its ``merge``; ``centred`` makes it a LayerNorm, otherwise an RMSNorm."""
    total = partial + branch
    h = _mix(o, m, l, total.to(key.dtype), key, eps, scale)
    return total, normalise(h, weight, bias, norm_eps, centred).to(total.dtype)


def add_merge_norm_backward(
    grad_total: Tensor | None,
    grad_normalised: Tensor,
    total: Tensor,
    o: Tensor,
    m: Tensor,
    l: Tensor,
    key: Tensor,
    weight: Tensor | None,
    eps: float,
    norm_eps: float,
    scale: float,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of ``o``, ``m``, ``l``, either term of ``total``, ``key``, and the norm's weight and bias ``[d]``."""
    x = total.to(key.dtype)
    h = _mix(o, m, l, x, key, eps, scale)
    found = normalise_backward(grad_normalised.to(key.dtype), h, weight, norm_eps, centred)
    grad_h, along_h, grad_weight, grad_bias = found
    grad_o, grad_m, grad_l, grad_x, grad_key = _mix_backward(grad_h * scale, o, m, l, x, key, eps, along_h)
    grad_sum = (grad_x if grad_total is None else grad_total + grad_x).to(total.dtype)
    return grad_o, grad_m, grad_l, grad_sum, grad_key, grad_weight, grad_bias


def normalise(h: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool) -> Tensor:
    """RMSNorm or, ``centred``, LayerNorm of ``h [..., d]`` in its own dtype."""
    y, _ = _normalised(h, eps, centred)
    y = y if weight is None else y * weight.to(h.dtype)
    return y if bias is None else y + bias.to(h.dtype)


def normalise_backward(
    grad: Tensor, h: Tensor, weight: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradient of ``h [..., d]``, its inner product with ``h``, and gradients of a norm's weight and bias ``[d]``."""
    y, r = _normalised(h, eps, centred)
    rows = grad.reshape(-1, grad.shape[-1])
    grad_weight, grad_bias = (rows * y.reshape(rows.shape)).sum(0), rows.sum(0)
    g = grad if weight is None else grad * weight.to(h.dtype)
    along_y = (g * y).sum(-1, keepdim=True)
    grad_h = g - y * (along_y / h.shape[-1])
    grad_h = r * (grad_h - g.mean(-1, keepdim=True) if centred else grad_h)
    # Only eps keeps a norm's gradient from being orthogonal to its input: as a sum of products this would be rounding.
    return grad_h, (along_y * eps * r.square()).squeeze(-1), grad_weight, grad_bias


def _weights(xs: Sequence[Tensor], key: Tensor, eps: float) -> tuple[list[Tensor], list[Tensor], Tensor]:
    rs = [inverse_rms(x, eps) for x in xs]
    dots = [x @ key for x in xs]
    return rs, dots, torch.stack([r * z for r, z in zip(rs, dots, strict=True)]).softmax(0)


def _logits(xs: Sequence[Tensor], keys: Tensor, eps: float) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    rs = [inverse_rms(x, eps) for x in xs]
    dots = [torch.movedim(x @ keys.T, -1, 0) for x in xs]
    logits = torch.stack([r * z for r, z in zip(rs, dots, strict=True)])
    return rs, dots, logits, logits.amax(0)


def _weighted_sum(xs: Sequence[Tensor], weights: Tensor) -> Tensor:
    result = torch.mul(xs[0], weights[0].unsqueeze(-1)).contiguous()
    for x, weight in zip(xs[1:], weights[1:], strict=True):
        result = torch.addcmul(result, x, weight.unsqueeze(-1))
    return result


def _coefficients(m: Tensor, l: Tensor, x: Tensor, key: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights of ``o`` and of the partial sum, and the partial sum's ``1/rms`` and ``<x, key>``."""
    r, z = inverse_rms(x, eps), x @ key
    s = r * z
    largest = torch.maximum(m, s)
    of_blocks, of_partial = (m - largest).exp(), (s - largest).exp()
    total = of_blocks * l + of_partial
    return of_blocks / total, of_partial / total, r, z


def _mix(o: Tensor, m: Tensor, l: Tensor, x: Tensor, key: Tensor, eps: float, scale: float) -> Tensor:
    of_blocks, of_partial, _, _ = _coefficients(m, l, x, key, eps)
    h = torch.mul(o, (of_blocks * scale).unsqueeze(-1)).contiguous()
    return torch.addcmul(h, x, (of_partial * scale).unsqueeze(-1))


def _mix_backward(
    g: Tensor, o: Tensor, m: Tensor, l: Tensor, x: Tensor, key: Tensor, eps: float, along_h: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    of_blocks, of_partial, r, z = _coefficients(m, l, x, key, eps)
    along_o, along_x = (g * o).sum(-1), (g * x).sum(-1)
    along_h = of_blocks * along_o + of_partial * along_x if along_h is None else along_h
    # Only the difference of m and the partial sum's logit matters. Sums with along_h would cancel.
    grad_logit = of_blocks * of_partial * (l * along_x - along_o)
    through_logit = _source_gradient(x, key.unsqueeze(0), r, z.unsqueeze(0), grad_logit.unsqueeze(0))
    return (
        of_blocks.unsqueeze(-1) * g,
        -grad_logit,
        -of_blocks * along_h,
        of_partial.unsqueeze(-1) * g + through_logit,
        _key_gradient(x, r, grad_logit.unsqueeze(0)).squeeze(0),
    )


def _normalised(h: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """The norm without weight and bias, and the factor ``[..., 1]`` that it multiplied with."""
    h = h - h.mean(-1, keepdim=True) if centred else h
    r = inverse_rms(h, eps).unsqueeze(-1)
    return h * r, r


def _source_gradient(x: Tensor, keys: Tensor, r: Tensor, dots: Tensor, grad_logits: Tensor) -> Tensor:
    """Gradient that reaches a source through its logits.

    Args:
        x: the source, ``[..., d]``, compute dtype.
        keys: ``[S, d]``.
        r: ``inverse_rms(x)``, ``[...]``.
        dots: ``<x, keys_s>``, ``[S, ...]``.
        grad_logits: gradient of the logits ``r * dots``, ``[S, ...]``.

    Returns:
        ``sum_s grad_logits_s (r keys_s - dots_s r^3 x / d)``, ``[..., d]``.
    """
    along_keys = torch.movedim(grad_logits * r, 0, -1) @ keys
    # Not r.pow(3), which underflows in fp32 for sources near 1e18.
    along_x = (grad_logits * r * dots).sum(0) * r * r / x.shape[-1]
    return along_keys - along_x.unsqueeze(-1) * x


def _key_gradient(x: Tensor, r: Tensor, grad_logits: Tensor) -> Tensor:
    """Gradient of ``keys`` from one source: ``sum_tokens grad_logits_s r x``, ``[S, d]``."""
    weights = (grad_logits * r).reshape(grad_logits.shape[0], -1)
    return weights @ x.reshape(-1, x.shape[-1])

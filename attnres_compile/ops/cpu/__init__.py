"""The kernels in C++ for the CPU: the same functions as `factored`, one pass over memory each.

They are built at first use, per dtype. What they do not take goes to `factored`, as everything does where they cannot
be built: tensors of a subclass or on another device, other dtypes, sources that differ in dtype or shape. Like all
kernels they are called below autograd and are not differentiable themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from attnres_compile.ops import factored
from attnres_compile.ops.cpu import build, calls
from attnres_compile.ops.cpu.calls import Rows


def available() -> bool:
    """Whether the kernels are in use; builds them if that has not been done."""
    return build.load() is not None


def reason() -> str:
    """Why the kernels are not in use, and what to do; empty if they are."""
    return build.reason()


def depth_attention(sources: Sequence[Tensor], key: Tensor, eps: float, scale: float) -> Tensor:
    """See `factored.depth_attention`."""
    library = calls.library_for(sources, key)
    if library is None:
        return factored.depth_attention(sources, key, eps, scale)
    read = calls.Read(sources, key, eps, scale)
    out = sources[0].new_empty(sources[0].shape)
    library.attnres_depth_attention(read.arguments, out.data_ptr())
    return out


def depth_attention_backward(
    grad: Tensor, sources: Sequence[Tensor], key: Tensor, eps: float, scale: float
) -> tuple[list[Tensor], Tensor]:
    """See `factored.depth_attention_backward`."""
    library = calls.library_for([*sources, grad], key)
    if library is None:
        return factored.depth_attention_backward(grad, sources, key, eps, scale)
    read = calls.Read(sources, key, eps, scale)
    grads, grad_key = read.empty_gradients(), key.new_empty(key.shape)
    grad = grad.contiguous()
    library.attnres_depth_attention_backward(
        read.arguments, grad.data_ptr(), calls.addresses(grads), grad_key.data_ptr()
    )
    return grads, grad_key


def inter_block(blocks: Sequence[Tensor], keys: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """See `factored.inter_block`."""
    library = calls.library_for(blocks, keys)
    if library is None:
        return factored.inter_block(blocks, keys, eps)
    read = calls.Read(blocks, keys, eps, 1.0)
    o = keys.new_empty((len(keys), *blocks[0].shape))
    m, l = o.new_empty(o.shape[:-1]), o.new_empty(o.shape[:-1])
    library.attnres_inter_block(read.arguments, o.data_ptr(), m.data_ptr(), l.data_ptr())
    return o, m, l


def inter_block_backward(
    grad_o: Tensor, grad_m: Tensor, grad_l: Tensor, blocks: Sequence[Tensor], keys: Tensor, eps: float
) -> tuple[list[Tensor], Tensor]:
    """See `factored.inter_block_backward`."""
    shape = (len(keys), *blocks[0].shape)
    library = calls.library_for(blocks, keys, [(grad_o, shape), (grad_m, shape[:-1]), (grad_l, shape[:-1])])
    if library is None:
        return factored.inter_block_backward(grad_o, grad_m, grad_l, blocks, keys, eps)
    read = calls.Read(blocks, keys, eps, 1.0)
    grads, grad_keys = read.empty_gradients(), keys.new_empty(keys.shape)
    kept = [x.contiguous() for x in (grad_o, grad_m, grad_l)]
    library.attnres_inter_block_backward(
        read.arguments, *[x.data_ptr() for x in kept], calls.addresses(grads), grad_keys.data_ptr()
    )
    return grads, grad_keys


def merge(o: Tensor, m: Tensor, l: Tensor, partial: Tensor, key: Tensor, eps: float, scale: float) -> Tensor:
    """See `factored.merge`."""
    library = calls.library_for_merge([partial], o, m, l, key)
    if library is None:
        return factored.merge(o, m, l, partial, key, eps, scale)
    merged = calls.Merge(o, m, l, partial, key, eps, scale)
    out = partial.new_empty(partial.shape)
    library.attnres_merge(merged.arguments, out.data_ptr())
    return out


def merge_backward(
    grad: Tensor, o: Tensor, m: Tensor, l: Tensor, partial: Tensor, key: Tensor, eps: float, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `factored.merge_backward`."""
    library = calls.library_for_merge([partial, grad], o, m, l, key)
    if library is None:
        return factored.merge_backward(grad, o, m, l, partial, key, eps, scale)
    merged = calls.Merge(o, m, l, partial, key, eps, scale)
    grads, grad_key, rows = merged.empty_gradients(), key.new_empty(key.shape), Rows(grad)
    library.attnres_merge_backward(
        merged.arguments, rows.address, rows.stride, *[g.data_ptr() for g in grads], grad_key.data_ptr()
    )
    return *grads, grad_key


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
    """See `factored.add_merge_norm`."""
    library = calls.library_for_merge([partial, branch], o, m, l, key, weight, bias)
    if library is None:
        return factored.add_merge_norm(partial, branch, o, m, l, key, weight, bias, eps, norm_eps, scale, centred)
    merged, added = calls.Merge(o, m, l, partial, key, eps, scale), Rows(branch)
    norm = calls.Norm(weight, bias, norm_eps, centred, key.dtype)
    total, out = partial.new_empty(partial.shape), partial.new_empty(partial.shape)
    library.attnres_add_merge_norm(
        merged.arguments, norm.arguments, added.address, added.stride, total.data_ptr(), out.data_ptr()
    )
    return total, out


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
    """See `factored.add_merge_norm_backward`."""
    rows = [total, grad_normalised] if grad_total is None else [total, grad_normalised, grad_total]
    library = calls.library_for_merge(rows, o, m, l, key, weight)
    if library is None:
        return factored.add_merge_norm_backward(
            grad_total, grad_normalised, total, o, m, l, key, weight, eps, norm_eps, scale, centred
        )
    merged = calls.Merge(o, m, l, total, key, eps, scale)
    norm = calls.Norm(weight, None, norm_eps, centred, key.dtype)
    of_total, of_normalised = None if grad_total is None else Rows(grad_total), Rows(grad_normalised)
    grads, of_vectors = merged.empty_gradients(), key.new_empty((3, *key.shape))
    library.attnres_add_merge_norm_backward(
        merged.arguments,
        norm.arguments,
        None if of_total is None else of_total.address,
        0 if of_total is None else of_total.stride,
        of_normalised.address,
        of_normalised.stride,
        *[g.data_ptr() for g in grads],
        of_vectors.data_ptr(),
    )
    # Clones, since the result of an operator must not share memory with another.
    grad_key, grad_weight, grad_bias = (vector.clone() for vector in of_vectors.unbind())
    return *grads, grad_key, grad_weight, grad_bias

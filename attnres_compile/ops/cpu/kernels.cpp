// The functions that Python calls. Strides are in elements; results are contiguous; a null pointer is an absent tensor.

#include "arguments.h"
#include "merge.h"
#include "read.h"

#define ATTNRES_EXPORT __attribute__((visibility("default")))

using namespace attnres;

// One library per storage type: few programs need more than one, and each takes its time to compile.
using T = ATTNRES_STORAGE;
using A = Compute<T>;

namespace {

Sources<T> sources(const ReadArguments& in) { return {in.sources, in.strides, in.n, in.tokens, in.d}; }

Merged<T> merged(const MergeArguments& in) {
  return {static_cast<const A*>(in.o),
          in.o_stride,
          static_cast<const A*>(in.m),
          static_cast<const A*>(in.l),
          static_cast<const T*>(in.partial),
          in.partial_stride,
          static_cast<const A*>(in.key),
          in.eps,
          in.scale,
          in.tokens,
          in.d};
}

Norm<A> norm_of(const NormArguments& in) {
  return {static_cast<const A*>(in.weight), static_cast<const A*>(in.bias), in.eps, in.centred != 0};
}

MergeGradients<T> gradients(void* o, void* m, void* l, void* partial) {
  return {static_cast<A*>(o), static_cast<A*>(m), static_cast<A*>(l), static_cast<T*>(partial)};
}

}  // namespace

extern "C" {

ATTNRES_EXPORT void attnres_depth_attention(const ReadArguments* in, void* out) {
  read<1, T, T>(in->threads, sources(*in), static_cast<const A*>(in->keys), 1, in->eps, in->scale, static_cast<T*>(out),
                nullptr, nullptr);
}

ATTNRES_EXPORT void attnres_depth_attention_backward(const ReadArguments* in, const void* grad, void* const* grads,
                                                     void* grad_key) {
  read_backward<1, T, T>(in->threads, sources(*in), static_cast<const A*>(in->keys), 1, in->eps, in->scale,
                         static_cast<const T*>(grad), nullptr, nullptr, grads, static_cast<A*>(grad_key));
}

ATTNRES_EXPORT void attnres_inter_block(const ReadArguments* in, void* o, void* m, void* l) {
  read<4, T, A>(in->threads, sources(*in), static_cast<const A*>(in->keys), in->reads, in->eps, 1, static_cast<A*>(o),
                static_cast<A*>(m), static_cast<A*>(l));
}

ATTNRES_EXPORT void attnres_inter_block_backward(const ReadArguments* in, const void* grad_o, const void* grad_m,
                                                 const void* grad_l, void* const* grads, void* grad_keys) {
  read_backward<4, T, A>(in->threads, sources(*in), static_cast<const A*>(in->keys), in->reads, in->eps, 1,
                         static_cast<const A*>(grad_o), static_cast<const A*>(grad_m), static_cast<const A*>(grad_l),
                         grads, static_cast<A*>(grad_keys));
}

ATTNRES_EXPORT void attnres_merge(const MergeArguments* in, void* out) {
  merge(in->threads, merged(*in), static_cast<T*>(out));
}

// The mixture alone, in the compute type, where there is no partial sum to take the storage type from.
ATTNRES_EXPORT void attnres_first_merge(const MergeArguments* in, void* out) {
  first_merge(in->threads, merged(*in), static_cast<A*>(out));
}

ATTNRES_EXPORT void attnres_merge_backward(const MergeArguments* in, const void* grad, int64_t grad_stride,
                                           void* grad_o, void* grad_m, void* grad_l, void* grad_partial,
                                           void* grad_key) {
  merge_backward(in->threads, merged(*in), static_cast<const T*>(grad), grad_stride,
                 gradients(grad_o, grad_m, grad_l, grad_partial), static_cast<A*>(grad_key));
}

ATTNRES_EXPORT void attnres_add_merge_norm(const MergeArguments* in, const NormArguments* norm_in, const void* branch,
                                           int64_t branch_stride, void* total, void* out) {
  add_merge_norm(in->threads, merged(*in), static_cast<const T*>(branch), branch_stride, norm_of(*norm_in),
                 static_cast<T*>(total), static_cast<T*>(out));
}

ATTNRES_EXPORT void attnres_merge_norm(const MergeArguments* in, const NormArguments* norm_in, void* out) {
  add_merge_norm(in->threads, merged(*in), static_cast<const T*>(nullptr), 0, norm_of(*norm_in),
                 static_cast<T*>(nullptr), static_cast<T*>(out));
}

ATTNRES_EXPORT void attnres_add_merge_norm_backward(const MergeArguments* in, const NormArguments* norm_in,
                                                    const void* grad_total, int64_t grad_total_stride,
                                                    const void* grad_normalised, int64_t grad_normalised_stride,
                                                    void* grad_o, void* grad_m, void* grad_l, void* grad_partial,
                                                    void* grad_key_weight_bias) {
  add_merge_norm_backward(in->threads, merged(*in), static_cast<const T*>(grad_total), grad_total_stride,
                          static_cast<const T*>(grad_normalised), grad_normalised_stride, norm_of(*norm_in),
                          gradients(grad_o, grad_m, grad_l, grad_partial), static_cast<A*>(grad_key_weight_bias));
}

}  // extern "C"

// The operators on the CPU without Python in between, by PyTorch's stable interface for extensions.
//
// What the kernels do not take as it is goes on to the operator of the same name in `attnres_compile_python`: tensors
// that differ in dtype or shape or device, gaps within rows, storage types whose kernels are not loaded.

#include <pthread.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "arguments.h"
#include "tensors.h"

#define ATTNRES_EXPORT __attribute__((visibility("default")))

using namespace attnres;

namespace {

// The functions of kernels.cpp for one storage type, in the order in which Python installs them.
struct Kernels {
  void (*depth_attention)(const ReadArguments*, void*);
  void (*depth_attention_backward)(const ReadArguments*, const void*, void* const*, void*);
  void (*inter_block)(const ReadArguments*, void*, void*, void*);
  void (*inter_block_backward)(const ReadArguments*, const void*, const void*, const void*, void* const*, void*);
  void (*merge)(const MergeArguments*, void*);
  void (*first_merge)(const MergeArguments*, void*);
  void (*merge_backward)(const MergeArguments*, const void*, int64_t, void*, void*, void*, void*, void*);
  void (*merge_norm)(const MergeArguments*, const NormArguments*, void*);
  void (*add_merge_norm)(const MergeArguments*, const NormArguments*, const void*, int64_t, void*, void*);
  void (*add_merge_norm_backward)(const MergeArguments*, const NormArguments*, const void*, int64_t, const void*,
                                  int64_t, void*, void*, void*, void*, void*);
};

constexpr std::array kStorage{ScalarType::Float, ScalarType::Double, ScalarType::BFloat16, ScalarType::Half};
std::array<Kernels, kStorage.size()> installed{};

bool forked = false;

int64_t threads() { return forked ? 1 : torch::stable::get_num_threads(); }

const Kernels* kernels_for(const Tensor& x) {
  for (size_t i = 0; i < kStorage.size(); ++i)
    if (x.scalar_type() == kStorage[i]) return installed[i].merge ? &installed[i] : nullptr;
  return nullptr;
}

// A read of n sources by S keys; `kernels` is null where it has to go on to Python.
struct Read {
  const Kernels* kernels = nullptr;
  ReadArguments in{};
  ScalarType compute = ScalarType::Float;
  std::optional<Vectors> keys;
  std::vector<const void*> addresses;
  std::vector<int64_t> strides;

  Read(const List& sources, const Tensor& query, const Optional& key_norm, double eps, double scale) {
    const Tensor& first = sources.front();
    const int64_t d = first.dim() ? first.size(first.dim() - 1) : 0;
    if (d == 0 || !query.dim() || !query.numel()) return;
    compute = compute_type(first.scalar_type());
    keys.emplace(compute, query.dim(), d, query, key_norm);
    if (!keys->usable()) return;
    for (const Tensor& source : sources) {
      const Rows rows(source, first, first.scalar_type());
      if (!rows) return;
      addresses.push_back(rows.data);
      strides.push_back(rows.stride);
    }
    in = {threads(), static_cast<int64_t>(sources.size()), query.numel() / d, first.numel() / d, d,
          eps,       scale,                                addresses.data(),  strides.data(),    keys->data()};
    kernels = kernels_for(first);
  }
};

// A merge, its rows like those of `like`; a partial sum that will only be made is not passed.
struct Merge {
  const Kernels* kernels = nullptr;
  MergeArguments in{};
  ScalarType compute = ScalarType::Float;
  std::optional<Vectors> key;

  Merge(const Tensor& like, const Tensor& o, const Tensor& m, const Tensor& l, const Optional& partial,
        const Optional& query, const Optional& key_norm, double eps, double scale) {
    const int64_t d = like.dim() ? like.size(like.dim() - 1) : 0;
    if (d == 0) return;
    compute = compute_type(like.scalar_type());
    const Rows of_o(o, like, compute);
    key.emplace(compute, 1, d, query, key_norm);
    if (!of_o || !is_statistic(m, like, compute) || !is_statistic(l, like, compute) || !key->usable()) return;
    in = {threads(), like.numel() / d, d, eps, scale, of_o.data, of_o.stride, m.data_ptr(), l.data_ptr(), nullptr, 0,
          key->data()};
    if (partial) {
      const Rows rows(*partial, like, like.scalar_type());
      if (!rows) return;
      in.partial = rows.data;
      in.partial_stride = rows.stride;
    }
    kernels = kernels_for(like);
  }
};

struct Norm {
  Vectors weight, bias;
  NormArguments in{};

  Norm(ScalarType compute, int64_t d, const Optional& weight_, const Optional& bias_, double eps,
       const std::string& kind)
      : weight(compute, 1, d, weight_), bias(compute, 1, d, bias_) {
    in = {weight.data(), bias.data(), eps, kind == "layer"};
  }
  bool usable() const { return weight.usable() && bias.usable(); }
};

template <class R>
struct Results {
  static constexpr size_t kCount = 1;
  static R of(StableIValue* stack) { return torch::stable::detail::to<R>(stack[0]); }
};
template <class... R>
struct Results<std::tuple<R...>> {
  static constexpr size_t kCount = sizeof...(R);
  static std::tuple<R...> of(StableIValue* stack) { return of(stack, std::index_sequence_for<R...>()); }
  template <size_t... I>
  static std::tuple<R...> of(StableIValue* stack, std::index_sequence<I...>) {
    return {torch::stable::detail::to<R>(stack[I])...};
  }
};

// The operator of that name in Python.
template <class R, class... Args>
R python(const char* name, const Args&... args) {
  std::array<StableIValue, std::max(sizeof...(Args), Results<R>::kCount)> stack{
      torch::stable::detail::from(args)...};
  const std::string full = std::string("attnres_compile_python::") + name;
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(full.c_str(), "", stack.data(), TORCH_ABI_VERSION));
  return Results<R>::of(stack.data());
}

// The gradients of the sources, and that of the keys, which comes last.
std::tuple<List, Tensor> parted(List all) {
  Tensor last = all.back();
  all.pop_back();
  return {all, last};
}

Tensor depth_attention(List sources, Tensor query, Optional key_norm, double eps, double scale) {
  const Read read(sources, query, key_norm, eps, scale);
  if (!read.kernels || query.dim() != 1)
    return python<Tensor>("depth_attention", sources, query, key_norm, eps, scale);
  Tensor out = rows_like(sources[0], sources[0].scalar_type());
  read.kernels->depth_attention(&read.in, out.data_ptr());
  return out;
}

std::tuple<List, Tensor> depth_attention_backward(Tensor grad, List sources, Tensor query, Optional key_norm,
                                                  double eps, double scale) {
  const Read read(sources, query, key_norm, eps, scale);
  const Rows rows(grad, sources[0], sources[0].scalar_type());
  if (!read.kernels || query.dim() != 1 || !rows || rows.stride != read.in.d)
    return parted(python<List>("depth_attention_backward", grad, sources, query, key_norm, eps, scale));
  std::vector<void*> addresses;
  List grads = gradients_of(sources, addresses);
  Tensor grad_key = empty(query, {read.in.d}, read.compute);
  read.kernels->depth_attention_backward(&read.in, rows.data, addresses.data(), grad_key.data_ptr());
  return {grads, grad_key};
}

std::tuple<Tensor, Tensor, Tensor> inter_block(List blocks, Tensor queries, Optional key_norms, double eps) {
  const Read read(blocks, queries, key_norms, eps, 1);
  if (!read.kernels || queries.dim() != 2)
    return python<std::tuple<Tensor, Tensor, Tensor>>("inter_block", blocks, queries, key_norms, eps);
  std::vector<int64_t> shape = shape_of(blocks[0], blocks[0].dim());
  shape.insert(shape.begin(), read.in.reads);
  Tensor o = empty(blocks[0], shape, read.compute);
  shape.pop_back();
  Tensor m = empty(blocks[0], shape, read.compute), l = empty(blocks[0], shape, read.compute);
  read.kernels->inter_block(&read.in, o.data_ptr(), m.data_ptr(), l.data_ptr());
  return {o, m, l};
}

std::tuple<List, Tensor> inter_block_backward(Tensor grad_o, Tensor grad_m, Tensor grad_l, List blocks, Tensor queries,
                                              Optional key_norms, double eps) {
  const Read read(blocks, queries, key_norms, eps, 1);
  bool usable = read.kernels && queries.dim() == 2;
  for (const Tensor* grad : {&grad_o, &grad_m, &grad_l})
    usable = usable && grad->is_cpu() && grad->is_contiguous() && grad->scalar_type() == read.compute;
  usable = usable && grad_o.numel() == read.in.reads * read.in.tokens * read.in.d &&
           grad_m.numel() == read.in.reads * read.in.tokens && grad_l.numel() == grad_m.numel();
  if (!usable)
    return parted(python<List>("inter_block_backward", grad_o, grad_m, grad_l, blocks, queries, key_norms, eps));
  std::vector<void*> addresses;
  List grads = gradients_of(blocks, addresses);
  Tensor grad_keys = empty(queries, {read.in.reads, read.in.d}, read.compute);
  read.kernels->inter_block_backward(&read.in, grad_o.data_ptr(), grad_m.data_ptr(), grad_l.data_ptr(),
                                     addresses.data(), grad_keys.data_ptr());
  return {grads, grad_keys};
}

// The blocks are for the backward.
Tensor merge(Tensor o, Tensor m, Tensor l, Optional partial, Optional query, Optional key_norm, double eps,
             double scale, std::optional<List> blocks) {
  const Merge merge(partial ? *partial : o, o, m, l, partial, query, key_norm, eps, scale);
  if (!merge.kernels || (partial && !query))
    return python<Tensor>("merge", o, m, l, partial, query, key_norm, eps, scale, blocks);
  Tensor out = rows_like(o, partial ? partial->scalar_type() : merge.compute);
  (partial ? merge.kernels->merge : merge.kernels->first_merge)(&merge.in, out.data_ptr());
  return out;
}

using Four = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using Seven = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Four merge_backward(Tensor grad, Tensor o, Tensor m, Tensor l, Tensor partial, Tensor query, Optional key_norm,
                    double eps, double scale) {
  const Merge merge(partial, o, m, l, partial, query, key_norm, eps, scale);
  const Rows rows(grad, partial, partial.scalar_type());
  if (!merge.kernels || !rows)
    return python<Four>("merge_backward", grad, o, m, l, partial, query, key_norm, eps, scale);
  Tensor grad_o = rows_like(o, merge.compute), grad_m = torch::stable::empty_like(m);
  Tensor grad_l = torch::stable::empty_like(l), grad_partial = rows_like(partial, partial.scalar_type());
  Tensor grad_key = empty(query, {merge.in.d}, merge.compute);
  merge.kernels->merge_backward(&merge.in, rows.data, rows.stride, grad_o.data_ptr(), grad_m.data_ptr(),
                                grad_l.data_ptr(), grad_partial.data_ptr(), grad_key.data_ptr());
  return {grad_o, grad_m, grad_l, grad_partial, grad_key};
}

Tensor merge_norm(List blocks, Tensor o, Tensor m, Tensor l, Optional partial, Tensor query, Optional key_norm,
                  Optional weight, Optional bias, double eps, double norm_eps, double scale, std::string norm) {
  const Merge merge(blocks[0], o, m, l, partial, query, key_norm, eps, scale);
  const Norm after(merge.compute, merge.in.d, weight, bias, norm_eps, norm);
  if (!merge.kernels || !after.usable())
    return python<Tensor>("merge_norm", blocks, o, m, l, partial, query, key_norm, weight, bias, eps, norm_eps, scale,
                          norm);
  Tensor out = rows_like(o, blocks[0].scalar_type());
  merge.kernels->merge_norm(&merge.in, &after.in, out.data_ptr());
  return out;
}

std::tuple<Tensor, Tensor> add_merge_norm(Tensor partial, Tensor branch, List blocks, Tensor o, Tensor m, Tensor l,
                                          Tensor query, Optional key_norm, Optional weight, Optional bias, double eps,
                                          double norm_eps, double scale, std::string norm) {
  const Merge merge(partial, o, m, l, partial, query, key_norm, eps, scale);
  const Norm after(merge.compute, merge.in.d, weight, bias, norm_eps, norm);
  const Rows rows(branch, partial, partial.scalar_type());
  if (!merge.kernels || !after.usable() || !rows)
    return python<std::tuple<Tensor, Tensor>>("add_merge_norm", partial, branch, blocks, o, m, l, query, key_norm,
                                              weight, bias, eps, norm_eps, scale, norm);
  Tensor total = rows_like(o, partial.scalar_type()), out = rows_like(o, partial.scalar_type());
  merge.kernels->add_merge_norm(&merge.in, &after.in, rows.data, rows.stride, total.data_ptr(), out.data_ptr());
  return {total, out};
}

Seven add_merge_norm_backward(Optional grad_total, Tensor grad_normalised, Tensor total, Tensor o, Tensor m, Tensor l,
                              Tensor query, Optional key_norm, Optional weight, double eps, double norm_eps,
                              double scale, std::string norm) {
  const Merge merge(total, o, m, l, total, query, key_norm, eps, scale);
  const Norm after(merge.compute, merge.in.d, weight, {}, norm_eps, norm);
  const Rows rows(grad_normalised, total, total.scalar_type());
  std::optional<Rows> of_total;
  if (grad_total) of_total.emplace(*grad_total, total, total.scalar_type());
  if (!merge.kernels || !after.usable() || !rows || (of_total && !*of_total))
    return python<Seven>("add_merge_norm_backward", grad_total, grad_normalised, total, o, m, l, query, key_norm,
                         weight, eps, norm_eps, scale, norm);
  Tensor grad_o = rows_like(o, merge.compute), grad_m = torch::stable::empty_like(m);
  Tensor grad_l = torch::stable::empty_like(l), grad_sum = rows_like(total, total.scalar_type());
  const int64_t d = merge.in.d, bytes = d * static_cast<int64_t>(o.element_size());
  std::vector<char> vectors(3 * bytes);
  merge.kernels->add_merge_norm_backward(&merge.in, &after.in, of_total ? of_total->data : nullptr,
                                         of_total ? of_total->stride : 0, rows.data, rows.stride, grad_o.data_ptr(),
                                         grad_m.data_ptr(), grad_l.data_ptr(), grad_sum.data_ptr(), vectors.data());
  std::array<Optional, 3> of_vectors;
  for (int i = 0; i < 3; ++i) {
    of_vectors[i] = empty(query, {d}, merge.compute);
    std::memcpy(of_vectors[i]->data_ptr(), vectors.data() + i * bytes, bytes);
  }
  return {grad_o, grad_m, grad_l, grad_sum, *of_vectors[0], *of_vectors[1], *of_vectors[2]};
}

}  // namespace

extern "C" ATTNRES_EXPORT void attnres_install(int64_t storage, const Kernels* kernels) {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { forked = true; });
  (void)registered;
  installed[storage] = kernels ? *kernels : Kernels{};
}

STABLE_TORCH_LIBRARY_IMPL(attnres_compile, CPU, m) {
  m.impl("depth_attention", TORCH_BOX(&depth_attention));
  m.impl("depth_attention_backward", TORCH_BOX(&depth_attention_backward));
  m.impl("inter_block", TORCH_BOX(&inter_block));
  m.impl("inter_block_backward", TORCH_BOX(&inter_block_backward));
  m.impl("merge", TORCH_BOX(&merge));
  m.impl("merge_backward", TORCH_BOX(&merge_backward));
  m.impl("merge_norm", TORCH_BOX(&merge_norm));
  m.impl("add_merge_norm", TORCH_BOX(&add_merge_norm));
  m.impl("add_merge_norm_backward", TORCH_BOX(&add_merge_norm_backward));
}

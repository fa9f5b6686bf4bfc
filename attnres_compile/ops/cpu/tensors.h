// What the dispatcher's functions ask of tensors: rows of features, numbers per token, vectors in the compute type.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace attnres {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;
using List = std::vector<Tensor>;

inline ScalarType compute_type(ScalarType storage) {
  return storage == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline bool same_shape(const Tensor& a, const Tensor& b, int64_t axes) {
  for (int64_t i = 0; i < axes; ++i)
    if (a.size(i) != b.size(i)) return false;
  return true;
}

// Elements from one row of features to the next, -1 if that is not one number or features are not adjacent.
inline int64_t row_stride(const Tensor& x) {
  const int64_t axes = x.dim(), d = x.size(axes - 1);
  if (x.is_contiguous()) return d;
  if (x.stride(axes - 1) != 1 && d > 1) return -1;
  int64_t stride = -1, span = -1;
  for (int64_t i = axes - 2; i >= 0; --i) {
    if (x.size(i) == 1) continue;
    if (stride == -1) stride = x.stride(i);
    if (span != -1 && x.stride(i) != span) return -1;
    span = x.stride(i) * x.size(i);
  }
  return stride == -1 ? d : stride;
}

// Rows of features like those of another tensor.
struct Rows {
  const void* data = nullptr;
  int64_t stride = -1;

  Rows(const Tensor& x, const Tensor& like, ScalarType type) {
    if (!x.is_cpu() || x.scalar_type() != type || x.dim() != like.dim() || !same_shape(x, like, x.dim())) return;
    stride = row_stride(x);
    data = x.data_ptr();
  }
  explicit operator bool() const { return stride >= 0; }
};

// One number per token, as it lies.
inline bool is_statistic(const Tensor& x, const Tensor& like, ScalarType type) {
  return x.is_cpu() && x.scalar_type() == type && x.dim() == like.dim() - 1 && same_shape(x, like, x.dim()) &&
         x.is_contiguous();
}

template <class A, class X>
void multiply(const Tensor& x, A* out) {
  const X* from = static_cast<const X*>(x.data_ptr());
  for (int64_t i = 0, n = x.numel(); i < n; ++i) out[i] *= static_cast<A>(from[i]);
}

template <class A>
bool multiply(const Tensor& x, A* out) {
  switch (x.scalar_type()) {
    case ScalarType::Float: multiply<A, float>(x, out); return true;
    case ScalarType::Double: multiply<A, double>(x, out); return true;
    case ScalarType::BFloat16: multiply<A, torch::headeronly::BFloat16>(x, out); return true;
    case ScalarType::Half: multiply<A, torch::headeronly::Half>(x, out); return true;
    default: return false;
  }
}

// The product of vectors, or of matrices of S of them, in the compute type.
class Vectors {
 public:
  Vectors(ScalarType compute, int64_t axes, int64_t d, const Optional& first, const Optional& second = {}) {
    if (!first) return;
    const int64_t count = first->numel();
    for (const Optional* x : {&first, &second}) {
      if (*x && ((*x)->dim() != axes || (*x)->size(axes - 1) != d || (*x)->numel() != count || !(*x)->is_cpu() ||
                 !(*x)->is_contiguous()))
        usable_ = false;
    }
    if (!usable_) return;
    compute == ScalarType::Double ? fill(doubles_, count, *first, second) : fill(floats_, count, *first, second);
  }
  bool usable() const { return usable_; }
  const void* data() const {
    if (!doubles_.empty()) return doubles_.data();
    return floats_.empty() ? nullptr : floats_.data();
  }

 private:
  template <class A>
  void fill(std::vector<A>& to, int64_t count, const Tensor& first, const Optional& second) {
    to.assign(count, A{1});
    usable_ = multiply(first, to.data()) && (!second || multiply(*second, to.data()));
  }
  std::vector<float> floats_;
  std::vector<double> doubles_;
  bool usable_ = true;
};

inline Tensor empty(const Tensor& like, std::vector<int64_t> shape, ScalarType type) {
  return torch::stable::new_empty(like, shape, type);
}

inline std::vector<int64_t> shape_of(const Tensor& x, int64_t axes) {
  std::vector<int64_t> shape(axes);
  for (int64_t i = 0; i < axes; ++i) shape[i] = x.size(i);
  return shape;
}

inline Tensor rows_like(const Tensor& x, ScalarType type) { return empty(x, shape_of(x, x.dim()), type); }

inline List gradients_of(const List& sources, std::vector<void*>& addresses) {
  List grads;
  for (const Tensor& source : sources) {
    grads.push_back(rows_like(source, source.scalar_type()));
    addresses.push_back(grads.back().data_ptr());
  }
  return grads;
}

}  // namespace attnres

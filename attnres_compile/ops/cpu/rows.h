// What the kernels do with one row of features, and with one thread's share of the rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "simd.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace attnres {

inline int thread_number() {
#if defined(_OPENMP)
  return omp_get_thread_num();
#else
  return 0;
#endif
}

// As many threads as have something to do: waking one costs more than a few rows.
inline int useful_threads(int threads, int64_t elements) {
  constexpr int64_t kLeast = int64_t{1} << 13;
  return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(threads, elements / kLeast)));
}

// Reads are taken four, two or one at a time, so that their sums stay in registers.
template <int kMost, class Body>
ATTNRES_INLINE void read_groups(int64_t reads, Body&& body) {
  int64_t s = 0;
  if constexpr (kMost > 1) {
    for (; s + 4 <= reads; s += 4) body(s, std::integral_constant<int, 4>{});
    for (; s + 2 <= reads; s += 2) body(s, std::integral_constant<int, 2>{});
  }
  for (; s < reads; ++s) body(s, std::integral_constant<int, 1>{});
}

// Asks for N features from the j-th on: the second pass over a tile fetches the next one, so that memory has something
// to do. Past the end of a tensor it has no effect.
template <int N, class T>
ATTNRES_INLINE void fetch(const T* row, int64_t j) {
  constexpr int kSize = N * static_cast<int>(sizeof(T));
  for (int at = 0; at < kSize; at += kLine) __builtin_prefetch(reinterpret_cast<const char*>(row + j) + at, 0, 2);
}

// sums[s] = <x, y_s>, and with Squares sums[S] = <x, x>.
template <int S, bool Squares, class T, class Y>
inline void dots(const T* x, const Y* y, int64_t y_stride, int64_t d, Compute<T>* sums, double* squares) {
  using A = Compute<T>;
  constexpr int U = S == 1 ? 4 : 2, L = kLanes<A>;
  Vec<A> dot[S][U] = {}, square[U] = {};
  strips<A, U>(d, [&](int64_t j, auto count, int lanes) ATTNRES_LAMBDA {
    each<decltype(count)::value>([&](auto u) ATTNRES_LAMBDA {
      const Vec<A> v = load(x + j + u * L, lanes);
      if (Squares) square[u] += v * v;
      each<S>([&](auto s) ATTNRES_LAMBDA { dot[s][u] += v * load(y + s * y_stride + j + u * L, lanes); });
    });
  });
  each<S>([&](auto s) ATTNRES_LAMBDA {
    each<U - 1>([&](auto u) ATTNRES_LAMBDA { dot[s][0] += dot[s][u + 1]; });
    sums[s] = sum_of_lanes<A>(dot[s][0]);
  });
  if (!Squares) return;
  each<U - 1>([&](auto u) ATTNRES_LAMBDA { square[0] += square[u + 1]; });
  *squares = sum_of_lanes<A>(square[0]);
  // fp32 squares may have left their range where the mean of the squares has not.
  constexpr double kLeast = 1e6 * static_cast<double>(std::numeric_limits<float>::min());
  if (std::is_same_v<A, float> && (std::isinf(*squares) || *squares < kLeast)) {
    *squares = 0;
    for (int64_t j = 0; j < d; j += L) {
      const int lanes = static_cast<int>(std::min<int64_t>(L, d - j));
      const Vec<A> v = load(x + j, lanes);
      for (int i = 0; i < lanes; ++i) *squares += static_cast<double>(v[i]) * static_cast<double>(v[i]);
    }
  }
}

// Any number of reads; `squares` may be null.
template <int kMost, class T, class Y>
inline void all_dots(const T* x, const Y* y, int64_t y_stride, int64_t reads, int64_t d, Compute<T>* sums,
                     double* squares) {
  read_groups<kMost>(reads, [&](int64_t s, auto count) ATTNRES_LAMBDA {
    constexpr int S = decltype(count)::value;
    if (s == 0 && squares)
      dots<S, true>(x, y, y_stride, d, sums, squares);
    else
      dots<S, false>(x, y + s * y_stride, y_stride, d, sums + s, nullptr);
  });
}

inline double inverse_rms(double squares, int64_t d, double eps) {
  return 1 / std::sqrt(squares / static_cast<double>(d) + eps);
}

// out_s = sum_i weights[i * S + s] x_i. The sources' next rows are ahead[i] features away.
template <int S, class T, class O>
inline void weighted_sums(const T* const* x, int64_t n, const Compute<T>* weights, int64_t d, O* out,
                          int64_t out_stride, bool past_cache, const int64_t* ahead) {
  using A = Compute<T>;
  constexpr int U = S == 1 ? 4 : 2, L = kLanes<A>;
  strips<A, U>(d, [&](int64_t j, auto count, int lanes) ATTNRES_LAMBDA {
    Vec<A> sum[S][U] = {};
    constexpr int C = decltype(count)::value;
    for (int64_t i = 0; i < n; ++i) {
      fetch<C * L>(x[i] + ahead[i], j);
      each<C>([&](auto u) ATTNRES_LAMBDA {
        const Vec<A> v = load(x[i] + j + u * L, lanes);
        each<S>([&](auto s) ATTNRES_LAMBDA { sum[s][u] += weights[i * S + s] * v; });
      });
    }
    each<S>([&](auto s) ATTNRES_LAMBDA {
      each<C>([&](auto u) ATTNRES_LAMBDA { store(out + s * out_stride + j + u * L, sum[s][u], lanes, past_cache); });
    });
  });
}

// out = base + along_grad g + along_key key - along_x (r x), and key_grad += along_key x. r x and along_x are both near
// one where x is near 1e18; their fp32 product with x in another order would leave its range.
template <class T, class G>
inline void source_gradient(const T* x, int64_t ahead, const G* grads, int64_t grad_stride, const Compute<T>* keys,
                            int64_t key_stride, int64_t reads, const Compute<T>* along_grads,
                            const Compute<T>* along_keys, Compute<T> along_x, Compute<T> r, const T* base, int64_t d,
                            T* out, Compute<T>* key_grads, bool past_cache) {
  using A = Compute<T>;
  constexpr int U = 4, L = kLanes<A>;
  strips<A, U>(d, [&](int64_t j, auto count, int lanes) ATTNRES_LAMBDA {
    constexpr int C = decltype(count)::value;
    Vec<A> v[U], sum[U];
    fetch<C * L>(x + ahead, j);
    each<C>([&](auto u) ATTNRES_LAMBDA {
      v[u] = load(x + j + u * L, lanes);
      sum[u] = -along_x * (r * v[u]);
      if (base) sum[u] += load(base + j + u * L, lanes);
    });
    for (int64_t s = 0; s < reads; ++s) {
      const A along_grad = along_grads[s], along_key = along_keys[s];
      each<C>([&](auto u) ATTNRES_LAMBDA {
        const int64_t at = s * key_stride + j + u * L;
        sum[u] += along_grad * load(grads + s * grad_stride + j + u * L, lanes);
        sum[u] += along_key * load(keys + at, lanes);
        store(key_grads + at, load(key_grads + at, lanes) + along_key * v[u], lanes, false);
      });
    }
    each<C>([&](auto u) ATTNRES_LAMBDA { store(out + j + u * L, sum[u], lanes, past_cache); });
  });
}

// Sums over all tokens of `size` features: each thread in the compute type for a while, then in fp64; threads in order.
template <class A>
class TokenSums {
 public:
  TokenSums(int threads, int64_t size)
      : threads_(threads), size_(size), exact_(threads * size), recent_(threads * size) {}

  // This thread's sums, to be added to; `rows` is the number of rows about to be added.
  A* begin(int64_t rows, int64_t* since) {
    constexpr int64_t kRows = 1024;
    if ((*since += rows) > kRows) {
      flush();
      *since = rows;
    }
    return recent_.data() + thread_number() * size_;
  }

  void flush() {
    A* recent = recent_.data() + thread_number() * size_;
    double* exact = exact_.data() + thread_number() * size_;
    for (int64_t j = 0; j < size_; ++j) {
      exact[j] += static_cast<double>(recent[j]);
      recent[j] = 0;
    }
  }

  void write(A* out) const {
    for (int64_t j = 0; j < size_; ++j) {
      double sum = 0;
      for (int thread = 0; thread < threads_; ++thread) sum += exact_[thread * size_ + j];
      out[j] = static_cast<A>(sum);
    }
  }

 private:
  int threads_;
  int64_t size_;
  std::vector<double> exact_;
  std::vector<A> recent_;
};

}  // namespace attnres

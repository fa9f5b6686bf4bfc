// merge, add_merge_norm and their backwards: row by row, which the first-level cache holds between the steps.
#pragma once

#include "rows.h"

namespace attnres {

// Rows of the statistics [tokens, d], [tokens] and of the partial sum, with their strides in elements.
template <class T>
struct Merged {
  using A = Compute<T>;
  const A* o;
  int64_t o_stride;
  const A *m, *l;
  const T* partial;
  int64_t partial_stride;
  const A* key;
  double eps, scale;
  int64_t tokens, d;

  const A* o_row(int64_t token) const { return o + token * o_stride; }
  const T* partial_row(int64_t token) const { return partial + token * partial_stride; }
};

// Weights of o and of the partial sum, without the scale.
struct Coefficients {
  double of_blocks, of_partial, r, logit;
};

template <class T>
inline Coefficients coefficients(const Merged<T>& in, int64_t token, const T* x) {
  Compute<T> product;
  double squares;
  dots<1, true>(x, in.key, 0, in.d, &product, &squares);
  const double r = inverse_rms(squares, in.d, in.eps), s = r * static_cast<double>(product), m = in.m[token];
  const double largest = s > m || s != s ? s : m;
  const double of_blocks = std::exp(m - largest), of_partial = std::exp(s - largest);
  const double total = of_blocks * static_cast<double>(in.l[token]) + of_partial;
  return {of_blocks / total, of_partial / total, r, s};
}

template <class T>
void merge(int threads, const Merged<T>& in, T* out) {
  using A = Compute<T>;
  constexpr int U = 4, L = kLanes<A>;
  const int64_t d = in.d;
  const bool past_cache = prepare(out, in.tokens, d);
#pragma omp parallel num_threads(useful_threads(threads, in.tokens* d))
  {
#pragma omp for schedule(static)
    for (int64_t token = 0; token < in.tokens; ++token) {
      const A* o = in.o_row(token);
      const T* x = in.partial_row(token);
      const Coefficients c = coefficients(in, token, x);
      const A a = static_cast<A>(c.of_blocks * in.scale), b = static_cast<A>(c.of_partial * in.scale);
      strips<A, U>(d, [&](int64_t j, auto count, int lanes) ATTNRES_LAMBDA {
        each<decltype(count)::value>([&](auto u) ATTNRES_LAMBDA {
          const int64_t at = j + u * L;
          store(out + token * d + at, a * load(o + at, lanes) + b * load(x + at, lanes), lanes, past_cache);
        });
      });
    }
    finish_stores();
  }
}

template <class T>
void first_merge(int threads, const Merged<T>& in, Compute<T>* out) {
  using A = Compute<T>;
  constexpr int U = 4, L = kLanes<A>;
  const int64_t d = in.d;
  const bool past_cache = prepare(out, in.tokens, d);
#pragma omp parallel num_threads(useful_threads(threads, in.tokens* d))
  {
#pragma omp for schedule(static)
    for (int64_t token = 0; token < in.tokens; ++token) {
      const A* o = in.o_row(token);
      const A a = static_cast<A>(in.scale / in.l[token]);
      strips<A, U>(d, [&](int64_t j, auto count, int lanes) ATTNRES_LAMBDA {
        each<decltype(count)::value>([&](auto u) ATTNRES_LAMBDA {
          store(out + token * d + j + u * L, a * load(o + j + u * L, lanes), lanes, past_cache);
        });
      });
    }
    finish_stores();
  }
}

template <class T>
struct MergeGradients {
  using A = Compute<T>;
  A *o, *m, *l;
  T* partial;
};

// From the gradient g of a row of the mixture without its scale; `base` is added to the partial sum's, if not null.
// `along_mixture` is <g, mixture> where the caller knows it better than a sum that cancels.
template <class T, class G>
inline void mixture_gradient(const Merged<T>& in, int64_t token, const Coefficients& c, const G* g, double scale,
                             const T* base, const double* along_mixture, const MergeGradients<T>& out,
                             Compute<T>* key_sums, bool past_cache) {
  using A = Compute<T>;
  constexpr int U = 4, L = kLanes<A>;
  const int64_t d = in.d;
  const A* o = in.o_row(token);
  const T* x = in.partial_row(token);
  A products[2];
  dots<1, false>(g, o, 0, d, products, nullptr);
  dots<1, false>(x, g, 0, d, products + 1, nullptr);
  const double along_o = scale * products[0], along_x = scale * products[1];
  const double along_h = along_mixture ? *along_mixture : c.of_blocks * along_o + c.of_partial * along_x;
  // Only the difference of m and the partial sum's logit matters. Sums with along_h would cancel.
  const double grad_logit = c.of_blocks * c.of_partial * (in.l[token] * along_x - along_o);
  out.m[token] = static_cast<A>(-grad_logit);
  out.l[token] = static_cast<A>(-c.of_blocks * along_h);
  const A a = static_cast<A>(c.of_blocks * scale), b = static_cast<A>(c.of_partial * scale);
  A* to = out.o + token * d;
  strips<A, U>(d, [&](int64_t j, auto count, int lanes) ATTNRES_LAMBDA {
    each<decltype(count)::value>(
        [&](auto u) ATTNRES_LAMBDA { store(to + j + u * L, a * load(g + j + u * L, lanes), lanes, past_cache); });
  });
  const A along_key = static_cast<A>(grad_logit * c.r), through_rms = static_cast<A>(grad_logit * c.r * c.logit / d);
  source_gradient<T, G>(x, in.partial_stride, g, 0, in.key, 0, 1, &b, &along_key, through_rms, static_cast<A>(c.r),
                        base, d, out.partial + token * d, key_sums, past_cache);
}

template <class T>
void merge_backward(int threads, const Merged<T>& in, const T* grad, int64_t grad_stride, const MergeGradients<T>& out,
                    Compute<T>* grad_key) {
  using A = Compute<T>;
  const bool past_cache = prepare(out.o, in.tokens, in.d) & prepare(out.partial, in.tokens, in.d);
  threads = useful_threads(threads, in.tokens * in.d);
  TokenSums<A> sums(threads, in.d);
#pragma omp parallel num_threads(threads)
  {
    int64_t since = 0;
#pragma omp for schedule(static)
    for (int64_t token = 0; token < in.tokens; ++token) {
      const Coefficients c = coefficients(in, token, in.partial_row(token));
      mixture_gradient<T, T>(in, token, c, grad + token * grad_stride, in.scale, nullptr, nullptr, out,
                             sums.begin(1, &since), past_cache);
    }
    sums.flush();
    finish_stores();
  }
  sums.write(grad_key);
}

// The norm that follows the merge: its weight and bias may be null.
template <class A>
struct Norm {
  const A *weight, *bias;
  double eps;
  bool centred;
};

template <class A>
inline void scale_row(A* h, A factor, A added, int64_t d) {
  strips<A, 4>(d, [&](int64_t j, auto count, int lanes) ATTNRES_LAMBDA {
    each<decltype(count)::value>([&](auto u) ATTNRES_LAMBDA {
      A* at = h + j + u * kLanes<A>;
      store(at, factor * load(at, lanes) + added, lanes, false);
    });
  });
}

// h = scale (a o + b x), or scale a o without an x, normalised in place; returns the factor of the norm.
template <class T>
inline double normalised_mixture(const Merged<T>& in, int64_t token, const Coefficients& c, const T* x, double norm_eps,
                                 bool centred, Compute<T>* h) {
  using A = Compute<T>;
  constexpr int L = kLanes<A>;
  const int64_t d = in.d;
  const A* o = in.o_row(token);
  const A a = static_cast<A>(c.of_blocks * in.scale), b = static_cast<A>(c.of_partial * in.scale);
  Vec<A> sum[4] = {};
  strips<A, 4>(d, [&](int64_t j, auto count, int lanes) ATTNRES_LAMBDA {
    each<decltype(count)::value>([&](auto u) ATTNRES_LAMBDA {
      Vec<A> v = a * load(o + j + u * L, lanes);
      if (x) v += b * load(x + j + u * L, lanes);
      sum[u] += v;
      store(h + j + u * L, v, lanes, false);
    });
  });
  if (centred) {
    const A mean = sum_of_lanes<A>(sum[0] + sum[1] + sum[2] + sum[3]) / static_cast<A>(d);
    scale_row(h, A{1}, -mean, d);
  }
  A product;
  double squares;
  dots<1, true>(h, h, 0, d, &product, &squares);
  const double r = inverse_rms(squares, d, norm_eps);
  scale_row(h, static_cast<A>(r), A{0}, d);
  return r;
}

// The partial sum is the one that goes to `total`, or without a branch in.partial, which may be null too.
template <class T>
void add_merge_norm(int threads, const Merged<T>& in, const T* branch, int64_t branch_stride,
                    const Norm<Compute<T>>& norm, T* total, T* out) {
  using A = Compute<T>;
  constexpr int L = kLanes<A>;
  const int64_t d = in.d;
  const bool past_cache = prepare(out, in.tokens, d);
  // Not past the cache, since the next step reads it.
  if (branch) prepare(total, in.tokens, d);
#pragma omp parallel num_threads(useful_threads(threads, in.tokens* d))
  {
    std::vector<A> h(d);
#pragma omp for schedule(static)
    for (int64_t token = 0; token < in.tokens; ++token) {
      const T* x = in.partial ? in.partial_row(token) : nullptr;
      if (branch) {
        const T *partial = x, *added = branch + token * branch_stride;
        T* sum = total + token * d;
        strips<A, 4>(d, [&](int64_t j, auto count, int lanes) ATTNRES_LAMBDA {
          each<decltype(count)::value>([&](auto u) ATTNRES_LAMBDA {
            const int64_t at = j + u * L;
            store(sum + at, load(partial + at, lanes) + load(added + at, lanes), lanes, false);
          });
        });
        x = sum;
      }
      const Coefficients c = x ? coefficients<T>(in, token, x) : Coefficients{1 / static_cast<double>(in.l[token])};
      normalised_mixture<T>(in, token, c, x, norm.eps, norm.centred, h.data());
      strips<A, 4>(d, [&](int64_t j, auto count, int lanes) ATTNRES_LAMBDA {
        each<decltype(count)::value>([&](auto u) ATTNRES_LAMBDA {
          const int64_t at = j + u * L;
          Vec<A> y = load(h.data() + at, lanes);
          if (norm.weight) y *= load(norm.weight + at, lanes);
          if (norm.bias) y += load(norm.bias + at, lanes);
          store(out + token * d + at, y, lanes, past_cache);
        });
      });
    }
    finish_stores();
  }
}

// in.partial is the sum of both terms. grad_key_weight_bias: [3, d].
template <class T>
void add_merge_norm_backward(int threads, const Merged<T>& in, const T* grad_total, int64_t grad_total_stride,
                             const T* grad_normalised, int64_t grad_normalised_stride, const Norm<Compute<T>>& norm,
                             const MergeGradients<T>& out, Compute<T>* grad_key_weight_bias) {
  using A = Compute<T>;
  constexpr int L = kLanes<A>;
  const int64_t d = in.d;
  const bool past_cache = prepare(out.o, in.tokens, d) & prepare(out.partial, in.tokens, d);
  threads = useful_threads(threads, in.tokens * d);
  TokenSums<A> all_sums(threads, 3 * d);
#pragma omp parallel num_threads(threads)
  {
    std::vector<A> y(d), grad_h(d);
    int64_t since = 0;
#pragma omp for schedule(static)
    for (int64_t token = 0; token < in.tokens; ++token) {
      const T* grad = grad_normalised + token * grad_normalised_stride;
      A *sums = all_sums.begin(1, &since), *of_weight = sums + d, *of_bias = sums + 2 * d;
      const T* x = in.partial_row(token);
      const Coefficients c = coefficients<T>(in, token, x);
      const double exact_r = normalised_mixture<T>(in, token, c, x, norm.eps, norm.centred, y.data());
      const A r = static_cast<A>(exact_r);
      Vec<A> sum_g[4] = {}, sum_gy[4] = {};
      strips<A, 4>(d, [&](int64_t j, auto count, int lanes) ATTNRES_LAMBDA {
        each<decltype(count)::value>([&](auto u) ATTNRES_LAMBDA {
          const int64_t at = j + u * L;
          const Vec<A> v = load(y.data() + at, lanes);
          Vec<A> g = load(grad + at, lanes);
          store(of_weight + at, load(of_weight + at, lanes) + g * v, lanes, false);
          store(of_bias + at, load(of_bias + at, lanes) + g, lanes, false);
          if (norm.weight) g *= load(norm.weight + at, lanes);
          store(grad_h.data() + at, g, lanes, false);
          sum_g[u] += g;
          sum_gy[u] += g * v;
        });
      });
      const A along_y = sum_of_lanes<A>(sum_gy[0] + sum_gy[1] + sum_gy[2] + sum_gy[3]) / static_cast<A>(d);
      const A mean = norm.centred ? sum_of_lanes<A>(sum_g[0] + sum_g[1] + sum_g[2] + sum_g[3]) / static_cast<A>(d) : 0;
      strips<A, 4>(d, [&](int64_t j, auto count, int lanes) ATTNRES_LAMBDA {
        each<decltype(count)::value>([&](auto u) ATTNRES_LAMBDA {
          A* at = grad_h.data() + j + u * L;
          const Vec<A> v = load(y.data() + j + u * L, lanes);
          store(at, r * (load(at, lanes) - mean - along_y * v), lanes, false);
        });
      });
      // A norm does not see the length of its input, but for eps.
      const double along_h = static_cast<double>(d) * along_y * norm.eps * exact_r * exact_r;
      mixture_gradient<T, A>(in, token, c, grad_h.data(), in.scale, grad_total + token * grad_total_stride, &along_h,
                             out, sums, past_cache);
    }
    all_sums.flush();
    finish_stores();
  }
  all_sums.write(grad_key_weight_bias);
}

}  // namespace attnres

// Reads: depth_attention, inter_block and their backwards. A tile of tokens fits the second-level cache: the sources
// come from memory once, in contiguous streams, and are read again from there. The second pass of a read has little to
// do and fetches the next tile, which has to fit as well and is best small; that of a backward is busy writing.
#pragma once

#include "rows.h"

namespace attnres {

template <class T>
struct Sources {
  const void* const* pointers;
  const int64_t* strides;  // elements from token to token, per source
  int64_t n, tokens, d;

  const T* row(int64_t source, int64_t token) const {
    return static_cast<const T*>(pointers[source]) + token * strides[source];
  }
  int64_t tile(int64_t most) const {
    constexpr int64_t kCache = 320 << 10;
    return std::clamp<int64_t>(kCache / (n * d * static_cast<int64_t>(sizeof(T))), 1, most);
  }
};

// One token's softmax over the sources for S reads, and what it was made of.
template <class A>
class Logits {
 public:
  Logits(int64_t n, int64_t reads) : reads_(reads), values_(n * reads), r_(n), largest_(reads), first_(reads) {}

  // dots: [n][reads], squares: [n].
  void compute(const A* dots, const double* squares, int64_t n, int64_t d, double eps) {
    for (int64_t i = 0; i < n; ++i) {
      r_[i] = inverse_rms(squares[i], d, eps);
      for (int64_t s = 0; s < reads_; ++s) {
        const double logit = r_[i] * static_cast<double>(dots[i * reads_ + s]);
        values_[i * reads_ + s] = logit;
        // A NaN stays the largest once it is.
        if (i == 0 || logit > largest_[s] || logit != logit) largest_[s] = logit, first_[s] = i;
      }
    }
  }
  A exponential(int64_t i, int64_t s) const { return std::exp(static_cast<A>(logit(i, s) - largest_[s])); }
  double logit(int64_t i, int64_t s) const { return values_[i * reads_ + s]; }
  double r(int64_t i) const { return r_[i]; }
  double largest(int64_t s) const { return largest_[s]; }
  int64_t first(int64_t s) const { return first_[s]; }

 private:
  int64_t reads_;
  std::vector<double> values_, r_, largest_;
  std::vector<int64_t> first_;
};

// With m and l the unnormalised sums of inter_block, without them the scaled means of depth_attention. kMost bounds the
// reads that are taken at a time.
template <int kMost, class T, class O>
void read(int threads, const Sources<T>& x, const Compute<T>* keys, int64_t reads, double eps, double scale, O* out,
          Compute<T>* m, Compute<T>* l) {
  using A = Compute<T>;
  const int64_t n = x.n, d = x.d, tokens = x.tokens, tile = x.tile(2);
  const bool past_cache = prepare(out, reads * tokens, d);
  threads = useful_threads(threads, n * tokens * d);
#pragma omp parallel num_threads(threads)
  {
    std::vector<A> products(tile * n * reads), weights(n * reads);
    std::vector<double> squares(tile * n);
    std::vector<const T*> rows(n);
    Logits<A> logits(n, reads);
    std::vector<int64_t> ahead(n);
    for (int64_t i = 0; i < n; ++i) ahead[i] = tile * x.strides[i];
#pragma omp for schedule(static)
    for (int64_t start = 0; start < tokens; start += tile) {
      const int64_t count = std::min(tile, tokens - start);
      for (int64_t i = 0; i < n; ++i)
        for (int64_t t = 0; t < count; ++t)
          all_dots<kMost>(x.row(i, start + t), keys, d, reads, d, &products[(t * n + i) * reads], &squares[t * n + i]);
      for (int64_t t = 0; t < count; ++t) {
        const int64_t token = start + t;
        logits.compute(&products[t * n * reads], &squares[t * n], n, d, eps);
        for (int64_t i = 0; i < n; ++i) rows[i] = x.row(i, token);
        read_groups<kMost>(reads, [&](int64_t first, auto group) ATTNRES_LAMBDA {
          constexpr int S = decltype(group)::value;
          for (int s = 0; s < S; ++s) {
            double total = 0;
            for (int64_t i = 0; i < n; ++i) total += weights[i * S + s] = logits.exponential(i, first + s);
            if (m) {
              m[(first + s) * tokens + token] = static_cast<A>(logits.largest(first + s));
              l[(first + s) * tokens + token] = static_cast<A>(total);
            } else {
              for (int64_t i = 0; i < n; ++i) weights[i * S + s] *= static_cast<A>(scale / total);
            }
          }
          O* to = out + (first * tokens + token) * d;
          weighted_sums<S>(rows.data(), n, weights.data(), d, to, tokens * d, past_cache, ahead.data());
        });
      }
    }
    finish_stores();
  }
}

// grad: [reads][tokens][d]. With grad_m and grad_l the gradients of inter_block, without them of depth_attention.
template <int kMost, class T, class G>
void read_backward(int threads, const Sources<T>& x, const Compute<T>* keys, int64_t reads, double eps, double scale,
                   const G* grad, const Compute<T>* grad_m, const Compute<T>* grad_l, void* const* grads,
                   Compute<T>* grad_keys) {
  using A = Compute<T>;
  const int64_t n = x.n, d = x.d, tokens = x.tokens, tile = x.tile(8);
  bool past_cache = true;
  for (int64_t i = 0; i < n; ++i) past_cache &= prepare(static_cast<T*>(grads[i]), tokens, d);
  threads = useful_threads(threads, n * tokens * d);
  TokenSums<A> key_sums(threads, reads * d);
  // The gradients, keys and sums that all sources share stay in the first-level cache for as many features.
  constexpr int64_t kShared = 16 << 10, kLeast = 256;
  const int64_t stretch = std::max(kShared / (3 * reads * static_cast<int64_t>(sizeof(A))) / kLeast * kLeast, kLeast);
#pragma omp parallel num_threads(threads)
  {
    std::vector<A> products(tile * n * reads), projected(n * reads), weights(n * reads), along_keys(n * reads);
    std::vector<double> squares(tile * n), along_x(n);
    Logits<A> logits(n, reads);
    int64_t since = 0;
#pragma omp for schedule(static)
    for (int64_t start = 0; start < tokens; start += tile) {
      const int64_t count = std::min(tile, tokens - start);
      for (int64_t i = 0; i < n; ++i)
        for (int64_t t = 0; t < count; ++t) {
          const int64_t at = t * n + i;
          all_dots<kMost>(x.row(i, start + t), keys, d, reads, d, &products[at * reads], &squares[at]);
        }
      for (int64_t t = 0; t < count; ++t) {
        const int64_t token = start + t;
        for (int64_t i = 0; i < n; ++i)
          all_dots<kMost>(x.row(i, token), grad + token * d, tokens * d, reads, d, &projected[i * reads], nullptr);
        logits.compute(&products[t * n * reads], &squares[t * n], n, d, eps);
        for (int64_t s = 0; s < reads; ++s) {
          double total = 0, weighted = 0;
          for (int64_t i = 0; i < n; ++i) {
            const double weight = weights[i * reads + s] = logits.exponential(i, s);
            total += weight;
            weighted += weight * static_cast<double>(projected[i * reads + s]);
          }
          // o and l fall when m rises; m follows its largest logit, the first of equals. The softmax of depth_attention
          // is that with an m nothing depends on.
          const double factor = grad_m ? 1 : scale / total, l_term = grad_m ? grad_l[s * tokens + token] : 0;
          const double mean = grad_m ? 0 : weighted / total;
          const double m_term = grad_m ? grad_m[s * tokens + token] - weighted - total * l_term : 0;
          for (int64_t i = 0; i < n; ++i) {
            const double weight = factor * weights[i * reads + s];
            double grad_logit = weight * (static_cast<double>(projected[i * reads + s]) - mean + l_term);
            if (i == logits.first(s)) grad_logit += m_term;
            weights[i * reads + s] = static_cast<A>(weight);
            along_keys[i * reads + s] = static_cast<A>(grad_logit * logits.r(i));
          }
        }
        for (int64_t i = 0; i < n; ++i) {
          along_x[i] = 0;
          for (int64_t s = 0; s < reads; ++s) along_x[i] += along_keys[i * reads + s] * logits.logit(i, s);
        }
        A* sums = key_sums.begin(n, &since);
        for (int64_t j = 0; j < d; j += stretch)
          for (int64_t i = 0; i < n; ++i)
            source_gradient<T, G>(x.row(i, token) + j, tile * x.strides[i], grad + token * d + j, tokens * d, keys + j,
                                  d, reads, &weights[i * reads], &along_keys[i * reads], static_cast<A>(along_x[i] / d),
                                  static_cast<A>(logits.r(i)), nullptr, std::min(stretch, d - j),
                                  static_cast<T*>(grads[i]) + token * d + j, sums + j, past_cache);
      }
    }
    key_sums.flush();
    finish_stores();
  }
  key_sums.write(grad_keys);
}

}  // namespace attnres

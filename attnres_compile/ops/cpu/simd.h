// Vectors of the compute type, loaded from and stored to the storage types, on any machine GCC or Clang knows.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__linux__)
#include <sys/mman.h>
#endif

#define ATTNRES_INLINE inline __attribute__((always_inline))
#define ATTNRES_LAMBDA __attribute__((always_inline))

namespace attnres {

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
constexpr int kLine = 64;

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

// Sums over features of the half types are fp32, as everywhere in the library.
template <class T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class E, int N>
struct VectorOf {
  typedef E type __attribute__((vector_size(N * sizeof(E))));
};
template <class A>
constexpr int kLanes = kBytes / static_cast<int>(sizeof(A));
template <class A>
using Vec = typename VectorOf<A, kLanes<A>>::type;

constexpr int kFloats = kLanes<float>;
using Words = typename VectorOf<uint32_t, kFloats>::type;
using Shorts = typename VectorOf<uint16_t, kFloats>::type;

template <class U, class P>
ATTNRES_INLINE U get(const P* p) {
  U bits;
  std::memcpy(&bits, p, sizeof bits);
  return bits;
}

// `past_cache` needs an address that is a multiple of the size.
template <class U, class P>
ATTNRES_INLINE void put(P* p, U bits, bool past_cache) {
#if defined(__SSE2__)
  if (past_cache) {
#if defined(__AVX512F__)
    if constexpr (sizeof(U) == 64) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(p), (__m512i)bits);
      return;
    }
#endif
#if defined(__AVX__)
    if constexpr (sizeof(U) == 32) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(p), (__m256i)bits);
      return;
    }
#endif
    if constexpr (sizeof(U) == 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(p), (__m128i)bits);
      return;
    }
  }
#endif
  (void)past_cache;
  std::memcpy(p, &bits, sizeof bits);
}

// Stores past the cache are ordered with nothing: to be called by each thread that made some.
inline void finish_stores() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

#if !defined(__F16C__)
inline float half_to_float(uint16_t half) {
  const uint32_t rest = half & 0x7fffu, sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  uint32_t bits = rest << 13;
  // The multiplication moves the exponent's bias and normalises subnormal numbers in one.
  const float value = get<float>(&bits) * 0x1p112f;
  bits = get<uint32_t>(&value) | sign;
  if (rest >= 0x7c00u) bits |= 0x7f800000u;
  return get<float>(&bits);
}

inline uint16_t float_to_half(float value) {
  const uint32_t bits = get<uint32_t>(&value), rest = bits & 0x7fffffffu, sign = (bits >> 16) & 0x8000u;
  uint32_t half;
  if (rest > 0x7f800000u) {
    half = 0x7e00u;
  } else if (rest >= 0x47800000u) {
    half = 0x7c00u;
  } else if (rest >= 0x38800000u) {
    half = (rest + 0xfffu + ((rest >> 13) & 1u) - 0x38000000u) >> 13;
  } else {
    // One unit in the last place of 0.5f is the smallest subnormal half: the addition rounds.
    const float shifted = get<float>(&rest) + 0.5f;
    half = get<uint32_t>(&shifted) - 0x3f000000u;
  }
  return static_cast<uint16_t>(sign | half);
}
#endif

ATTNRES_INLINE Vec<float> load(const float* p) { return get<Vec<float>>(p); }
ATTNRES_INLINE Vec<double> load(const double* p) { return get<Vec<double>>(p); }

// The instructions that widen and narrow in one step: not every compiler finds them.
ATTNRES_INLINE Words widened(Shorts v) {
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu16_epi32((__m256i)v);
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu16_epi32((__m128i)v);
#else
  return __builtin_convertvector(v, Words);
#endif
}
ATTNRES_INLINE Shorts narrowed(Words v) {
#if defined(__AVX512F__)
  return (Shorts)_mm512_cvtepi32_epi16((__m512i)v);
#elif defined(__AVX2__)
  const __m256i halves = _mm256_packus_epi32((__m256i)v, (__m256i)v);
  return (Shorts)_mm256_castsi256_si128(_mm256_permute4x64_epi64(halves, 0x08));
#else
  return __builtin_convertvector(v, Shorts);
#endif
}

ATTNRES_INLINE Vec<float> load(const BFloat16* p) { return (Vec<float>)(widened(get<Shorts>(p)) << 16); }
ATTNRES_INLINE Vec<float> load(const Half* p) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_cvtph_ps(get<__m256i>(p));
#elif defined(__F16C__)
  return (Vec<float>)_mm256_cvtph_ps(get<__m128i>(p));
#else
  Vec<float> v;
  for (int i = 0; i < kFloats; ++i) v[i] = half_to_float(p[i].bits);
  return v;
#endif
}

ATTNRES_INLINE void store(float* p, Vec<float> v, bool past_cache = false) { put(p, v, past_cache); }
ATTNRES_INLINE void store(double* p, Vec<double> v, bool past_cache = false) { put(p, v, past_cache); }
ATTNRES_INLINE void store(BFloat16* p, Vec<float> v, bool past_cache = false) {
  const Words bits = (Words)v, is_nan = (Words)(v != v);
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  // Rounding a NaN could carry into the sign.
  const Words kept = (rounded & ~is_nan) | (is_nan & 0x7fc0u);
  put(p, narrowed(kept), past_cache);
}
ATTNRES_INLINE void store(Half* p, Vec<float> v, bool past_cache = false) {
#if defined(__AVX512F__)
  put(p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), past_cache);
#elif defined(__F16C__)
  put(p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT), past_cache);
#else
  Shorts halves;
  for (int i = 0; i < kFloats; ++i) halves[i] = float_to_half(v[i]);
  put(p, halves, past_cache);
#endif
}

// The end of a row: lanes past `count` read as zero and are not written.
template <class T>
ATTNRES_INLINE Vec<Compute<T>> load(const T* p, int count) {
  if (count == kLanes<Compute<T>>) return load(p);
  T padded[kLanes<Compute<T>>] = {};
  std::memcpy(padded, p, count * sizeof(T));
  return load(padded);
}

template <class T>
ATTNRES_INLINE void store(T* p, Vec<Compute<T>> v, int count, bool past_cache) {
  if (count == kLanes<Compute<T>>) return store(p, v, past_cache);
  T padded[kLanes<Compute<T>>];
  store(padded, v);
  std::memcpy(p, padded, count * sizeof(T));
}

// The value as the storage type holds it.
template <class T>
ATTNRES_INLINE Vec<Compute<T>> rounded(Vec<Compute<T>> v) {
  if constexpr (sizeof(T) == sizeof(Compute<T>)) {
    return v;
  } else {
    T lanes[kFloats];
    store(lanes, v);
    return load(lanes);
  }
}

template <class A>
ATTNRES_INLINE A sum_of_lanes(Vec<A> v) {
  A lanes[kLanes<A>];
  std::memcpy(lanes, &v, sizeof v);
  for (int width = kLanes<A> / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

// Calls `body` with the constants 0 to N - 1: arrays that only constants index are registers.
template <class Body, int... I>
ATTNRES_INLINE void each_of(Body&& body, std::integer_sequence<int, I...>) {
  (body(std::integral_constant<int, I>{}), ...);
}
template <int N, class Body>
ATTNRES_INLINE void each(Body&& body) {
  each_of(body, std::make_integer_sequence<int, N>{});
}

// Calls `body(first feature, number of vectors, lanes of each)` over a row of d features, U vectors at a time.
template <class A, int U, class Body>
ATTNRES_INLINE void strips(int64_t d, Body&& body) {
  constexpr int L = kLanes<A>;
  int64_t j = 0;
  for (; j + U * L <= d; j += U * L) body(j, std::integral_constant<int, U>{}, L);
  for (; j + L <= d; j += L) body(j, std::integral_constant<int, 1>{}, L);
  if (j < d) body(j, std::integral_constant<int, 1>{}, static_cast<int>(d - j));
}

// Readies the memory of a result. Returns whether its rows go past the cache: never in parts of lines, and only if they
// would push others out.
template <class T>
bool prepare(T* p, int64_t rows, int64_t d) {
  constexpr int64_t kLarge = int64_t{1} << 20;
  const int64_t row = d * static_cast<int64_t>(sizeof(T)), size = rows * row;
#if defined(__linux__)
  // New memory costs a fault for each page: more, for small pages, than reading the sources.
  constexpr uintptr_t kLargePage = uintptr_t{2} << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(p) + kLargePage - 1) / kLargePage * kLargePage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(p) + size) / kLargePage * kLargePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
  return reinterpret_cast<uintptr_t>(p) % kLine == 0 && row % kLine == 0 && size > kLarge;
}

}  // namespace attnres

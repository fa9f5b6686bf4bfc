// What the functions of kernels.cpp take, as Python's ctypes (abi.py) and dispatcher.cpp fill it in.
#pragma once

#include <cstdint>

extern "C" {

// n sources and the S keys that read them.
struct ReadArguments {
  int64_t threads, n, reads, tokens, d;
  double eps, scale;
  const void* const* sources;
  const int64_t* strides;
  const void* keys;
};

// One read's statistics, the partial sum and the key. A block's first read has neither of these two: null.
struct MergeArguments {
  int64_t threads, tokens, d;
  double eps, scale;
  const void* o;
  int64_t o_stride;
  const void *m, *l, *partial;
  int64_t partial_stride;
  const void* key;
};

// A norm after a merge; null for an absent weight or bias.
struct NormArguments {
  const void *weight, *bias;
  double eps;
  int32_t centred;
};

}  // extern "C"

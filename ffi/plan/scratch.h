// How kernels lay out their scratch memory.
#pragma once

#include <cstdint>

namespace jnvfp4 {

constexpr int64_t round_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

// Puts `bytes` behind the scratch that is taken, from a multiple of 256 on; returns where.
inline int64_t take_scratch(int64_t bytes, int64_t* taken) {
  const int64_t at = *taken;
  *taken += round_up(bytes, 256);
  return at;
}

// The distance of rows of `bytes`, as tensor maps of Hopper take it.
inline int64_t row_pitch(int64_t bytes) { return round_up(bytes, 16); }

}  // namespace jnvfp4

// Bit patterns of float32 to go through, on all processors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

// f(begin, end) over [0, count) on every processor.
template <class F>
void in_pieces(uint64_t count, F f) {
  const uint64_t pieces = std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::thread> threads;
  for (uint64_t p = 0; p < pieces; ++p) threads.emplace_back([=] { f(count * p / pieces, count * (p + 1) / pieces); });
  for (auto& t : threads) t.join();
}

// What goes with each upper 24 bits: all lower bytes if `which` is full, three of them if it is quick.
inline std::vector<uint32_t> low_bits_of(const std::string& which) {
  if (which != "full") return {0x00, 0x01, 0xff};
  std::vector<uint32_t> all(256);
  for (uint32_t i = 0; i < 256; ++i) all[i] = i;
  return all;
}

// Pseudo-random bits.
inline uint32_t hash(uint32_t v) {
  v = (v ^ v >> 16) * 0x7feb352du;
  v = (v ^ v >> 15) * 0x846ca68bu;
  return v ^ v >> 16;
}

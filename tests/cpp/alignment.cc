// The check of every handler that an array begins at a multiple of 16 bytes. Prints the first fault.
#include <cstdio>

#include "calls/checks.h"

using namespace jnvfp4;

namespace {

alignas(64) uint8_t memory[256];

// The text for an array of so many elements of a byte, so many bytes past an aligned address.
std::string text_for(int64_t count, int64_t past) {
  int64_t dims[] = {count};
  XLA_FFI_Buffer buffer{};
  buffer.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
  buffer.dtype = XLA_FFI_DataType_U8, buffer.data = memory + past, buffer.rank = 1, buffer.dims = dims;
  Checks check("op");
  check.type("x", ffi::AnyBuffer(&buffer), {Type::U8});
  return check.ok() ? "" : check.error().message();
}

bool is(const std::string& text, const std::string& want) {
  if (text != want) std::printf("'%s' instead of '%s'\n", text.c_str(), want.c_str());
  return text == want;
}

}  // namespace

int main() {
  bool right = true;
  for (const int64_t past : {0, 16, 48}) right &= is(text_for(64, past), "");
  for (const int64_t count : {0, 1, 15}) right &= is(text_for(count, 4), "");  // an amax, or what is absent
  for (const int64_t past : {1, 4, 8, 24})
    right &= is(text_for(16, past), "op: x must begin at a multiple of 16 bytes, is " + std::to_string(past % 16) +
                                        " past one: copy it first");
  return right ? 0 : 1;
}

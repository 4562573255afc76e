// A stand-in for cuBLASLt: the functions that products call, with their names. It takes only the attributes, sizes and
// values of the real header that these products use, refuses others, and computes D exactly from what it is given: one
// rounding of the sum to float32, one of alpha times it, one of the bias, and the cast. It computes on the CPU: arrays
// in device memory are copied there, after what the stream has to do before, and the result is copied back.
//
// `stand_in_fail` and `stand_in_version` say how it fails; `stand_in_complaint` says what it refused. `stand_in_fault`
// makes it wrong, as a library may be on a GPU that no test has: the self-check of products must find each fault.
#include <dlfcn.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "core/arrays.h"
#include "core/scale_tiles.h"

using namespace jnvfp4;

namespace {

// Statuses, types and attributes by their numbers in cublas_api.h, library_types.h and cublasLt.h. Not those that ffi/
// declares: this is another reading of the headers, which test_block_scaled.py compares with both.
enum Status { kSuccess = 0, kInvalidValue = 7, kNotSupported = 15 };
enum Type { kF32 = 0, kF16 = 2, kBf16 = 14, kE2M1 = 33 };

std::string complaint;
std::map<std::string, int> failures;
size_t version = 130200;
std::string fault;            // "layout", "alpha", "padding", "nan" or none
std::set<const void*> alive;  // handles apart

Status refuse(const std::string& what) {
  if (complaint.empty()) complaint = what;
  return kInvalidValue;
}

// A status that a test wants of a function.
bool fails(const char* function, int* status) {
  const auto wanted = failures.find(function);
  if (wanted == failures.end()) return false;
  *status = wanted->second;
  return true;
}
#define MAY_FAIL(function) \
  if (int status = 0; fails(function, &status)) return status

// Attributes by number, and how many bytes each has.
struct Attributes {
  std::map<int, size_t> sizes;
  std::map<int, uint64_t> values;
  std::string what;

  int set(int attribute, const void* value, size_t bytes) {
    const auto known = sizes.find(attribute);
    const std::string name = what + " attribute " + std::to_string(attribute);
    if (known == sizes.end()) return refuse(name + " is unknown");
    if (bytes != known->second) return refuse(name + " has " + std::to_string(bytes) + " bytes");
    uint64_t number = 0;
    std::memcpy(&number, value, bytes);
    values[attribute] = number;
    return kSuccess;
  }
  uint64_t get(int attribute) const {
    const auto found = values.find(attribute);
    return found == values.end() ? 0 : found->second;
  }
  template <class T>
  const T* pointer(int attribute) const {
    return reinterpret_cast<const T*>(get(attribute));
  }
};

// Pointer mode, transposes of A and B, epilogue, bias and its type; pointers to the scales of A and B, and their modes.
struct Desc : Attributes {
  Desc()
      : Attributes{
            {{2, 4}, {3, 4}, {4, 4}, {7, 4}, {8, 8}, {17, 8}, {18, 8}, {26, 4}, {31, 4}, {32, 4}}, {}, "product"} {}
};
struct Layout {
  int type;
  int64_t rows, cols, distance;
  int64_t bytes() const {  // from the first element to the last
    const int64_t elements = (cols - 1) * distance + rows;
    return type == kE2M1 ? elements / 2 : elements * (type == kF32 ? 4 : 2);
  }
};
struct Preference : Attributes {  // bytes of workspace, reductions, alignments of A, B, C, D
  Preference() : Attributes{{{1, 8}, {3, 4}, {5, 4}, {6, 4}, {7, 4}, {8, 4}}, {}, "preference"} {}
};

struct Handle {};
Handle the_handle;

template <class T>
int make(void** object, T* made) {
  *object = made;
  alive.insert(made);
  return kSuccess;
}
template <class T>
int drop(void* object) {
  if (!alive.erase(object)) return refuse("an object is destroyed that is not alive");
  delete static_cast<T*>(object);
  return kSuccess;
}

// The layout is that of a whole product: what the library takes, and what is written in its documentation.
struct Product {
  const Desc& desc;
  const Layout &a, &b, &d;
  int64_t m, n, k;
  bool on_device, with_bias;

  Product(const Desc& desc, const Layout& a, const Layout& b, const Layout& d)
      : desc(desc),
        a(a),
        b(b),
        d(d),
        m(d.rows),
        n(d.cols),
        k(a.rows),
        on_device(desc.get(2) == 1),
        with_bias(desc.get(7) == 4) {}

  int check() const {
    if (desc.get(3) != 1 || desc.get(4) != 0) return refuse("only A is transposed");
    if (b.rows != k || a.cols != m || b.cols != n) return refuse("the matrices do not fit each other");
    if (a.distance < k || b.distance < k) return refuse("columns overlap");
    if (d.distance != m) return refuse("what is between the columns of D would be lost");
    if (a.type != kE2M1 || b.type != kE2M1) return refuse("A and B are not of FP4");
    if (desc.get(2) > 1) return refuse("the pointer mode is unknown");
    if (desc.get(7) != 0 && desc.get(7) != 4 && desc.get(7) != 1) return refuse("the epilogue is unknown");
    if (with_bias && (!desc.get(8) || static_cast<int>(desc.get(26)) != d.type))
      return refuse("the bias has no pointer or another type than D");
    if (with_bias && d.type == kF32) return kNotSupported;
    if (d.type != kF32 && d.type != kBf16 && d.type != kF16) return refuse("the type of D is unknown");
    return check_scales();
  }
  int check_scales() const {
    if (desc.get(31) != 1 || desc.get(32) != 1) return refuse("FP4 operands need scales of 16 elements");
    if (!desc.get(17) || !desc.get(18)) return refuse("the scaling mode needs pointers");
    if (desc.get(17) % 16 || desc.get(18) % 16) return refuse("the scales are not aligned");
    if (k % 32 || m % 16 || a.distance % 32 || b.distance % 32 || d.distance % 16) return kNotSupported;
    return kSuccess;
  }
};

// An element times 2 * 2^9 and its scale's 2^9: an integer, so that sums are exact. `nan` says that it has none.
struct Fixed {
  int64_t number = 0;
  bool nan = false;
};
// Scales are n * 2^-9, codes n / 2.
Fixed fp4_element(const uint8_t* data, const uint8_t* tiles, int64_t distance, int64_t scale_cols, int64_t row,
                  int64_t i) {
  const int64_t at = fault == "layout" ? row * scale_cols + i / 16 : tiled_scale_at({row, i / 16}, scale_cols);
  const uint8_t byte = data[(row * distance + i) / 2], scale = tiles[at];
  if ((scale & 0x7f) == 0x7f) return {0, true};
  static constexpr int kTwice[] = {0, 1, 2, 3, 4, 6, 8, 12};
  const int code = i % 2 ? byte >> 4 : byte & 15, exponent = scale >> 3 & 15,
            mantissa = scale & 7;  // the sign is ignored
  const int64_t s = exponent ? int64_t{8 + mantissa} << (exponent - 1) : mantissa;
  return {(code & 8 ? -kTwice[code & 7] : kTwice[code & 7]) * s, false};
}

float rounded(__int128 number, int exponent) {  // number * 2^exponent to the nearest, ties to even
  unsigned __int128 magnitude = number < 0 ? -static_cast<unsigned __int128>(number) : number;
  int dropped = 0;
  while (magnitude >> dropped >> 24) ++dropped;
  const unsigned __int128 unit = static_cast<unsigned __int128>(1) << dropped, rest = magnitude % unit;
  magnitude /= unit;
  if (2 * rest > unit || (2 * rest == unit && magnitude % 2)) ++magnitude;
  const float value = std::ldexp(static_cast<float>(static_cast<uint32_t>(magnitude)), exponent + dropped);
  return number < 0 ? -value : value;
}

// What CUDA's driver does, in processes that have loaded it. Device addresses are pointers.
struct Driver {
  int (*attributes)(unsigned count, const int* attributes, void** values, const void* array) = nullptr;
  int (*read)(void* host, const void* device, size_t bytes, void* stream) = nullptr;
  int (*write)(void* device, const void* host, size_t bytes, void* stream) = nullptr;
  int (*fill)(void* device, unsigned char byte, size_t bytes, void* stream) = nullptr;
  int (*wait)(void* stream) = nullptr;
  bool complete = false;

  Driver() {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (!library) return;
    complete = true;
    const auto get = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      complete = complete && function;
    };
    get(attributes, "cuPointerGetAttributes");
    get(read, "cuMemcpyDtoHAsync_v2");
    get(write, "cuMemcpyHtoDAsync_v2");
    get(fill, "cuMemsetD8Async");
    get(wait, "cuStreamSynchronize");
  }
  bool in_device_memory(const void* array) const {
    static constexpr int kMemoryType = 2;
    static constexpr unsigned kDeviceMemory = 2;
    unsigned type = 0;  // stays 0 for what the driver does not know
    void* value = &type;
    return complete && attributes(1, &kMemoryType, &value, array) == 0 && type == kDeviceMemory;
  }
};
const Driver& driver() {
  static const Driver loaded;
  return loaded;
}

// The arrays of a product, all where the first one is: on the host, or in device memory, of which this keeps copies.
class Arrays {
 public:
  Arrays(const void* first, void* stream) : on_device_(driver().in_device_memory(first)), stream_(stream) {}

  template <class T>
  const T* read(const T* array, int64_t bytes) {
    if (!array || !belongs(array) || !on_device_) return array;
    void* const copy = new_copy(bytes);
    take(driver().read(copy, array, static_cast<size_t>(bytes), stream_));
    return static_cast<const T*>(copy);
  }
  void fill(void* array, unsigned char byte, size_t bytes) {
    if (!belongs(array)) return;
    if (on_device_)
      take(driver().fill(array, byte, bytes, stream_));
    else
      std::memset(array, byte, bytes);
  }
  // Where to write an array of this product; `write_back` puts it to its place.
  void* written(void* array, int64_t bytes) { return belongs(array) && on_device_ ? new_copy(bytes) : array; }
  void write_back(void* array, const void* copy, int64_t bytes) {
    if (on_device_) take(driver().write(array, copy, static_cast<size_t>(bytes), stream_)), wait();
  }
  int wait() {
    if (on_device_) take(driver().wait(stream_));
    return status_;
  }

 private:
  bool belongs(const void* array) {
    const bool does = driver().in_device_memory(array) == on_device_;
    if (!does) status_ = refuse("an array is not in the memory where A is");
    return does;
  }
  void* new_copy(int64_t bytes) { return copies_.emplace_back(static_cast<size_t>(bytes)).data(); }
  void take(int error) {
    if (error) status_ = refuse("CUDA's driver returns " + std::to_string(error));
  }

  const bool on_device_;
  void* const stream_;
  std::vector<std::vector<uint8_t>> copies_;
  int status_ = kSuccess;
};

// What a product reads, on the host.
struct Operands {
  const void *a, *b, *bias;
  const uint8_t *a_scales, *b_scales;
  const float *alpha, *beta;

  Operands(const Product& p, Arrays& arrays, const void* a, const void* b, const float* alpha, const float* beta)
      : a(arrays.read(a, p.a.bytes())),
        b(arrays.read(b, p.b.bytes())),
        bias(p.with_bias ? arrays.read(p.desc.pointer<void>(8), p.m * (p.d.type == kF32 ? 4 : 2)) : nullptr),
        a_scales(arrays.read(p.desc.pointer<uint8_t>(17), tiled_scale_bytes(p.m, p.k / 16))),
        b_scales(arrays.read(p.desc.pointer<uint8_t>(18), tiled_scale_bytes(p.n, p.k / 16))),
        alpha(p.on_device ? arrays.read(alpha, 4) : alpha),
        beta(p.on_device ? arrays.read(beta, 4) : beta) {}
};

float sum_of(const Product& p, const Operands& x, int64_t row, int64_t col) {
  __int128 sum = 0;
  const int64_t scale_cols = p.k / 16;
  for (int64_t i = 0; i < p.k; ++i) {
    const Fixed a = fp4_element(static_cast<const uint8_t*>(x.a), x.a_scales, p.a.distance, scale_cols, row, i);
    const Fixed b = fp4_element(static_cast<const uint8_t*>(x.b), x.b_scales, p.b.distance, scale_cols, col, i);
    if (a.nan || b.nan) return std::nanf("");
    sum += static_cast<__int128>(a.number) * b.number;
  }
  return rounded(sum, -2 * (9 + 1));
}

// Scales behind the last rows and columns of a matrix are read by the hardware: they must not be NaN.
bool padding_is_zero(const uint8_t* tiles, int64_t rows, int64_t cols) {
  for (int64_t at = 0; at < tiled_scale_bytes(rows, cols); ++at) {
    const ScalePlace place = tiled_scale_place(at, cols);
    if ((place.row >= rows || place.col >= cols) && tiles[at]) return false;
  }
  return true;
}

void store(void* d, int type, int64_t at, float value) {
  if (type == kF32)
    static_cast<uint32_t*>(d)[at] = F32::store(value);
  else
    static_cast<uint16_t*>(d)[at] = type == kBf16 ? Bf16::store(value) : F16::store(value);
}

}  // namespace

extern "C" {

void stand_in_fail(const char* function, int status) { failures[function] = status; }
void stand_in_version(size_t wanted) { version = wanted; }
void stand_in_fault(const char* wanted) { fault = wanted; }
void stand_in_reset() { failures.clear(), complaint.clear(), fault.clear(), version = 130200; }
const char* stand_in_complaint() { return complaint.c_str(); }
int stand_in_alive() { return static_cast<int>(alive.size()); }

size_t cublasLtGetVersion() { return version; }
int cublasLtCreate(void** handle) {
  MAY_FAIL("Create");
  return *handle = &the_handle, kSuccess;
}
int cublasLtMatmulDescCreate(void** desc, int compute, int scale) {
  MAY_FAIL("MatmulDescCreate");
  if (compute != 68 || scale != kF32) return refuse("products are computed in float32");
  return make(desc, new Desc);
}
int cublasLtMatmulDescSetAttribute(void* desc, int attribute, const void* value, size_t bytes) {
  MAY_FAIL("MatmulDescSetAttribute");
  return static_cast<Desc*>(desc)->set(attribute, value, bytes);
}
int cublasLtMatmulDescDestroy(void* desc) { return drop<Desc>(desc); }
int cublasLtMatrixLayoutCreate(void** layout, int type, uint64_t rows, uint64_t cols, int64_t distance) {
  MAY_FAIL("MatrixLayoutCreate");
  return make(layout, new Layout{type, static_cast<int64_t>(rows), static_cast<int64_t>(cols), distance});
}
int cublasLtMatrixLayoutDestroy(void* layout) { return drop<Layout>(layout); }
int cublasLtMatmulPreferenceCreate(void** preference) {
  MAY_FAIL("MatmulPreferenceCreate");
  return make(preference, new Preference);
}
int cublasLtMatmulPreferenceSetAttribute(void* preference, int attribute, const void* value, size_t bytes) {
  MAY_FAIL("MatmulPreferenceSetAttribute");
  return static_cast<Preference*>(preference)->set(attribute, value, bytes);
}
int cublasLtMatmulPreferenceDestroy(void* preference) { return drop<Preference>(preference); }

// The result as the header declares it.
struct Heuristic {
  uint64_t algorithm[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};
constexpr uint64_t kAlgorithm = 0x616c676f;

int cublasLtMatmulAlgoGetHeuristic(void* handle, void* desc, void* a, void* b, void* c, void* d, void* preference,
                                   int wanted, Heuristic* best, int* found) {
  *found = 0;
  const Product product(*static_cast<Desc*>(desc), *static_cast<Layout*>(a), *static_cast<Layout*>(b),
                        *static_cast<Layout*>(d));
  // Tests ask for the failure of one type of D, or of any.
  MAY_FAIL("MatmulAlgoGetHeuristic");
  MAY_FAIL(("MatmulAlgoGetHeuristic of " + std::to_string(product.d.type)).c_str());
  if (handle != &the_handle || c != d || wanted != 1) return refuse("the heuristic has other arguments");
  const auto* p = static_cast<Preference*>(preference);
  if (p->get(1) != 32u << 20) return refuse("the workspace is another");
  if (p->get(3) != (product.on_device ? 0u : 6u)) return refuse("the reductions are others");
  for (int operand : {5, 6, 7, 8})
    if (p->get(operand) != 16) return refuse("the alignments are others");
  const int status = product.check();
  if (status != kSuccess) return status;
  int none = 0;
  if (fails("found", &none)) return kSuccess;  // and nothing is found
  *best = {{kAlgorithm}, 0, 0, 1.0f, {}};
  if (int state = 0; fails("state", &state)) best->state = state;
  return *found = 1, kSuccess;
}

int cublasLtMatmul(void* handle, void* desc, const float* alpha, const void* a, void* a_layout, const void* b,
                   void* b_layout, const float* beta, const void* c, void* c_layout, void* d, void* d_layout,
                   const uint64_t* algorithm, void* workspace, size_t bytes, void* stream) {
  MAY_FAIL("Matmul");
  const Product p(*static_cast<Desc*>(desc), *static_cast<Layout*>(a_layout), *static_cast<Layout*>(b_layout),
                  *static_cast<Layout*>(d_layout));
  if (const int status = p.check(); status != kSuccess) return status;
  if (handle != &the_handle || c != d || c_layout != d_layout || *algorithm != kAlgorithm)
    return refuse("the product has other arguments");
  for (const void* array : {a, b, static_cast<const void*>(d), static_cast<const void*>(workspace)})
    if (reinterpret_cast<uintptr_t>(array) % 16) return refuse("an array is not aligned");
  Arrays arrays(a, stream);
  const Operands x(p, arrays, a, b, alpha, beta);
  arrays.fill(workspace, 0xff, bytes);  // it is the library's, all of it
  void* const result = arrays.written(d, p.d.bytes());
  if (const int status = arrays.wait(); status != kSuccess) return status;
  if (*x.beta != 0) return refuse("beta is not 0");
  if (!p.on_device && *x.alpha != 1) return refuse("alpha on the host is not 1");
  if (fault != "padding" && !(padding_is_zero(x.a_scales, p.m, p.k / 16) && padding_is_zero(x.b_scales, p.n, p.k / 16)))
    return refuse("the padding of scales is not zero");
  const Float bias_kind = p.d.type == kBf16 ? Float::kBf16 : Float::kF16;
  for (int64_t col = 0; col < p.n; ++col)
    for (int64_t row = 0; row < p.m; ++row) {
      float value = mul_rn(fault == "alpha" ? 2 * *x.alpha : *x.alpha, sum_of(p, x, row, col));
      if (fault == "nan" && row == p.m - 1 && col == p.n - 1) value = std::nanf("");
      if (p.with_bias) value = add_rn(value, load_float(x.bias, bias_kind, row));
      store(result, p.d.type, col * p.d.distance + row, value);
    }
  arrays.write_back(d, result, p.d.bytes());
  return arrays.wait();
}

}  // extern "C"

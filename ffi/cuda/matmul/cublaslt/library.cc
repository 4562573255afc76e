// Finds cuBLASLt in the running process. JAX's CUDA plugin has loaded a copy, and a second one would cost memory and
// could be of another version, so that one is taken first. A bare name never loads a file: it would be looked for in
// LD_LIBRARY_PATH, which may name the working directory.
#include "library.h"

#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>

#include "../../kernels.h"

namespace jnvfp4 {
namespace {

struct Library {
  CublasLt calls;
  std::string path;
};

std::atomic<const Library*> found{nullptr};  // never unloaded

// The first of the functions that a library lacks; null if it has all.
const char* look_up(void* library, CublasLt* calls) {
  const char* missing = nullptr;
  const auto get = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (!function && !missing) missing = name;
  };
  get(calls->version, "cublasLtGetVersion");
  get(calls->create, "cublasLtCreate");
  get(calls->desc_create, "cublasLtMatmulDescCreate");
  get(calls->desc_set, "cublasLtMatmulDescSetAttribute");
  get(calls->desc_destroy, "cublasLtMatmulDescDestroy");
  get(calls->layout_create, "cublasLtMatrixLayoutCreate");
  get(calls->layout_destroy, "cublasLtMatrixLayoutDestroy");
  get(calls->preference_create, "cublasLtMatmulPreferenceCreate");
  get(calls->preference_set, "cublasLtMatmulPreferenceSetAttribute");
  get(calls->preference_destroy, "cublasLtMatmulPreferenceDestroy");
  get(calls->heuristic, "cublasLtMatmulAlgoGetHeuristic");
  get(calls->matmul, "cublasLtMatmul");
  return missing;
}

std::string path_of(void* library) {
  const link_map* map = nullptr;
  return dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 && map ? map->l_name : "";
}

// Takes a library into use, or says why it cannot be and closes it.
std::string use(void* library) {
  auto* const candidate = new Library{{}, path_of(library)};
  const char* missing = look_up(library, &candidate->calls);
  std::string reason;
  if (missing)
    reason = candidate->path + " has no " + missing;
  else if (candidate->calls.version() / 10000 < 12)
    reason = candidate->path + " is older than 12.0";
  if (reason.empty()) return found.store(candidate, std::memory_order_release), std::string();
  delete candidate;
  dlclose(library);
  return reason;
}

// RTLD_NOLOAD takes only what is loaded.
void* loaded_copy() {
  for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"})
    if (void* library = dlopen(name, RTLD_NOW | RTLD_NOLOAD)) return library;
  return nullptr;
}

std::string find(const std::string& path) {
  if (void* library = loaded_copy()) return use(library);
  const std::string none = "the process has loaded neither libcublasLt.so.13 nor libcublasLt.so.12";
  if (path.empty()) return none;
  if (path[0] != '/') return none + ", and the path of another copy must be absolute, got " + path;
  if (void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return use(library);
  const char* error = dlerror();
  return none + ", and " + (error ? error : path.c_str());
}

}  // namespace

const CublasLt* cublaslt() {
  const Library* library = found.load(std::memory_order_acquire);
  return library ? &library->calls : nullptr;
}

// This allocates on the host and may on the device. A stream that is being captured forbids that to its thread, except
// in the relaxed mode, since none of it is for the stream.
lt::Status handle_of_device(const CublasLt& lt, lt::Handle* handle) {
  static std::mutex making;
  static std::map<int, lt::Handle> made;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return lt::kExecutionFailed;
  const std::lock_guard<std::mutex> lock(making);
  lt::Handle& own = made[device];
  lt::Status status = lt::kSuccess;
  if (!own) {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    const bool exchanged = cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess;
    status = lt.create(&own);
    if (exchanged) cudaThreadExchangeStreamCaptureMode(&mode);
    if (status != lt::kSuccess) own = nullptr;
  }
  return *handle = own, status;
}

cudaError_t error_of(lt::Status status) {
  switch (status) {
    case lt::kSuccess: return cudaSuccess;
    case lt::kAllocFailed: return cudaErrorMemoryAllocation;
    case lt::kArchMismatch:
    case lt::kNotSupported: return cudaErrorNotSupported;
    case lt::kExecutionFailed: return cudaErrorLaunchFailure;
    default: return cudaErrorUnknown;
  }
}

bool has_cublaslt() { return cublaslt() != nullptr; }

int64_t cublaslt_version() { return has_cublaslt() ? static_cast<int64_t>(cublaslt()->version()) : 0; }

CublasLtCopy find_cublaslt(const std::string& path) {
  static std::mutex searching;
  const std::lock_guard<std::mutex> lock(searching);
  std::string reason = cublaslt() ? std::string() : find(path);
  const Library* library = found.load(std::memory_order_acquire);
  if (!library) return {"", 0, std::move(reason)};
  return {library->path, static_cast<int64_t>(library->calls.version()), ""};
}

}  // namespace jnvfp4

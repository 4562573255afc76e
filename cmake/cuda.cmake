# The extension module jnvfp4._cuda, for the compute capabilities of JNVFP4_CUDA_TARGETS that the compiler at hand knows.
include(CheckLanguage)
include(cmake/targets.cmake)
set(CMAKE_CUDA_ARCHITECTURES OFF)  # CMake 3.25 does not know the a and f suffixes
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)

# Stops with JNVFP4_CUDA=on; else the CPU module is built alone.
function(jnvfp4_no_cuda reason remedy)
  if(JNVFP4_CUDA STREQUAL "on")
    message(FATAL_ERROR "JNVFP4_CUDA=on, but ${reason}: ${remedy}, or configure with JNVFP4_CUDA=auto or off")
  endif()
  message(STATUS "jnvfp4: ${reason}, building for the CPU only")
endfunction()

# An object library of CUDA sources with architecture flags of its own.
function(jnvfp4_cuda_objects name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "FLAGS;FILES")
  add_library(${name} OBJECT ${arg_FILES})
  set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden
    CUDA_VISIBILITY_PRESET hidden)
  set(flags ${arg_FLAGS} -fmad=false)
  if(JNVFP4_WERROR)
    list(APPEND flags "SHELL:-Werror all-warnings")
  endif()
  target_compile_options(${name} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${flags}>")
  target_link_libraries(_cuda PRIVATE ${name})
endfunction()

check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  jnvfp4_no_cuda("no CUDA compiler that works was found" "put nvcc on PATH or set CUDACXX")
  return()
endif()
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)
# -O1 of host code, which only launches; device code always has -O3. Machine code is compressed like PTX, to a quarter of
# the module's bytes, and the driver expands what is called.
set(CMAKE_CUDA_FLAGS_RELEASE "-O1 -DNDEBUG -Xfatbin=-compress-all")
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.0)
  jnvfp4_no_cuda("nvcc ${CMAKE_CUDA_COMPILER_VERSION} is older than 12.0" "install a newer CUDA toolkit")
  return()
endif()

jnvfp4_wanted_targets(targets)
jnvfp4_known_targets(targets has_ptx ${CMAKE_CUDA_COMPILER} "${targets}")
if(NOT has_ptx)
  jnvfp4_no_cuda("nvcc ${CMAKE_CUDA_COMPILER_VERSION} does not know compute_80" "install another CUDA toolkit")
  return()
endif()
list(TRANSFORM targets PREPEND "sm_" OUTPUT_VARIABLE built_for)
list(APPEND built_for compute_80)
list(JOIN built_for " " built_for)
message(STATUS "jnvfp4: building CUDA kernels for ${built_for}")
message(STATUS "jnvfp4: this takes minutes; `pip install -C cmake.define.JNVFP4_CUDA=off` builds for the CPU alone, "
  "`-C cmake.define.JNVFP4_CUDA_TARGETS=90a` for one kind of GPU, here Hopper")

nanobind_add_module(_cuda STABLE_ABI NB_STATIC NOMINSIZE
  ffi/cuda/module.cc ffi/cuda/handlers.cc ffi/cuda/attention/launch.cc ffi/cuda/matmul/launch.cc
  ffi/cuda/matmul/cublaslt/library.cc
  ffi/cuda/matmul/cublaslt/gemm.cc ffi/cuda/matmul/cublaslt/nvfp4.cc
  ffi/cuda/matmul/sm90/maps.cc ${JNVFP4_PLAN})
set_source_files_properties(ffi/cuda/handlers.cc PROPERTIES COMPILE_OPTIONS -O1)  # it checks and launches
jnvfp4_configure(_cuda)
target_include_directories(_cuda SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
target_link_libraries(_cuda PRIVATE ${CMAKE_DL_LIBS})  # cuBLASLt is looked up, not linked
target_compile_definitions(_cuda PRIVATE JNVFP4_CUDA_BUILT_FOR="${built_for}")

# The longest to compile first, so that cores do not wait for them in the end.
jnvfp4_generic_flags(generic "${targets}")
jnvfp4_e2m1_flags(e2m1 "${targets}" ${CMAKE_CUDA_COMPILER_VERSION})
jnvfp4_cuda_objects(jnvfp4_encode FLAGS ${e2m1} FILES
  ffi/cuda/quantize/pair.cu ffi/cuda/quantize/tiles.cu
  ffi/cuda/quantize/rows.cu)
jnvfp4_cuda_objects(jnvfp4_quantize FLAGS ${generic} FILES
  ffi/cuda/quantize/rht_amax.cu ffi/cuda/quantize/dequantize.cu
  ffi/cuda/quantize/transpose.cu)
jnvfp4_cuda_objects(jnvfp4_matmul FLAGS ${generic} FILES
  ffi/cuda/matmul/sm80/nvfp4_blocks_small_m.cu ffi/cuda/matmul/sm80/nvfp4_blocks.cu
  ffi/cuda/matmul/sm80/dense_elements.cu
  ffi/cuda/matmul/decode.cu ffi/cuda/matmul/epilogue.cu ffi/cuda/matmul/cublaslt/prepare.cu)
jnvfp4_cuda_objects(jnvfp4_attention FLAGS ${generic} FILES
  ffi/cuda/attention/sm80/attend.cu ffi/cuda/attention/combine.cu ffi/cuda/attention/append_kv.cu)
# Kernels with instructions of Hopper alone. Without them the plan takes other kernels.
if("90a" IN_LIST targets)
  jnvfp4_cuda_objects(jnvfp4_sm90a FLAGS "SHELL:-gencode arch=compute_90a,code=sm_90a" FILES
    ffi/cuda/matmul/sm90/f16_fused.cu ffi/cuda/matmul/sm90/bf16_fused.cu ffi/cuda/matmul/sm90/small_m.cu
    ffi/cuda/matmul/sm90/windows.cu ffi/cuda/matmul/sm90/pinned.cu ffi/cuda/matmul/sm90/f16_grouped.cu ffi/cuda/matmul/sm90/bf16_grouped.cu
    ffi/cuda/matmul/sm90/grouped_small_m.cu ffi/cuda/matmul/sm90/grouped.cu
    ffi/cuda/matmul/sm90/prepare.cu ffi/cuda/matmul/sm90/fused.cu ffi/cuda/matmul/sm90/launchers.cu
    ffi/cuda/attention/sm90/attend.cu)
endif()

# The extension module jnvfp4._cuda, for the compute capabilities of JNVFP4_CUDA_TARGETS that the compiler at hand knows.
include(CheckLanguage)
set(CMAKE_CUDA_ARCHITECTURES OFF)  # CMake 3.25 does not know the a and f suffixes
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)

# Stops with JNVFP4_CUDA=on; else the CPU module is built alone.
function(jnvfp4_no_cuda reason remedy)
  if(JNVFP4_CUDA STREQUAL "on")
    message(FATAL_ERROR "JNVFP4_CUDA=on, but ${reason}: ${remedy}, or configure with JNVFP4_CUDA=auto or off")
  endif()
  message(STATUS "jnvfp4: ${reason}, building for the CPU only")
endfunction()

# The capabilities of the GPUs here as targets, an empty list without one.
function(jnvfp4_targets_here result)
  set(targets)
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
    OUTPUT_VARIABLE found ERROR_QUIET RESULT_VARIABLE status OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(status EQUAL 0)
    string(REPLACE "\n" ";" found "${found}")
    foreach(capability IN LISTS found)
      string(REPLACE "." "" number "${capability}")
      if(number STREQUAL "90")
        list(APPEND targets 90a)
      elseif(number MATCHES "^10[0-9]$")
        list(APPEND targets 100f)
      elseif(number MATCHES "^12[0-9]$")
        list(APPEND targets 120f)
      elseif(number MATCHES "^[0-9]+$")
        list(APPEND targets ${number})
      endif()
    endforeach()
    list(REMOVE_DUPLICATES targets)
  endif()
  set(${result} "${targets}" PARENT_SCOPE)
endfunction()

# Those of `targets` that the compiler can build machine code for.
function(jnvfp4_known_targets result targets)
  execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --list-gpu-code OUTPUT_VARIABLE codes ERROR_QUIET)
  set(known)
  foreach(target IN LISTS targets)
    string(REGEX REPLACE "[af]$" "" number ${target})
    if(codes MATCHES "sm_${number}[\n ]")
      list(APPEND known ${target})
    else()
      message(STATUS "jnvfp4: ${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION} does not know sm_${target}, "
        "building without it")
    endif()
  endforeach()
  set(${result} "${known}" PARENT_SCOPE)
endfunction()

# Flags for sources that use no instruction of one architecture alone: machine code for each target, whose suffix is
# dropped, and PTX for every other GPU from 8.0 on. All targets from 9.0 on share one pass of the compiler's front end,
# half of the time of a build for three targets; no source has a path for later ones.
function(jnvfp4_generic_flags result targets)
  set(flags "SHELL:-gencode arch=compute_80,code=compute_80")
  set(modern)
  foreach(target IN LISTS targets)
    string(REGEX REPLACE "[af]$" "" number ${target})
    if(number LESS 90)
      list(APPEND flags "SHELL:-gencode arch=compute_${number},code=sm_${number}")
    else()
      list(APPEND modern sm_${number})
    endif()
  endforeach()
  if(modern)
    list(JOIN modern "," codes)
    list(APPEND flags "SHELL:-gencode arch=compute_90,code=[${codes}]")
  endif()
  set(${result} "${flags}" PARENT_SCOPE)
endfunction()

# An object library of CUDA sources with architecture flags of its own.
function(jnvfp4_cuda_objects name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "FLAGS;FILES")
  add_library(${name} OBJECT ${arg_FILES})
  set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden
    CUDA_VISIBILITY_PRESET hidden)
  set(flags ${arg_FLAGS} -fmad=false -lineinfo)
  if(JNVFP4_WERROR)
    list(APPEND flags "SHELL:-Werror all-warnings")
  endif()
  target_compile_options(${name} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${flags}>")
  target_link_libraries(_cuda PRIVATE ${name})
endfunction()

check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  jnvfp4_no_cuda("no CUDA compiler was found" "put nvcc on PATH or set CUDACXX")
  return()
endif()
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 17)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.0)
  jnvfp4_no_cuda("nvcc ${CMAKE_CUDA_COMPILER_VERSION} is older than 12.0" "install a newer CUDA toolkit")
  return()
endif()

set(targets ${JNVFP4_CUDA_TARGETS})
if(targets STREQUAL "auto")
  jnvfp4_targets_here(targets)
  if(NOT targets)
    set(targets ${JNVFP4_CUDA_ALL_TARGETS})
  endif()
endif()
jnvfp4_known_targets(targets "${targets}")
list(TRANSFORM targets PREPEND "sm_" OUTPUT_VARIABLE built_for)
list(APPEND built_for compute_80)
list(JOIN built_for " " built_for)
message(STATUS "jnvfp4: building CUDA kernels for ${built_for}")

nanobind_add_module(_cuda NB_STATIC NOMINSIZE
  ffi/cuda/module.cc ffi/cuda/handlers.cc ffi/cuda/matmul/launch.cc ffi/matmul_plan.cc)
jnvfp4_configure(_cuda)
target_include_directories(_cuda SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
target_compile_definitions(_cuda PRIVATE JNVFP4_CUDA_BUILT_FOR="${built_for}")

# The longest to compile first, so that cores do not wait for them in the end.
jnvfp4_generic_flags(generic "${targets}")
jnvfp4_cuda_objects(jnvfp4_produce FLAGS ${generic} FILES ffi/cuda/produce/rows.cu ffi/cuda/produce/tiles.cu)
jnvfp4_cuda_objects(jnvfp4_quantize FLAGS ${generic} FILES
  ffi/cuda/quantize/tiles.cu ffi/cuda/quantize/pair.cu ffi/cuda/quantize/fake_quant.cu ffi/cuda/quantize/rows.cu
  ffi/cuda/quantize/rht_amax.cu ffi/cuda/quantize/dequantize.cu)
jnvfp4_cuda_objects(jnvfp4_matmul FLAGS ${generic} FILES
  ffi/cuda/matmul/sm80_nvfp4_blocks.cu ffi/cuda/matmul/sm80_dense_elements.cu
  ffi/cuda/matmul/decode.cu ffi/cuda/matmul/epilogue.cu)

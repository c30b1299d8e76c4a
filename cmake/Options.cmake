# SPDX-License-Identifier: Apache-2.0
# Options, build types, and the flags that every target of the project shares (target switchyard_flags).

set(SWITCHYARD_BACKENDS auto CACHE STRING "auto (CPU, and CUDA if nvcc is found), cpu, or cuda (an error without nvcc)")
set_property(CACHE SWITCHYARD_BACKENDS PROPERTY STRINGS auto cpu cuda)
set(SWITCHYARD_SANITIZE none CACHE STRING "none, thread, or address (with undefined)")
set_property(CACHE SWITCHYARD_SANITIZE PROPERTY STRINGS none thread address)
option(SWITCHYARD_TESTS "Build the tests" ${PROJECT_IS_TOP_LEVEL})
option(SWITCHYARD_TOOLS "Build the command line tool" ${PROJECT_IS_TOP_LEVEL})
option(SWITCHYARD_EXAMPLES "Build the examples" ${PROJECT_IS_TOP_LEVEL})
option(SWITCHYARD_BENCH "Build the benchmarks" ${PROJECT_IS_TOP_LEVEL})
option(SWITCHYARD_LAYER "Build the library switchyard_layer, expert compute; needs oneDNN" ON)
option(SWITCHYARD_MPI "Build the module over MPI, by which CPU ranks of several hosts exchange, where CMake finds MPI" ON)
set(SWITCHYARD_GIN auto CACHE STRING "Kernels that drive the network between hosts, by NCCL's device API: auto (where CMake finds its header), on (an error without), off")
set_property(CACHE SWITCHYARD_GIN PROPERTY STRINGS auto on off)
set(SWITCHYARD_NCCL_INCLUDE "" CACHE PATH "Folder of nccl_device.h, version 2.30.7 or later, where it is not build/nccl/include (./dev setup nccl) or a usual one")
option(SWITCHYARD_INSTALL "Define install rules" ${PROJECT_IS_TOP_LEVEL})
option(SWITCHYARD_WERROR "Treat warnings as errors (CI)" OFF)
option(SWITCHYARD_MUTABLE_ORDERS "Take memory orders from a run-time table (mutation suite; needs SWITCHYARD_SANITIZE=thread)" OFF)
option(BUILD_SHARED_LIBS "Make switchyard::switchyard a shared library" OFF)

foreach(choice SWITCHYARD_BACKENDS SWITCHYARD_SANITIZE SWITCHYARD_GIN)
  get_property(allowed CACHE ${choice} PROPERTY STRINGS)
  if(NOT ${choice} IN_LIST allowed)
    list(JOIN allowed ", " allowed)
    message(FATAL_ERROR "${choice} is '${${choice}}'; allowed: ${allowed}")
  endif()
endforeach()
if(SWITCHYARD_SANITIZE STREQUAL "thread" AND NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  message(FATAL_ERROR "SWITCHYARD_SANITIZE=thread needs GCC (its instrumentation covers what the race tests plant), "
                      "found ${CMAKE_CXX_COMPILER_ID}; set CMAKE_CXX_COMPILER=g++")
endif()
if(NOT SWITCHYARD_LAYER AND (SWITCHYARD_TESTS OR SWITCHYARD_TOOLS OR SWITCHYARD_BENCH))
  message(FATAL_ERROR "SWITCHYARD_LAYER is OFF, but the tool, the tests and the benchmarks call expert compute; "
                      "set SWITCHYARD_TOOLS, SWITCHYARD_TESTS and SWITCHYARD_BENCH to OFF too")
endif()
if(SWITCHYARD_MUTABLE_ORDERS AND NOT SWITCHYARD_SANITIZE STREQUAL "thread")
  message(FATAL_ERROR "SWITCHYARD_MUTABLE_ORDERS is for SWITCHYARD_SANITIZE=thread only")
endif()

if(PROJECT_IS_TOP_LEVEL)
  if(NOT CMAKE_BUILD_TYPE)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Release, Debug or RelWithDebInfo" FORCE)
  endif()
  set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
  set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
  # Lets a program of a bundle find the libraries beside it (./dev bundle); no effect in the build tree.
  # The old tag, because the new one would not apply to what those libraries need in turn.
  set(CMAKE_BUILD_RPATH "$ORIGIN/../lib")
  add_link_options(LINKER:--disable-new-dtags)
  find_program(SWITCHYARD_CCACHE ccache)
  if(SWITCHYARD_CCACHE)
    foreach(language C CXX CUDA)
      if(NOT DEFINED CMAKE_${language}_COMPILER_LAUNCHER)
        set(CMAKE_${language}_COMPILER_LAUNCHER ${SWITCHYARD_CCACHE})
      endif()
    endforeach()
  endif()
endif()

set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(THREADS_PREFER_PTHREAD_FLAG ON)
include(GNUInstallDirs)

# Flags of every C and C++ file of the project. Not exported: a user's own flags are theirs.
add_library(switchyard_flags INTERFACE)
target_compile_features(switchyard_flags INTERFACE cxx_std_20 c_std_11)
set(host $<COMPILE_LANGUAGE:C,CXX>)
# Bits are part of the contract: no fused multiply-add unless written.
target_compile_options(switchyard_flags INTERFACE
  $<${host}:-ffp-contract=off;-Wall;-Wextra;-Wshadow;-Wconversion;-Wno-sign-conversion>
  $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;-Xcompiler=-Wall,-Wextra,-ffp-contract=off>)
# GCC 12 reports overlaps inside std::string's operator+ that do not exist (GCC bug 105651); GCC 13 does not.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION MATCHES "^12\\.")
  target_compile_options(switchyard_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>
    $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wno-restrict>)
endif()
if(SWITCHYARD_WERROR)
  target_compile_options(switchyard_flags INTERFACE $<${host}:-Werror>
    $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings;-Xcompiler=-Werror>)
endif()
if(SWITCHYARD_SANITIZE STREQUAL "thread")
  set(sanitizer -fsanitize=thread)
elseif(SWITCHYARD_SANITIZE STREQUAL "address")
  set(sanitizer -fsanitize=address,undefined -fno-sanitize-recover=all)
endif()
if(sanitizer)
  target_compile_options(switchyard_flags INTERFACE $<${host}:${sanitizer};-fno-omit-frame-pointer>)
  target_link_options(switchyard_flags INTERFACE ${sanitizer})
endif()
if(SWITCHYARD_MUTABLE_ORDERS)
  target_compile_definitions(switchyard_flags INTERFACE SWITCHYARD_MUTABLE_ORDERS)
endif()

# SPDX-License-Identifier: Apache-2.0
# Decides SWITCHYARD_CUDA (ON or OFF). Searches for a toolkit, never for a GPU: the build machine may have none.

set(SWITCHYARD_CUDA OFF)
set(SWITCHYARD_CUDA_NOTE "not asked for (SWITCHYARD_BACKENDS=${SWITCHYARD_BACKENDS})")
if(NOT SWITCHYARD_BACKENDS STREQUAL "cpu")
  find_program(SWITCHYARD_NVCC nvcc HINTS $ENV{CUDA_HOME}/bin $ENV{CUDA_PATH}/bin /usr/local/cuda/bin)
  if(CMAKE_CUDA_COMPILER OR SWITCHYARD_NVCC)
    set(SWITCHYARD_CUDA ON)
  elseif(SWITCHYARD_BACKENDS STREQUAL "cuda")
    message(FATAL_ERROR "SWITCHYARD_BACKENDS=cuda, but no nvcc in PATH, CUDA_HOME or /usr/local/cuda; install the CUDA "
                        "toolkit (13.0 is tested), set CMAKE_CUDA_COMPILER, or use SWITCHYARD_BACKENDS=cpu")
  else()
    set(SWITCHYARD_CUDA_NOTE "nvcc not found: CUDA code is not compiled")
  endif()
endif()

if(SWITCHYARD_CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_COMPILER ${SWITCHYARD_NVCC})
  endif()
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90a-real)  # -gencode=arch=compute_90a,code=sm_90a
  endif()
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  enable_language(CUDA)
  if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25.1 has no entry for it; nvcc 12 and later accept it
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  find_package(CUDAToolkit REQUIRED)
  set(SWITCHYARD_CUDA_NOTE "nvcc ${CMAKE_CUDA_COMPILER_VERSION}, ${CMAKE_CUDA_ARCHITECTURES}")
endif()

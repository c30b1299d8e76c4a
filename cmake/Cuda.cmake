# SPDX-License-Identifier: Apache-2.0
# switchyard_cuda_target(<target>) gives a target with CUDA sources the project's include roots and flags, and adds it to the
# target `switchyard_cuda`: all targets that nvcc compiles, and the command line tool, which calls CUDA. CI builds that target
# on machines without a GPU.
add_custom_target(switchyard_cuda)

function(switchyard_cuda_target target)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/include)
  target_link_libraries(${target} PRIVATE switchyard_flags Threads::Threads)
  add_dependencies(switchyard_cuda ${target})
endfunction()

get_property(layers GLOBAL PROPERTY switchyard_all_layers)
foreach(layer IN LISTS layers)
  get_target_property(sources ${layer} SOURCES)
  if(sources MATCHES "\\.cu(;|$)")
    add_dependencies(switchyard_cuda ${layer})
  endif()
endforeach()

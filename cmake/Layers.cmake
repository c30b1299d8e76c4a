# SPDX-License-Identifier: Apache-2.0
# switchyard_layer(<folder of src, / allowed>
#   [SEES <path under src>...]     folders or single headers that this layer may include, besides its own folder
#   [SOURCES <file>...] [CUDA_SOURCES <file>...]   relative to the folder; both may be empty (headers only)
#   [ALONE <file>...]              SOURCES that are compiled separately: their names collide, or a tool links only this file
#   [LINK <target>...]             libraries that the layer calls itself
#   [LIBRARY <name>]               library that contains the layer: switchyard (default), switchyard_workload, switchyard_layer
#   [PUBLIC_API])                  defines exported symbols: default visibility, filtered by the export map
#
# Creates the object library switchyard_<folder>; cmake/Library.cmake merges the layers of a library. A layer is compiled against a
# folder of links to exactly the paths that it may include, so that an upward include fails to compile.

set_property(GLOBAL PROPERTY switchyard_all_layers "")
file(WRITE ${PROJECT_BINARY_DIR}/view/layers.txt "")

# Fills <dir> with links, so that -I<dir> shows the given paths of <root> and nothing else. A folder that has these links already
# is left as it is: another process may be compiling against it.
function(switchyard_link_view dir root)
  foreach(path IN LISTS ARGN)
    if(NOT EXISTS ${root}/${path})
      message(FATAL_ERROR "SEES names ${root}/${path}, which does not exist")
    endif()
  endforeach()
  set(links "${root};${ARGN}")
  if(EXISTS ${dir}.links)
    file(READ ${dir}.links has)
    if(has STREQUAL links)
      return()
    endif()
  endif()
  file(REMOVE_RECURSE ${dir})
  foreach(path IN LISTS ARGN)
    cmake_path(GET path PARENT_PATH parent)
    file(MAKE_DIRECTORY ${dir}/${parent})
    file(CREATE_LINK ${root}/${path} ${dir}/${path} SYMBOLIC)
  endforeach()
  file(WRITE ${dir}.links "${links}")
endfunction()

# switchyard_compile_together(<target> <file>...): with SWITCHYARD_UNITY, compiles the given C++ sources of a target in groups
# of eight, so headers are read once per group. Other sources, and sources with their own flags, are compiled separately.
function(switchyard_compile_together target)
  set(position 0)
  foreach(source IN LISTS ARGN)
    math(EXPR group "${position} / 8")
    set_property(SOURCE ${source} PROPERTY UNITY_GROUP ${group})
    math(EXPR position "${position} + 1")
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${SWITCHYARD_UNITY} UNITY_BUILD_MODE GROUP)
endfunction()

function(switchyard_layer folder)
  cmake_parse_arguments(PARSE_ARGV 1 arg "PUBLIC_API" "LIBRARY" "SEES;SOURCES;CUDA_SOURCES;ALONE;LINK")
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "switchyard_layer(${folder}): unknown argument '${arg_UNPARSED_ARGUMENTS}'")
  endif()
  string(REPLACE "/" "_" name ${folder})
  set(target switchyard_${name})
  set(view ${PROJECT_BINARY_DIR}/view/${name})
  switchyard_link_view(${view} ${PROJECT_SOURCE_DIR}/src ${folder} ${arg_SEES})
  file(APPEND ${PROJECT_BINARY_DIR}/view/layers.txt "${name} ${folder}\n")  # read by tests/headers
  set(sources ${arg_SOURCES})
  if(SWITCHYARD_CUDA)
    list(APPEND sources ${arg_CUDA_SOURCES})
  endif()
  if(NOT sources)
    return()
  endif()

  add_library(${target} OBJECT ${sources})
  # Sources of only one kind of build (with or without CUDA) are compiled separately, so that the groups of the others are equal
  # in both.
  set(together ${arg_SOURCES})
  list(REMOVE_ITEM together ${arg_ALONE} "")
  switchyard_compile_together(${target} ${together})
  target_include_directories(${target} PRIVATE ${view} ${PROJECT_SOURCE_DIR}/include ${PROJECT_BINARY_DIR}/include)
  # Sources that both kinds of builds have are compiled alike in both: they do not get CUDA's headers.
  list(TRANSFORM arg_LINK REPLACE "^(CUDA::.*)$" "$<LINK_ONLY:\\1>" OUTPUT_VARIABLE links)
  target_link_libraries(${target} PRIVATE switchyard_flags Threads::Threads ${links})
  if(SWITCHYARD_CUDA AND arg_CUDA_SOURCES)
    list(TRANSFORM CUDAToolkit_INCLUDE_DIRS PREPEND "-isystem" OUTPUT_VARIABLE cuda_headers)
    set_property(SOURCE ${arg_CUDA_SOURCES} APPEND PROPERTY COMPILE_OPTIONS ${cuda_headers})
  endif()
  # Diagnostics and debug information name the real file.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:C,CXX>:-ffile-prefix-map=${view}/=${PROJECT_SOURCE_DIR}/src/>)
  if(NOT arg_PUBLIC_API)
    set_target_properties(${target} PROPERTIES CXX_VISIBILITY_PRESET hidden CUDA_VISIBILITY_PRESET hidden)
  endif()
  set_target_properties(${target} PROPERTIES VISIBILITY_INLINES_HIDDEN ON)
  if(NOT arg_LIBRARY)
    set(arg_LIBRARY switchyard)
  endif()
  set_property(GLOBAL APPEND PROPERTY switchyard_all_layers ${target})
  set_property(GLOBAL APPEND PROPERTY ${arg_LIBRARY}_layers ${target})
  set_property(GLOBAL APPEND PROPERTY ${arg_LIBRARY}_links ${arg_LINK})
endfunction()

# SPDX-License-Identifier: Apache-2.0
# switchyard_room(<folder of tools>
#   [SEES <room>...]               rooms that this one may include, besides itself: those below it
#   SOURCES <file>...              relative to the folder
#   [GPU_SOURCES <file>...]        replace NO_GPU_SOURCES in builds with CUDA
#   [NO_GPU_SOURCES <file>...]
#   [ALONE <file>...]              sources whose names collide with others: compiled separately
#   [LINK <target>...])            libraries that the room calls itself
#
# Creates the static library switchyard_tool_<folder>, which links the rooms that it SEES. A room is compiled against a folder of
# links to exactly the paths that it may include, like the layers of src.

# Rooms other than `measure` compute little, apart from files that set their own optimization. Compiling them takes a considerable
# part of a first `./dev demo`.
set(switchyard_room_optimization $<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:C,CXX>>:-O1>)

# Headers that most rooms include, precompiled once for all rooms except `measure`, whose options differ. No source may rely on
# them: builds with CMAKE_DISABLE_PRECOMPILE_HEADERS do not use them.
file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/tool_headers.cpp CONTENT "")
add_library(switchyard_tool_headers STATIC EXCLUDE_FROM_ALL ${PROJECT_BINARY_DIR}/tool_headers.cpp)
target_link_libraries(switchyard_tool_headers PRIVATE switchyard_flags fmt::fmt nlohmann_json::nlohmann_json)
target_compile_options(switchyard_tool_headers PRIVATE ${switchyard_room_optimization})
target_precompile_headers(switchyard_tool_headers PRIVATE <fmt/core.h> <nlohmann/json.hpp> <algorithm> <chrono> <filesystem> <functional>
  <map> <memory> <optional> <string> <vector>)

function(switchyard_room folder)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SEES;SOURCES;GPU_SOURCES;NO_GPU_SOURCES;ALONE;LINK")
  if(arg_UNPARSED_ARGUMENTS OR NOT arg_SOURCES)
    message(FATAL_ERROR "switchyard_room(${folder}): needs SOURCES; unknown arguments '${arg_UNPARSED_ARGUMENTS}'")
  endif()
  set(target switchyard_tool_${folder})
  set(view ${PROJECT_BINARY_DIR}/view/tool_${folder})
  switchyard_link_view(${view} ${PROJECT_SOURCE_DIR}/tools ${folder} ${arg_SEES})
  set(sources ${arg_SOURCES} ${arg_NO_GPU_SOURCES})
  if(SWITCHYARD_CUDA)
    set(sources ${arg_SOURCES} ${arg_GPU_SOURCES})
  endif()
  add_library(${target} STATIC EXCLUDE_FROM_ALL ${sources})
  set(together ${arg_SOURCES})
  list(REMOVE_ITEM together ${arg_ALONE} "")
  switchyard_compile_together(${target} ${together})
  list(TRANSFORM arg_SEES PREPEND switchyard_tool_ OUTPUT_VARIABLE rooms)
  target_include_directories(${target} PRIVATE ${view})
  target_link_libraries(${target} PRIVATE switchyard_flags
    PUBLIC ${rooms} ${arg_LINK} switchyard::switchyard fmt::fmt nlohmann_json::nlohmann_json)
  if(NOT folder STREQUAL "measure")
    target_compile_options(${target} PRIVATE ${switchyard_room_optimization})
    target_precompile_headers(${target} REUSE_FROM switchyard_tool_headers)
  endif()
  # Diagnostics and debug information name the real file.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:C,CXX>:-ffile-prefix-map=${view}/=${PROJECT_SOURCE_DIR}/tools/>)
  set_property(GLOBAL APPEND PROPERTY switchyard_rooms ${target})
endfunction()

# switchyard_embed(<file>...): creates <name>.inc for each text file: a string literal of all lines but the first, which holds
# the license. For the sources of the calling folder.
function(switchyard_embed)
  foreach(file IN LISTS ARGN)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
    file(READ ${file} text)
    string(FIND "${text}" "\n" end)
    string(SUBSTRING "${text}" ${end} -1 text)
    cmake_path(GET file FILENAME name)
    file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/${name}.inc CONTENT "R\"asset(@text@)asset\"" @ONLY)
  endforeach()
endfunction()

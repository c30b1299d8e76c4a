# SPDX-License-Identifier: Apache-2.0
# The libraries: merged layers. The same objects form the static and the shared version of each; switchyard::switchyard,
# switchyard::workload and switchyard::layer are the version that BUILD_SHARED_LIBS selects. Tests of internals always link the
# static version (targets switchyard_static, ...).

configure_file(${PROJECT_SOURCE_DIR}/cmake/version.h.in ${PROJECT_BINARY_DIR}/include/switchyard/version.h @ONLY)
set(switchyard_form static)
if(BUILD_SHARED_LIBS)
  set(switchyard_form shared)
endif()

# switchyard_library(<name> <exported name> [<base library>]) creates <name>_static and <name>_shared from the layers with
# LIBRARY <name>.
function(switchyard_library name exported)
  get_property(layers GLOBAL PROPERTY ${name}_layers)
  get_property(links GLOBAL PROPERTY ${name}_links)
  list(REMOVE_DUPLICATES links)
  set(objects "")
  foreach(layer IN LISTS layers)
    list(APPEND objects $<TARGET_OBJECTS:${layer}>)
  endforeach()
  foreach(form static shared)
    string(TOUPPER ${form} kind)
    set(target ${name}_${form})
    add_library(${target} ${kind} EXCLUDE_FROM_ALL ${objects})
    target_include_directories(${target} PUBLIC
      $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<BUILD_INTERFACE:${PROJECT_BINARY_DIR}/include>
      $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
    target_compile_features(${target} PUBLIC cxx_std_20)
    target_link_libraries(${target} PRIVATE Threads::Threads ${links} $<BUILD_INTERFACE:switchyard_flags>)
    if(ARGN)
      target_link_libraries(${target} PUBLIC ${ARGN}_${form})
    endif()
    set_target_properties(${target} PROPERTIES OUTPUT_NAME ${name} EXPORT_NAME ${exported} LINKER_LANGUAGE CXX
      VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})
  endforeach()
  set(export_map ${PROJECT_SOURCE_DIR}/cmake/switchyard.map)
  target_link_options(${name}_shared PRIVATE LINKER:--version-script=${export_map} LINKER:-Bsymbolic-functions)
  if(SWITCHYARD_SANITIZE STREQUAL "none")
    target_link_options(${name}_shared PRIVATE LINKER:--no-undefined)
  endif()
  set_property(TARGET ${name}_shared PROPERTY LINK_DEPENDS ${export_map})
  set_property(TARGET ${name}_${switchyard_form} PROPERTY EXCLUDE_FROM_ALL OFF)
  add_library(switchyard::${exported} ALIAS ${name}_${switchyard_form})
endfunction()

switchyard_library(switchyard switchyard)
switchyard_library(switchyard_workload workload switchyard)
if(SWITCHYARD_LAYER)
  switchyard_library(switchyard_layer layer switchyard)
endif()

# For users' files with device code (include/switchyard/cuda): the headers that they include.
if(SWITCHYARD_CUDA)
  add_library(switchyard_device INTERFACE)
  target_include_directories(switchyard_device INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/src>
    $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}/switchyard/internal>)
  target_compile_options(switchyard_device INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>)
  target_link_libraries(switchyard_device INTERFACE switchyard_${switchyard_form})
  set_target_properties(switchyard_device PROPERTIES EXPORT_NAME device)
  add_library(switchyard::device ALIAS switchyard_device)
endif()

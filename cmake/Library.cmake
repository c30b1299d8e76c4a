# SPDX-License-Identifier: Apache-2.0
# The library: all layers merged. The same objects make the static and the shared form; switchyard::switchyard is the one that
# BUILD_SHARED_LIBS chooses. Tests of internals always link the static form (target switchyard_static).

get_property(layers GLOBAL PROPERTY switchyard_layers)
get_property(links GLOBAL PROPERTY switchyard_links)
list(REMOVE_DUPLICATES links)
set(objects "")
foreach(layer IN LISTS layers)
  list(APPEND objects $<TARGET_OBJECTS:${layer}>)
endforeach()

configure_file(${PROJECT_SOURCE_DIR}/cmake/version.h.in ${PROJECT_BINARY_DIR}/include/switchyard/version.h @ONLY)
set(export_map ${PROJECT_SOURCE_DIR}/cmake/switchyard.map)

foreach(form static shared)
  string(TOUPPER ${form} kind)
  set(target switchyard_${form})
  add_library(${target} ${kind} EXCLUDE_FROM_ALL ${objects})
  target_include_directories(${target} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<BUILD_INTERFACE:${PROJECT_BINARY_DIR}/include>
    $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_link_libraries(${target} PRIVATE Threads::Threads ${links} $<BUILD_INTERFACE:switchyard_flags>)
  set_target_properties(${target} PROPERTIES OUTPUT_NAME switchyard EXPORT_NAME switchyard LINKER_LANGUAGE CXX
    VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})
endforeach()
target_link_options(switchyard_shared PRIVATE LINKER:--version-script=${export_map} LINKER:-Bsymbolic-functions)
if(SWITCHYARD_SANITIZE STREQUAL "none")
  target_link_options(switchyard_shared PRIVATE LINKER:--no-undefined)
endif()
set_property(TARGET switchyard_shared PROPERTY LINK_DEPENDS ${export_map})

if(BUILD_SHARED_LIBS)
  set(main switchyard_shared)
else()
  set(main switchyard_static)
endif()
set_property(TARGET ${main} PROPERTY EXCLUDE_FROM_ALL OFF)
add_library(switchyard::switchyard ALIAS ${main})

# For files of the caller that hold device code (include/switchyard/cuda): the headers that they include.
if(SWITCHYARD_CUDA)
  add_library(switchyard_device INTERFACE)
  target_include_directories(switchyard_device INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/src>
    $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}/switchyard/internal>)
  target_compile_options(switchyard_device INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>)
  target_link_libraries(switchyard_device INTERFACE ${main})
  set_target_properties(switchyard_device PROPERTIES EXPORT_NAME device)
  add_library(switchyard::device ALIAS switchyard_device)
endif()

if(SWITCHYARD_INSTALL)
  include(CMakePackageConfigHelpers)
  set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/switchyard)
  install(TARGETS ${main} EXPORT switchyard)
  install(DIRECTORY include/switchyard ${PROJECT_BINARY_DIR}/include/switchyard DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
          FILES_MATCHING PATTERN "*.hpp" PATTERN "*.h" PATTERN "*.def" PATTERN "cuda" EXCLUDE)
  if(SWITCHYARD_CUDA)
    install(TARGETS switchyard_device EXPORT switchyard)
    install(DIRECTORY include/switchyard/cuda DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/switchyard)
    foreach(folder arch/cuda base exchange/cuda layout plan protocol trace)
      cmake_path(GET folder PARENT_PATH parent)
      install(DIRECTORY src/${folder} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/switchyard/internal/${parent}
              FILES_MATCHING PATTERN "*.hpp" PATTERN "*.cuh" PATTERN "*.def")
    endforeach()
    install(FILES src/arch/ops.hpp DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/switchyard/internal/arch)
    install(FILES src/exchange/tuning_launch.hpp DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/switchyard/internal/exchange)
  endif()
  install(EXPORT switchyard NAMESPACE switchyard:: FILE switchyardTargets.cmake DESTINATION ${package_dir})
  configure_package_config_file(cmake/switchyardConfig.cmake.in ${PROJECT_BINARY_DIR}/switchyardConfig.cmake
                                INSTALL_DESTINATION ${package_dir})
  write_basic_package_version_file(${PROJECT_BINARY_DIR}/switchyardConfigVersion.cmake COMPATIBILITY SameMinorVersion)
  install(FILES ${PROJECT_BINARY_DIR}/switchyardConfig.cmake ${PROJECT_BINARY_DIR}/switchyardConfigVersion.cmake
                cmake/Dependencies.cmake DESTINATION ${package_dir})
  set(pc_dir ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
  file(RELATIVE_PATH SWITCHYARD_PC_PREFIX /${pc_dir} /)
  set(SWITCHYARD_PC_LIBS "")
  if(NOT BUILD_SHARED_LIBS)
    set(SWITCHYARD_PC_LIBS " -ldnnl -lhwy -pthread -lstdc++ -lm")
    if(SWITCHYARD_CUDA)
      cmake_path(GET CUDA_cudart_static_LIBRARY PARENT_PATH cudart_dir)
      string(APPEND SWITCHYARD_PC_LIBS " -L${cudart_dir} -lcudart_static -ldl -lrt")
    endif()
  endif()
  configure_file(cmake/switchyard.pc.in ${PROJECT_BINARY_DIR}/switchyard.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/switchyard.pc DESTINATION ${pc_dir})
  install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
endif()

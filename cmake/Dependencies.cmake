# SPDX-License-Identifier: Apache-2.0
# Imported targets of the libraries that libswitchyard uses: switchyard_deps::hwy, Threads::Threads. This file is also
# installed: users of the static library link these libraries too. Uses plain searches, because the config files of some
# distributions pull in unrelated packages (oneDNN's requires an OpenCL development package).
include_guard(GLOBAL)

set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)

# switchyard_find_library(<name> <header> <library> <package>) defines switchyard_deps::<name>, or fails and names the package
# to install.
function(switchyard_find_library name header library package)
  if(TARGET switchyard_deps::${name})
    return()
  endif()
  find_path(SWITCHYARD_${name}_INCLUDE ${header})
  find_library(SWITCHYARD_${name}_LIBRARY ${library})
  mark_as_advanced(SWITCHYARD_${name}_INCLUDE SWITCHYARD_${name}_LIBRARY)
  if(NOT SWITCHYARD_${name}_INCLUDE OR NOT SWITCHYARD_${name}_LIBRARY)
    message(FATAL_ERROR "switchyard: <${header}> or lib${library} not found; on Debian and Ubuntu: apt-get install ${package} "
                        "(or ./dev setup); elsewhere add its prefix to CMAKE_PREFIX_PATH")
  endif()
  add_library(switchyard_deps::${name} UNKNOWN IMPORTED GLOBAL)
  set_target_properties(switchyard_deps::${name} PROPERTIES
    IMPORTED_LOCATION ${SWITCHYARD_${name}_LIBRARY}
    INTERFACE_INCLUDE_DIRECTORIES ${SWITCHYARD_${name}_INCLUDE})
endfunction()

switchyard_find_library(hwy hwy/highway.h hwy libhwy-dev)
if(SWITCHYARD_hwy_LIBRARY MATCHES "\\.so$")
  set_property(TARGET switchyard_deps::hwy PROPERTY INTERFACE_COMPILE_DEFINITIONS HWY_SHARED_DEFINE)
endif()

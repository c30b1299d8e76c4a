# SPDX-License-Identifier: Apache-2.0
message(STATUS "Switchyard ${PROJECT_VERSION}: ${CMAKE_BUILD_TYPE}, sanitizer ${SWITCHYARD_SANITIZE}, "
               "tests ${SWITCHYARD_TESTS}, tools ${SWITCHYARD_TOOLS}, examples ${SWITCHYARD_EXAMPLES}, bench ${SWITCHYARD_BENCH}")
message(STATUS "Switchyard CUDA: ${SWITCHYARD_CUDA} (${SWITCHYARD_CUDA_NOTE})")
if(SWITCHYARD_CUDA)
  message(STATUS "Switchyard device-initiated networking: ${SWITCHYARD_GIN_NOTE}")
endif()

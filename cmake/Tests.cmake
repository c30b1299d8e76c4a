# SPDX-License-Identifier: Apache-2.0
# switchyard_test(<name>
#   SOURCES <file>...          one executable; relative to the calling folder
#   [LINK <target>...]         further libraries besides GoogleTest, the library with its internals, the oracle and tools/launch
#   [DEFINES <macro>...]
#   [LABELS <label>...]        labels by which .ci/run and ./dev select; CONTRIBUTING.md lists them under "Labels"
#   [TIMEOUT <seconds>]        default 60; three times that under a sanitizer
#   [SHARDS <n>]               n ctest entries that run disjoint parts
#   [ARGS <argument>...] [ENVIRONMENT <NAME=value>...]
#   [PROCESSORS <n>]           cores that one entry keeps busy, default 1
#   [EXCEPT none|thread|address...]  build kinds (SWITCHYARD_SANITIZE) in which the test does not exist
#   [QUICK]                    the sources drive the library and compute little: they are compiled without optimization
#   [OWN_MAIN]                 the sources define main()
#   [IN <program>])            the sources become part of a program that several tests share, and are compiled in groups with the
#                              other sources of this program. The ctest entry runs only the tests of its own sources.
# Parallel runs start entries with larger timeouts first, so that no long entry runs alone at the end.
#
# switchyard_test_program(<name> SOURCES [LINK] [DEFINES] [EXCEPT] [QUICK] [OWN_MAIN])
#   the executable alone, for suites that run more than once, for example with ranks as threads and as processes.
#
# switchyard_test_run(<name> <executable> [LABELS] [TIMEOUT] [SHARDS] [ARGS] [ENVIRONMENT] [PROCESSORS] [EXCEPT])
#   a further ctest entry for an executable of the functions above, for example with another filter and label.

find_package(GTest REQUIRED)
find_program(SWITCHYARD_PYTHON3 python3 REQUIRED)
add_custom_target(switchyard_tests)

# Test code and the code that tests share (harness, oracle) are compiled quickly, with less optimization than the library. In
# AddressSanitizer builds, UndefinedBehaviorSanitizer instruments only this code and test programs that request it.
add_library(switchyard_test_flags INTERFACE)  # after switchyard_flags
add_library(switchyard_quick_test_flags INTERFACE)  # the same for programs with QUICK
if(SWITCHYARD_SANITIZE STREQUAL "none")
  target_compile_options(switchyard_test_flags INTERFACE $<$<COMPILE_LANGUAGE:C,CXX>:-O1>)
  target_compile_options(switchyard_quick_test_flags INTERFACE $<$<COMPILE_LANGUAGE:C,CXX>:-O0>)
else()
  target_compile_options(switchyard_test_flags INTERFACE -O0)
  if(SWITCHYARD_SANITIZE STREQUAL "address")
    target_compile_options(switchyard_test_flags INTERFACE -fno-sanitize=undefined)
  endif()
  target_link_libraries(switchyard_quick_test_flags INTERFACE switchyard_test_flags)
endif()

# Headers that most tests include, precompiled once for all tests with equal flags. No source may rely on them: CUDA files and builds
# with CMAKE_DISABLE_PRECOMPILE_HEADERS do not use them.
file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/test_headers.cpp CONTENT "int main() {}\n")
function(switchyard_precompile_test_headers target flags)
  add_executable(${target} EXCLUDE_FROM_ALL ${PROJECT_BINARY_DIR}/test_headers.cpp)
  target_link_libraries(${target} PRIVATE switchyard_flags ${flags} GTest::gtest)
  target_precompile_headers(${target} PRIVATE <gtest/gtest.h> <algorithm> <atomic> <chrono> <cmath> <cstring> <functional> <map>
    <memory> <mutex> <set> <string> <thread> <vector>)
endfunction()
switchyard_precompile_test_headers(switchyard_test_headers switchyard_test_flags)
if(SWITCHYARD_SANITIZE STREQUAL "none")
  switchyard_precompile_test_headers(switchyard_quick_test_headers switchyard_quick_test_flags)
endif()

set(switchyard_test_environment
  TSAN_OPTIONS=halt_on_error=1:exitcode=66:suppressions=${PROJECT_SOURCE_DIR}/cmake/tsan.supp
  ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1
  LSAN_OPTIONS=suppressions=${PROJECT_SOURCE_DIR}/cmake/lsan.supp:print_suppressions=0
  UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1)

function(switchyard_test_run name executable)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "TIMEOUT;SHARDS;PROCESSORS" "LABELS;ARGS;ENVIRONMENT;EXCEPT")
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "switchyard_test_run(${name}): unknown argument '${arg_UNPARSED_ARGUMENTS}'")
  endif()
  if(NOT TARGET ${executable} OR SWITCHYARD_SANITIZE IN_LIST arg_EXCEPT)
    return()  # excluded from this kind of build
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 60)
  endif()
  if(NOT SWITCHYARD_SANITIZE STREQUAL "none")
    math(EXPR arg_TIMEOUT "${arg_TIMEOUT} * 3")
  endif()
  if(NOT arg_SHARDS)
    set(arg_SHARDS 1)
  endif()
  if(NOT arg_PROCESSORS)
    set(arg_PROCESSORS 1)
  endif()
  foreach(shard RANGE 1 ${arg_SHARDS})
    set(entry ${name})
    set(environment ${switchyard_test_environment} ${arg_ENVIRONMENT})
    if(arg_SHARDS GREATER 1)
      set(entry ${name}.${shard})
      math(EXPR index "${shard} - 1")
      list(APPEND environment GTEST_TOTAL_SHARDS=${arg_SHARDS} GTEST_SHARD_INDEX=${index})
    endif()
    add_test(NAME ${entry} COMMAND ${executable} ${arg_ARGS})
    set_tests_properties(${entry} PROPERTIES TIMEOUT ${arg_TIMEOUT} LABELS "${arg_LABELS}" ENVIRONMENT "${environment}"
      PROCESSORS ${arg_PROCESSORS} COST ${arg_TIMEOUT}
      FAIL_REGULAR_EXPRESSION "Running 0 tests from")  # a filter without matches is a failure
  endforeach()
endfunction()

function(switchyard_test_program name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "OWN_MAIN;QUICK" "" "SOURCES;LINK;DEFINES;EXCEPT")
  if(arg_UNPARSED_ARGUMENTS OR NOT arg_SOURCES)
    message(FATAL_ERROR "switchyard_test_program(${name}): needs SOURCES; unknown arguments '${arg_UNPARSED_ARGUMENTS}'")
  endif()
  if(SWITCHYARD_SANITIZE IN_LIST arg_EXCEPT)
    return()
  endif()
  set(quick "")
  if(arg_QUICK)
    set(quick quick_)
  endif()
  set(headers switchyard_${quick}test_headers)
  if(NOT SWITCHYARD_SANITIZE STREQUAL "none")
    set(headers switchyard_test_headers)
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests)
  target_compile_definitions(${name} PRIVATE ${arg_DEFINES} SWITCHYARD_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  target_link_libraries(${name} PRIVATE switchyard_static switchyard_flags switchyard_${quick}test_flags switchyard_oracle switchyard_tool_launch GTest::gtest ${arg_LINK})
  target_precompile_headers(${name} REUSE_FROM ${headers})
  if(NOT arg_OWN_MAIN)
    target_link_libraries(${name} PRIVATE GTest::gtest_main)
  endif()
  add_dependencies(switchyard_tests ${name})
endfunction()

# Part of switchyard_test: creates the shared program or adds sources to it.
function(switchyard_test_sources program)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;LINK;DEFINES;OPTIONS")
  if(TARGET ${program})
    target_sources(${program} PRIVATE ${arg_SOURCES})
    target_compile_definitions(${program} PRIVATE ${arg_DEFINES})
    target_link_libraries(${program} PRIVATE ${arg_LINK})
  else()
    switchyard_test_program(${program} SOURCES ${arg_SOURCES} LINK ${arg_LINK} switchyard_main_of_sources DEFINES ${arg_DEFINES}
                            OWN_MAIN ${arg_OPTIONS})
  endif()
  get_target_property(sources ${program} SOURCES)
  switchyard_compile_together(${program} ${sources})
endfunction()

function(switchyard_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "OWN_MAIN;QUICK" "TIMEOUT;SHARDS;PROCESSORS;IN"
    "SOURCES;LINK;DEFINES;LABELS;ARGS;ENVIRONMENT;EXCEPT")
  if(arg_UNPARSED_ARGUMENTS OR (arg_IN AND arg_OWN_MAIN))
    message(FATAL_ERROR "switchyard_test(${name}): IN given with OWN_MAIN, or unknown arguments '${arg_UNPARSED_ARGUMENTS}'")
  endif()
  set(options "")
  if(arg_QUICK)
    list(APPEND options QUICK)
  endif()
  if(arg_OWN_MAIN)
    list(APPEND options OWN_MAIN)
  endif()
  set(program ${name})
  if(arg_IN)
    if(SWITCHYARD_SANITIZE IN_LIST arg_EXCEPT)
      return()
    endif()
    set(program ${arg_IN})
    switchyard_test_sources(${program} SOURCES ${arg_SOURCES} LINK ${arg_LINK} DEFINES ${arg_DEFINES} OPTIONS ${options})
    list(JOIN arg_SOURCES "," sources)
    list(PREPEND arg_ARGS --sources=${sources})
  else()
    switchyard_test_program(${name} ${options} SOURCES ${arg_SOURCES} LINK ${arg_LINK} DEFINES ${arg_DEFINES} EXCEPT ${arg_EXCEPT})
  endif()
  switchyard_test_run(${name} ${program} TIMEOUT ${arg_TIMEOUT} SHARDS ${arg_SHARDS} PROCESSORS ${arg_PROCESSORS}
                      LABELS ${arg_LABELS} ARGS ${arg_ARGS} ENVIRONMENT ${arg_ENVIRONMENT})
endfunction()

# switchyard_script_test(<name> COMMAND <command>... [TIMEOUT <seconds>] [LABELS <label>...] [PROCESSORS <n>])
# A ctest entry that is not a GoogleTest program.
function(switchyard_script_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT;PROCESSORS" "COMMAND;LABELS")
  if(arg_UNPARSED_ARGUMENTS OR NOT arg_COMMAND OR NOT arg_TIMEOUT)
    message(FATAL_ERROR "switchyard_script_test(${name}): needs COMMAND and TIMEOUT; unknown: '${arg_UNPARSED_ARGUMENTS}'")
  endif()
  if(NOT arg_PROCESSORS)
    set(arg_PROCESSORS 1)
  endif()
  add_test(NAME ${name} COMMAND ${arg_COMMAND})
  set_tests_properties(${name} PROPERTIES TIMEOUT ${arg_TIMEOUT} LABELS "${arg_LABELS}" PROCESSORS ${arg_PROCESSORS} COST ${arg_TIMEOUT}
                       ENVIRONMENT "${switchyard_test_environment}")
endfunction()

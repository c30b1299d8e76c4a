// SPDX-License-Identifier: Apache-2.0
// main() of programs that several ctest entries share (IN, cmake/Tests.cmake). --sources=a.cpp,b.cpp runs only the tests of
// these sources; a source without tests is an error. --gtest_filter, which death tests pass to their child process, takes
// precedence.
#include <gtest/gtest.h>

#include <cstdio>
#include <map>
#include <sstream>
#include <string>
#include <string_view>

namespace {

std::string_view name_of(std::string_view path) { return path.substr(path.rfind('/') + 1); }

// Names of the tests of each source, in the form of a filter.
std::map<std::string, std::string, std::less<>> tests_of_sources() {
  std::map<std::string, std::string, std::less<>> filters;
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  for (int s = 0; s < all.total_test_suite_count(); ++s) {
    const testing::TestSuite& suite = *all.GetTestSuite(s);
    for (int t = 0; t < suite.total_test_count(); ++t) {
      const testing::TestInfo& test = *suite.GetTestInfo(t);
      filters[std::string(name_of(test.file()))] += std::string(suite.name()) + '.' + test.name() + ':';
    }
  }
  return filters;
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  constexpr std::string_view option = "--sources=";
  const std::string_view argument = argc > 1 ? argv[1] : "";
  if (argument.empty()) return RUN_ALL_TESTS();
  if (argc > 2 || argument.substr(0, option.size()) != option) {
    std::fprintf(stderr, "usage: %s [--sources=FILE,...] [options of GoogleTest; --gtest_filter replaces --sources]\n",
                 argv[0]);
    return 2;
  }
  const auto filters = tests_of_sources();
  std::istringstream sources{std::string(argument.substr(option.size()))};
  std::string filter;
  for (std::string source; std::getline(sources, source, ',');) {
    const auto found = filters.find(name_of(source));
    if (found == filters.end()) {
      std::fprintf(stderr, "%s: no tests of %s\n", argv[0], source.c_str());
      return 2;
    }
    filter += found->second;
  }
  if (GTEST_FLAG_GET(filter) == "*") GTEST_FLAG_SET(filter, filter);
  return RUN_ALL_TESTS();
}

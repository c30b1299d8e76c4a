// SPDX-License-Identifier: Apache-2.0
// Errors in a process that requests MPI when MPI is unavailable. Nothing here starts MPI.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "carrier/mpi.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {
namespace {

std::string refusal(const char* module) {
  ::setenv("SWITCHYARD_MPI_MODULE", module, 1);
  try {
    (void)mpi_process(std::chrono::seconds(1));
    return "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
    return error.what();
  }
}

TEST(MpiModule, AMissingFileIsNamed) {
  const std::string text = refusal("/nowhere/libswitchyard_mpi.so");
  EXPECT_NE(text.find("MPI: the module libswitchyard_mpi.so cannot be loaded"), std::string::npos) << text;
  EXPECT_NE(text.find("SWITCHYARD_MPI_MODULE"), std::string::npos) << text;
  EXPECT_NE(text.find("/nowhere/libswitchyard_mpi.so: no such file"), std::string::npos) << text;
}

TEST(MpiModule, AFileOfAnotherKindIsNamed) {
  const std::string text = refusal("libm.so.6");
  EXPECT_NE(text.find("MPI: libm.so.6 is of another version of Switchyard"), std::string::npos) << text;
}

}  // namespace
}  // namespace switchyard::detail

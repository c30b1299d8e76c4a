// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "switchyard/status.hpp"

namespace switchyard {

// Expects invalid_argument with exactly this text.
template <class Function>
void expect_refused(Function function, const std::string& text) {
  try {
    function();
    FAIL() << "not refused; expected: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_EQ(std::string(error.what()), text);
  }
}

}  // namespace switchyard

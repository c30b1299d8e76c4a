// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <new>
#include <string>

#include "switchyard/status.hpp"

namespace switchyard::detail {

/// Throws Error(system) with a message, which is empty if there is not enough memory for it.
[[noreturn]] inline void throw_system_error(const char* subject, const char* what) {
  std::string text;
  try {
    text = std::string(subject) + ": " + what;
  } catch (const std::bad_alloc&) {
    text.clear();
  }
  throw Error(ErrorCode::system, text);
}

/// Runs `f` and returns its result; converts a standard exception to Error(system) with a message that starts with `subject`.
/// Used at every exit from the library, and for errors that other ranks must receive.
template <class F>
decltype(auto) as_error(const char* subject, F&& f) {
  try {
    return f();
  } catch (const Error&) {
    throw;
  } catch (const std::bad_alloc&) {
    throw_system_error(subject, "there is no memory left for it on the host");
  } catch (const std::exception& error) {
    throw_system_error(subject, error.what());
  }
}

}  // namespace switchyard::detail

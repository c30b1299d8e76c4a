// SPDX-License-Identifier: Apache-2.0
// Describes the options in which the calls of two ranks differ, decoded from the words that the ranks compared.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "protocol/call.hpp"

namespace switchyard::detail {

/// The words that two ranks compared: call signatures (base/call_signature.hpp) or, at Site::call_header, header values of
/// low-latency calls. Site::none: the words are unknown.
struct CallDifference {
  Site site = Site::none;
  uint64_t mine = 0, theirs = 0;
};

/// Packs an operation and its options into the option bits of a signature. `values`: one value per option of the operation, in
/// the order of call_difference.cpp.
uint64_t pack_options(Operation operation, std::initializer_list<int64_t> values);

/// Describes each option that differs, as in "DispatchOptions::padding = zero on rank 0 and unspecified on rank 1", or the
/// calls if the ranks made different calls. Empty if there is no difference or the words are unknown.
std::string describe_difference(const CallDifference& difference, int my_rank, int their_rank);

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// Names the option in which the calls of two ranks differ, from the words that the ranks compared.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "protocol/call.hpp"

namespace switchyard::detail {

/// What two ranks compared: signatures of calls (base/call_signature.hpp), or, at Site::call_header, header values of
/// low-latency calls. Site::none: the words are not known.
struct CallDifference {
  Site site = Site::none;
  uint64_t mine = 0, theirs = 0;
};

/// Packs the operation and its options into the option bits of a signature. The values are in the order of the
/// operation's options in call_difference.cpp, one for each.
uint64_t pack_options(Operation operation, std::initializer_list<int64_t> values);

/// "DispatchOptions::padding = zero on rank 0 and unspecified on rank 1", of all options that differ, or the calls if these
/// differ; empty if nothing does or the words are not known.
std::string describe_difference(const CallDifference& difference, int my_rank, int their_rank);

}  // namespace switchyard::detail

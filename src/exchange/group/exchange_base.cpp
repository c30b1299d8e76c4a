// SPDX-License-Identifier: Apache-2.0
#include "exchange/group/exchange_base.hpp"

#include <cstring>
#include <string_view>
#include <vector>

namespace switchyard::detail {

namespace {

/// The field in a name that may begin with a function.
std::string_view field_in(std::string_view name) {
  name = name.substr(0, name.find(" ("));
  const size_t function = name.rfind(": ");
  return function == std::string_view::npos ? name : name.substr(function + 2);
}

}  // namespace

void invalid(const std::string& text) { throw Error(ErrorCode::invalid_argument, text); }
void invalid(const std::string& field, const std::string& rest) {
  throw Error(ErrorCode::invalid_argument, field + rest, field);
}

void invalid_value(const char* name, const std::string& value, const std::string& allowed) {
  throw Error(ErrorCode::invalid_argument, std::string(name) + " = " + value + ": must be " + allowed, field_in(name));
}

void check_range(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return;
  invalid_value(name, std::to_string(value), "in [" + std::to_string(low) + ", " + std::to_string(high) + "]");
}

void check_duration(const char* name, Milliseconds duration) {
  if (duration.count() < 1)
    throw Error(ErrorCode::invalid_argument,
                std::string(name) + " = " + std::to_string(duration.count()) + " ms: must be at least 1 ms");
}
int64_t checked_row_bytes(const char* what, int64_t hidden, DType type) {
  const int64_t bytes = hidden * static_cast<int64_t>(dtype_bytes(type));
  if (bytes % 16 != 0)
    throw Error(ErrorCode::invalid_argument,
                std::string(what) + ": a row of hidden = " + std::to_string(hidden) + " " + to_string(type) + " elements has " +
                    std::to_string(bytes) + " bytes: must be a multiple of 16",
                "hidden");
  return bytes;
}

void rethrow_agreed(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& own) {
    throw AgreedError(own.code(), own.what(), own.field());
  }
}

size_t ExchangeBase::take_heap(size_t bytes, size_t kept) {
  heap_block_ = HeapBlock(*group_.heap, bytes, 4096, kept);
  return heap_block_.offset();
}

void ExchangeBase::construct(const char* object, const char* config, const std::function<uint64_t()>& build) {
  struct Claim {
    StepReport report;
    uint64_t heap_offset = 0, hash = 0;
  };
  group_.check_usable(object);
  if (group_.device) {
    // Kernels of ended objects, on any rank, may use memory that the new one takes: all ranks wait for theirs, then for each
    // other.
    const StepReport idle = attempt([&] { group_.device->await_ended(group_.options.rendezvous_timeout); });
    std::vector<StepReport> ranks(static_cast<size_t>(world()));
    group_.all_gather(&idle, sizeof idle, ranks.data(), object, Operation::construction, group_.options.rendezvous_timeout,
                      object_);
    for (size_t r = 0; r < ranks.size(); ++r) raise_if_failed(ranks[r], object, r);
  }
  Claim mine;
  mine.report = attempt([&] { mine.hash = build(); });
  mine.heap_offset = heap_block_.offset();
  std::vector<Claim> all(static_cast<size_t>(world()));
  group_.all_gather(&mine, sizeof mine, all.data(), object, Operation::construction, group_.options.rendezvous_timeout,
                    object_);
  for (size_t r = 0; r < all.size(); ++r) raise_if_failed(all[r].report, object, r);
  for (size_t r = 0; r < all.size(); ++r) {
    const bool same_config = all[r].hash == all[0].hash;
    if (same_config && all[r].heap_offset == all[0].heap_offset) continue;
    const std::string who = std::string(object) + ": rank 0 and rank " + std::to_string(r);
    throw AgreedError(ErrorCode::mismatch,
                      same_config ? who + " hold other objects in their heaps"
                                  : who + " were given different " + config + " values, or make different objects");
  }
}

CallStatistics sum_moved(std::span<const MoveCounter> moved) {
  CallStatistics sum;
  for (const MoveCounter& m : moved) {
#define SWITCHYARD_STATISTIC_MOVED(name) sum.name += m.name;
#define SWITCHYARD_STATISTIC_TIME(name)
#include "switchyard/statistics.def"
  }
  return sum;
}

void set_flags(std::byte* base, int64_t bytes, int64_t stride, uint64_t word) {
  for (int64_t at = 0; at < bytes; at += stride) std::memcpy(base + at, &word, sizeof word);
}

}  // namespace switchyard::detail

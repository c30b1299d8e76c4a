// SPDX-License-Identifier: Apache-2.0
#include "exchange/group/exchange_base.hpp"

#include <cstring>
#include <string_view>
#include <vector>

namespace switchyard::detail {

namespace {

/// Returns the field from a name that may begin with a function name.
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

int64_t checked_row_bytes(const char* name, int64_t hidden, DType type, const char* row) {
  const int64_t bytes = static_cast<int64_t>(dtype_bytes(type, hidden));
  if (bytes % 16 != 0)
    throw Error(ErrorCode::invalid_argument,
                std::string(name) + " = " + std::to_string(hidden) + ": " + row + " has " + std::to_string(bytes) +
                    " bytes in " + to_string(type) + ", which must be a multiple of 16",
                field_in(name));
  return bytes;
}

void check_num_tokens(int64_t num_tokens, int64_t max_tokens) {
  if (num_tokens < 0 || num_tokens > max_tokens)
    invalid_value("topk_ids.num_tokens", std::to_string(num_tokens), "in [0, " + std::to_string(max_tokens) + "] (max_tokens)");
}

void rethrow_agreed(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& own) {
    throw AgreedError(own.code(), own.what(), own.field());
  }
}

size_t ExchangeBase::take_heap(size_t bytes, size_t kept) {
  for (size_t at_least = 0;;) {
    try {
      heap_block_ = HeapBlock();
      heap_block_ = HeapBlock(*group_.heap, bytes, 4096, kept, at_least);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::heap_exhausted) throw;
      const OffsetAllocator::Usage usage = group_.heap->usage();
      std::string text = "needs " + std::to_string(bytes) + " bytes of the symmetric heap, of which " +
                         std::to_string(usage.free) + " of " + std::to_string(group_.heap->size()) + " are free";
      if (usage.free >= bytes) text += ", the largest block " + std::to_string(usage.largest_free);
      text += std::string(": raise heap_bytes of the group to ") + sized_by_ + ", or to the sum over its objects";
      if (at_least > 0)
        text += "; other ranks have no room below byte " + std::to_string(at_least) +
                ", because they hold objects, or rows of objects, that are gone here";
      throw Error(error.code(), text);
    }
    const auto [highest, all_equal] = agree_on_offset();
    if (all_equal) return heap_block_.offset();
    at_least = highest;
  }
}

std::pair<uint64_t, bool> ExchangeBase::agree_on_offset() {
  try {
    return group_.highest_offset(made_, heap_block_.offset());
  } catch (...) {  // the peers also have this error
    placing_failed_ = std::current_exception();
    throw;
  }
}

void ExchangeBase::construct(const char* object, const char* sized_by, const std::function<AgreedFields()>& build) {
  group_.check_usable(object);
  made_ = object;
  sized_by_ = sized_by;
  ConstructionReport mine;
  if (group_.device) {
    // Kernels of destroyed objects, on any rank, may still use the memory that the new object takes. Each rank waits for its
    // own kernels, then for the other ranks.
    mine.report = attempt([&] { group_.device->await_ended(group_.options.rendezvous_timeout); });
    group_.agree(object, {}, mine);
  }
  AgreedFields fields;
  mine.report = attempt([&] { fields = build(); });
  if (placing_failed_) std::rethrow_exception(placing_failed_);
  group_.agree(object, fields, mine);
  group_.objects = object_;
}

void ExchangeBase::take_invalid(const InvalidRoutes& found, InvalidIds policy, int topk, int num_experts) {
  if (found.count == 0) return;
  if (policy == InvalidIds::raise) {
    const bool selected = is_refused_slot(found.id);  // or the caller passed this value without a SlotSelector
    const std::string t = std::to_string(found.first / topk), k = std::to_string(found.first % topk);
    const std::string from =
        "; from a SlotSelector: id " + std::to_string(found.id - kFirstRefusedSlot) + ", which is no expert of its map";
    invalid("topk_ids", "[" + t + "][" + k + "] = " + std::to_string(found.id) + " (token " + t + ", k = " + k +
                            (selected ? from + "): must be a slot in [0, " : "): must be an expert in [0, ") +
                            std::to_string(num_experts) + "), or -1 for none; " + std::to_string(found.count) +
                            " of the ids of this call are neither (invalid_ids = count drops and counts them)");
  }
  invalid_ids_ += found.count;
}

CallStatistics sum_moved(std::span<const MoveCounter> moved) {
  CallStatistics sum;
  for (const MoveCounter& m : moved) {
#define SY_STATISTIC_MOVED(name) sum.name += m.name;
#define SY_STATISTIC_TIME(name)
#include "switchyard/statistics.def"
  }
  return sum;
}

void set_flags(std::byte* base, int64_t bytes, int64_t stride, uint64_t word) {
  for (int64_t at = 0; at < bytes; at += stride) std::memcpy(base + at, &word, sizeof word);
}

}  // namespace switchyard::detail

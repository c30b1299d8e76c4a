// SPDX-License-Identifier: Apache-2.0
// Serialized handles: every field survives a round trip, and damage of any kind is rejected with invalid_argument and never
// misread.
#include <gtest/gtest.h>

#include <algorithm>

#include "modes/normal/compare_handle.hpp"
#include "plan/views.hpp"
#include "unit/plan/plan_cluster.hpp"

namespace plan_test {
namespace {

using switchyard::Error;
using switchyard::ErrorCode;
using switchyard::Layout;
using switchyard::detail::deserialize;
using switchyard::detail::HandleData;
using switchyard::detail::serialize;

using Bytes = std::vector<std::byte>;

void put_u64(Bytes& bytes, size_t at, uint64_t value) {
  for (size_t i = 0; i < 8; ++i) bytes[at + i] = static_cast<std::byte>(value >> (8 * i));
}

/// Makes damaged bytes look undamaged by updating the payload length and the checksum.
void seal(Bytes& bytes) {
  put_u64(bytes, 8, bytes.size() - 24);
  uint64_t hash = 14695981039346656037u;
  for (size_t i = 0; i + 8 < bytes.size(); ++i) {
    hash ^= std::to_integer<uint64_t>(bytes[i]);
    hash *= 1099511628211u;
  }
  put_u64(bytes, bytes.size() - 8, hash);
}

/// Returns an empty string if `bytes` are rejected as required; otherwise, a description of the actual outcome.
std::string refusal(const Bytes& bytes) {
  try {
    (void)deserialize(bytes);
    return "accepted";
  } catch (const Error& e) {
    return e.code() == ErrorCode::invalid_argument ? "" : std::string("wrong code: ") + e.what();
  }
}

std::shared_ptr<HandleData> small_handle(Layout layout, int capacity_percent, int rank = 1) {
  Case c{harness::Routing::duplicates, 3, 5, 3};
  c.layout = layout;
  c.alignment = 4;
  c.drop_percent = 10;
  c.capacity_percent = capacity_percent;
  oracle::Problem p = make_problem(c, 5);
  for (auto& ids : p.ids) ids.resize(std::min<size_t>(ids.size(), 15));
  for (auto& w : p.weights) w.resize(std::min<size_t>(w.size(), 15));
  if (capacity_percent) {
    p.size = switchyard::SizePolicy::exact;
    const oracle::Expected free = oracle::expect(p);
    p.size = switchyard::SizePolicy::capacity;
    p.capacity.clear();
    for (const auto& view : free.ranks) p.capacity.push_back(view.rows_needed * capacity_percent / 100);
  }
  return make_handles(p, false, 2)[static_cast<size_t>(rank)];
}

/// Returns the name of the first entry that would make combine or a cached dispatch access memory outside its arrays; empty if
/// there is no such entry.
std::string first_bad_index(const HandleData& h) {
  auto outside = [](const auto& v, int64_t low, int64_t high) {
    return std::any_of(v.begin(), v.end(), [&](int64_t x) { return x < low || x >= high; });
  };
  const auto routes = static_cast<size_t>(h.tokens * h.topk);
  const int local_experts = h.map.count(h.rank);
  if (h.ids.size() != routes || h.route_row.size() != routes || h.route_record.size() != routes) return "size of a route array";
  if (outside(h.ids, -1, h.counts.experts)) return "ids";
  if (h.send_begin.size() != static_cast<size_t>(h.tokens) + 1 || h.send_begin.front() != 0) return "send_begin";
  if (!std::is_sorted(h.send_begin.begin(), h.send_begin.end()) ||
      h.send_begin.back() != static_cast<int64_t>(h.sends.size())) {
    return "send_begin order";
  }
  for (const auto& send : h.sends) {
    if (send.rank < 0 || send.rank >= h.counts.world) return "send rank";
    const int64_t rows =
        std::min(h.counts.rows_needed(h.layout, h.alignment, send.rank), h.counts.capacity[static_cast<size_t>(send.rank)]);
    if (send.row < -1 || send.row >= rows) return "send row";
    if (send.record < 0 || send.record >= h.counts.touching_before(h.counts.world, send.rank)) return "send record";
  }
  for (size_t f = 0; f < routes; ++f) {
    if ((h.ids[f] < 0) != (h.route_row[f] < 0)) return "route_row";
    if (h.ids[f] < 0) continue;
    const int owner = h.map.owner(h.ids[f]);
    const int64_t rows =
        std::min(h.counts.rows_needed(h.layout, h.alignment, owner), h.counts.capacity[static_cast<size_t>(owner)]);
    if (h.route_row[f] >= rows) return "route_row range";
  }
  if (h.rows > h.rows_allocated || h.num_records > h.records_allocated) return "allocated";
  if (h.record_token.size() != static_cast<size_t>(h.records_allocated)) return "record_token size";
  if (h.record_route.size() != h.record_token.size() * static_cast<size_t>(h.topk)) return "record_route size";
  if (!h.record_weight.empty() && h.record_weight.size() != h.record_route.size()) return "record_weight size";
  if (outside(h.record_route, -1, h.layout == Layout::expert_major ? h.rows : local_experts)) return "record_route";
  if (h.layout == Layout::expert_major && h.row_source.size() != static_cast<size_t>(h.rows_allocated))
    return "row_source size";
  if (h.layout == Layout::expert_major && outside(h.first_row, 0, h.rows + 1)) return "first_row";
  return "";
}

class RoundTrip : public testing::TestWithParam<Case> {};

TEST_P(RoundTrip, EveryField) {
  const oracle::Problem p = make_problem(GetParam(), 21);
  const auto handles = make_handles(p, GetParam().wide, GetParam().world % 3);
  for (int r = 0; r<p.world; r += p.world> 8 ? 5 : 1) {
    const HandleData& h = *handles[static_cast<size_t>(r)];
    const Bytes bytes = serialize(h);
    harness::Failures failures("rank " + std::to_string(r));
    const auto back = deserialize(bytes);
    harness::compare_handles(h, *back, failures);
    EXPECT_EQ(failures.take(), std::vector<std::string>{});
    EXPECT_EQ(serialize(*back), bytes);
  }
}

INSTANTIATE_TEST_SUITE_P(All, RoundTrip, testing::ValuesIn(all_cases()), [](const auto& c) { return to_string(c.param); });

TEST(Damage, EveryTruncationIsRefused) {
  const Bytes bytes = serialize(*small_handle(Layout::expert_major, 0));
  for (size_t n = 0; n < bytes.size(); ++n)
    EXPECT_EQ(refusal(Bytes(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(n))), "") << n;
  Bytes longer = bytes;
  longer.push_back(std::byte{0});
  EXPECT_EQ(refusal(longer), "");
}

TEST(Damage, EverySealedTruncationIsRefused) {
  const Bytes bytes = serialize(*small_handle(Layout::rank_major, 0));
  for (size_t n = 24; n < bytes.size(); ++n) {
    Bytes shorter(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(n));
    seal(shorter);
    EXPECT_EQ(refusal(shorter), "") << n;
  }
}

TEST(Damage, EveryFlippedBitIsRefused) {
  Bytes bytes = serialize(*small_handle(Layout::expert_major, 60));
  for (size_t i = 0; i < bytes.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      bytes[i] ^= std::byte{1} << bit;
      EXPECT_EQ(refusal(bytes), "") << "byte " << i << " bit " << bit;
      bytes[i] ^= std::byte{1} << bit;
    }
  }
}

/// With a matching checksum, a change is either rejected or produces another consistent handle, which serializes to the changed
/// bytes and whose addresses all satisfy the rules.
TEST(Damage, SealedChangesAreRefusedOrConsistent) {
  int accepted = 0, refused = 0;
  for (const Layout layout : {Layout::rank_major, Layout::expert_major}) {
    for (const int capacity : {0, 60}) {
      const auto handle = small_handle(layout, capacity);
      const Bytes good = serialize(*handle);
      for (size_t i = 16; i + 8 < good.size(); ++i) {
        for (const int change : {1, 0xFF, 0x80, 0x7F, 2}) {
          Bytes bytes = good;
          bytes[i] ^= static_cast<std::byte>(change);
          seal(bytes);
          try {
            const auto back = deserialize(bytes);
            ++accepted;
            ASSERT_EQ(serialize(*back), bytes) << "byte " << i;
            ASSERT_EQ(first_bad_index(*back), "") << "byte " << i;
          } catch (const Error& e) {
            ++refused;
            ASSERT_EQ(e.code(), ErrorCode::invalid_argument);
          }
        }
      }
    }
  }
  EXPECT_GT(accepted, 0);  // changes of weights, hidden, ...
  EXPECT_GT(refused, accepted);
}

TEST(Damage, TextNamesTheField) {
  const Bytes good = serialize(*small_handle(Layout::rank_major, 0));
  auto text_of = [](const Bytes& bytes) {
    try {
      (void)deserialize(bytes);
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string("accepted");
  };
  Bytes bytes = good;
  bytes[0] = std::byte{0};
  EXPECT_NE(text_of(bytes).find("magic"), std::string::npos) << text_of(bytes);
  bytes = good;
  bytes[4] = std::byte{9};
  EXPECT_NE(text_of(bytes).find("version 9"), std::string::npos) << text_of(bytes);
  bytes = good;
  bytes[20] ^= std::byte{1};
  EXPECT_NE(text_of(bytes).find("checksum"), std::string::npos) << text_of(bytes);
  bytes = good;
  bytes[16 + 1 + 4] = std::byte{200};  // world
  seal(bytes);
  EXPECT_NE(text_of(bytes).find("world is 200, allowed is 1 to 64"), std::string::npos) << text_of(bytes);
}

/// The format is fixed: every later library that supports version 2 must be able to read bytes written today.
TEST(Format, HeadIsLittleEndianAndVersioned) {
  const Bytes bytes = serialize(*small_handle(Layout::rank_major, 0));
  const unsigned char head[] = {'S', 'W', 'C', 'H', 2, 0, 0, 0};
  for (size_t i = 0; i < sizeof head; ++i) EXPECT_EQ(std::to_integer<unsigned char>(bytes[i]), head[i]);
  EXPECT_EQ(
      std::to_integer<size_t>(bytes[8]) | std::to_integer<size_t>(bytes[9]) << 8 | std::to_integer<size_t>(bytes[10]) << 16,
      bytes.size() - 24);
}

}  // namespace
}  // namespace plan_test

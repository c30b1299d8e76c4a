// SPDX-License-Identifier: Apache-2.0
// Interface of an arch to the conformance suite: an ArchDriver<A>, through which the host calls individual ops. All functions
// run on one warp, which lives as long as the driver. When a function returns, its op has been executed (on a GPU: a kernel
// launch and a synchronization), but has not necessarily settled.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "arch/ops.hpp"
#include "layout/sites.hpp"

namespace switchyard::conformance {

/// Function passed to out_of_line and out_of_line_if_cheap: publishes the value and returns whether it is odd. Flag ops must
/// also work out of line.
template <class A>
struct StoreAndPublish {
  SWITCHYARD_FN bool operator()(typename A::Warp& w, uint64_t* flag, uint64_t value) const {
    A::template store_release<detail::Scope::system>(w, flag, value, detail::Site::counts);
    return value % 2 != 0;
  }
};

/// Word written by a warp for block_sums().
SWITCHYARD_FN constexpr uint64_t block_word(int warp, int round) {
  return (static_cast<uint64_t>(warp) + 1) << 32 | static_cast<uint64_t>(round);
}

// Row memory is allocated by allocate(). Arrays of pointers and weights may be in ordinary host memory: the driver transfers
// them to the warp.
template <class A>
struct ArchDriver;  // specialised for each arch

template <class D>
concept Driver = requires(D& d, void* dst, void* const* dsts, const void* src, size_t bytes, int n, uint64_t* flag,
                          uint64_t* const* flags, const uint64_t* const* polled, uint64_t value, uint8_t* q,
                          const detail::ReduceSpec& spec, int64_t hidden) {
  { D::allocate(bytes) } -> std::same_as<std::byte*>;  // accessible to host and arch, aligned to 256, freed by release
  D::release(static_cast<std::byte*>(nullptr));
  { D::kUnalignedElements } -> std::convertible_to<bool>;  // arithmetic ops accept rows that are not aligned to their elements
  // Reduced op set, as in CudaInline. Copied, announced, summed and quantized rows have addresses and lengths that are
  // multiples of 16 bytes. Rows to quantize are bf16, and sums over places have no bias. There are at most
  // 32 places, and lanes_union has 32 bits. locate does not report the distance past the end.
  { D::kWholeRowsOnly } -> std::convertible_to<bool>;

  // Lists the row-op implementations that this machine can run, and selects one for subsequent calls (empty: the default).
  { D::variants() } -> std::same_as<std::vector<std::string>>;
  D::use_variant(std::string());
  { D::variant_in_use() } -> std::same_as<std::string>;

  d.copy(dst, src, bytes);
  d.multicast_to(dsts, n, src, bytes);             // null destinations are skipped
  d.multicast_fetched(dsts, n, src, bytes);        // the same for a row that was fetched before
  d.multicast_fetched_words(dsts, n, src, bytes);  // the same, fetched as words
  d.fill_zero(dst, bytes);
  d.prefetch(src, bytes);
  d.drain_sources();
  d.settle();
  d.reduce_rows(spec);
  d.reduce_rows_from(spec, std::vector<int>());     // only the rows and weights at the given places, ascending
  d.map_row(dst, src, DType::bf16, hidden);         // element c becomes x * 3 + (c mod 64)
  d.map_sentinel(dst, src, DType::bf16, hidden);    // the same to a sentinel row
  d.multicast_sentinel(dsts, n, src, bytes);        // null destinations are skipped; as sentinel_sums()
  d.multicast_sentinel(dsts, n, src, bytes, true);  // as sentinel_copies(), like the following two
  { d.has_arrived(src, bytes) } -> std::same_as<bool>;
  d.blank_row(dst, bytes);
  { d.reduce_if_arrived(spec, n) } -> std::same_as<int>;  // spec.rows are sentinel rows or null; polls a late row n times
  d.quantize_row(q, dst, src, DType::bf16, hidden, ScaleKind::f32, 128);
  d.quantize_to(std::vector<detail::QuantizedRow>(), src, DType::bf16, hidden, ScaleKind::f32, 128);

  { d.load_acquire(flag) } -> std::same_as<uint64_t>;
  d.store_release(flag, value);
  d.publish_to(flags, n, value);  // null flags are skipped
  d.publish_entry(flags, n, value);
  { d.poll_from(polled, n, value) } -> std::same_as<int>;
  { d.fetch_add(flag, value) } -> std::same_as<uint64_t>;
  { d.take(flag, value) } -> std::same_as<uint64_t>;
  d.post(flag, value);
  { d.peek(flag) } -> std::same_as<uint64_t>;
  d.count(flag, value);
  d.count_max(flag, value);
  // Both run StoreAndPublish; the second one may run it inline.
  { d.out_of_line(flag, value) } -> std::same_as<bool>;
  { d.out_of_line_if_cheap(flag, value) } -> std::same_as<bool>;
  // A block of n warps runs n rounds. In each round, every warp writes its index and the round to its own word, calls
  // block_sync, sums all words of the block, and calls block_sync again. Returns the sums by round and warp.
  { d.block_sums(n, n) } -> std::same_as<std::vector<uint64_t>>;
  { d.count_lanes(n) } -> std::same_as<std::vector<int>>;  // number of calls by for_lanes(n) for each of 0..n-1
  { d.lanes_where(std::vector<bool>()) } -> std::same_as<uint64_t>;
  { d.lanes_union(std::vector<uint64_t>()) } -> std::same_as<uint64_t>;
  { d.count_where(std::vector<bool>()) } -> std::same_as<int64_t>;
  { d.locate(int64_t{}, std::vector<int64_t>()) } -> std::same_as<detail::Located>;  // among segments of these lengths
  { d.locate_many(int64_t{}, std::vector<int64_t>()) } -> std::same_as<detail::Located>;
  { d.now_ns() } -> std::same_as<uint64_t>;
  d.pause(int64_t{});  // after this many polls
  { d.scratch() } -> std::same_as<std::byte*>;
};

}  // namespace switchyard::conformance

// SPDX-License-Identifier: Apache-2.0
// Conformance driver for both CPU archs, with its warp on the calling thread.
#pragma once

#include <new>
#include <stdexcept>

#include "arch/cpu/cpu_arch.hpp"
#include "arch/cpu/row_ops.hpp"
#include "arch/cpu/worker_pool.hpp"
#include "conformance/arch_driver.hpp"

namespace switchyard::conformance {

template <bool kDeferred>
struct ArchDriver<detail::BasicCpu<kDeferred>> {
  using Cpu = detail::BasicCpu<kDeferred>;
  static constexpr auto kScope = detail::Scope::system;
  static constexpr auto kSite = detail::Site::counts;

  static constexpr bool kUnalignedElements = true;
  static constexpr bool kWholeRowsOnly = false;
  static std::byte* allocate(size_t bytes) { return static_cast<std::byte*>(::operator new (bytes, std::align_val_t{256})); }
  static void release(std::byte* p) { ::operator delete (p, std::align_val_t{256}); }

  static std::vector<std::string> variants() {
    static const std::vector<std::string> names = [] {
      std::vector<std::string> all;
      for (const detail::SimdTarget& target : detail::simd_targets()) all.emplace_back(target.name);
      return all;
    }();
    return names;
  }
  static void use_variant(const std::string& name) {
    detail::force_simd_target(0);
    if (name.empty()) return;
    for (const detail::SimdTarget& target : detail::simd_targets()) {
      if (target.name == name) return detail::force_simd_target(target.id);
    }
    throw std::invalid_argument("no such variant: " + name);
  }
  static std::string variant_in_use() { return detail::current_simd_target().name; }

  void copy(void* dst, const void* src, size_t bytes) { Cpu::copy(warp, dst, src, bytes); }
  void multicast_fetched(void* const* dsts, int n, const void* src, size_t bytes) {
    Cpu::multicast_fetched(
        warp, n, [&](int i) { return dsts[i]; }, Cpu::fetch(warp, src, bytes));
  }
  void multicast_fetched_words(void* const* dsts, int n, const void* src, size_t bytes) {
    Cpu::multicast_fetched(
        warp, n, [&](int i) { return dsts[i]; }, Cpu::fetch_words(warp, src, bytes));
  }
  void multicast_to(void* const* dsts, int n, const void* src, size_t bytes) {
    Cpu::multicast_to(
        warp, n, [&](int i) { return dsts[i]; }, src, bytes);
  }
  void fill_zero(void* dst, size_t bytes) { Cpu::fill_zero(warp, dst, bytes); }
  void prefetch(const void* src, size_t bytes) { Cpu::prefetch(warp, src, bytes); }
  void drain_sources() { Cpu::drain_sources(warp); }
  void settle() { Cpu::settle(warp); }
  void reduce_rows(const detail::ReduceSpec& spec) { Cpu::reduce_rows(warp, spec); }
  void reduce_rows_from(const detail::ReduceSpec& spec, const std::vector<int>& places) {
    const int last = places.empty() ? 0 : places.back() + 1;
    std::vector<int> row_at(static_cast<size_t>(last), -1);
    for (size_t i = 0; i < places.size(); ++i) row_at[static_cast<size_t>(places[i])] = static_cast<int>(i);
    Cpu::reduce_rows_from(
        warp, spec, last, spec.weights != nullptr,
        [&](int i) -> const void* {
          return row_at[static_cast<size_t>(i)] < 0 ? nullptr : spec.rows[row_at[static_cast<size_t>(i)]];
        },
        [&](int i) { return spec.weights[row_at[static_cast<size_t>(i)]]; });
  }
  void map_row(void* out, const void* src, DType type, int64_t hidden) {
    Cpu::map_row(warp, out, src, type, hidden, [](float* x, int64_t column, auto n) {
      for (int64_t i = 0; i < n; ++i) x[i] = x[i] * 3 + static_cast<float>((column + i) % 64);
    });
  }
  void map_sentinel(void* out, const void* src, DType type, int64_t hidden) {
    Cpu::map_row(
        warp, out, src, type, hidden,
        [](float* x, int64_t column, auto n) {
          for (int64_t i = 0; i < n; ++i) x[i] = x[i] * 3 + static_cast<float>((column + i) % 64);
        },
        true);
  }
  void multicast_sentinel(void* const* dsts, int n, const void* src, size_t bytes, bool copies = false) {
    Cpu::multicast_sentinel(
        warp, n, [&](int i) { return dsts[i]; }, src, bytes, copies ? detail::sentinel_copies() : detail::sentinel_sums());
  }
  bool has_arrived(const void* row, size_t bytes) { return Cpu::has_arrived(warp, row, bytes, detail::sentinel_copies()); }
  void blank_row(void* row, size_t bytes) { Cpu::blank_row(warp, row, bytes, detail::sentinel_copies()); }
  int reduce_if_arrived(const detail::ReduceSpec& spec, int looks) {
    return Cpu::reduce_if_arrived(
        warp, spec, spec.n, spec.weights != nullptr, [&](int i) { return spec.rows[i]; },
        [&](int i) { return spec.weights[i]; }, looks);
  }
  void quantize_row(uint8_t* q, void* scales, const void* src, DType type, int64_t hidden, ScaleKind kind,
                    int group = kScaleGroup) {
    Cpu::quantize_row(warp, q, scales, src, type, hidden, kind, group);
  }

  void quantize_to(const std::vector<detail::QuantizedRow>& to, const void* src, DType type, int64_t hidden, ScaleKind kind,
                   int group) {
    Cpu::quantize_to(
        warp, static_cast<int>(to.size()), [&](int i) { return to[static_cast<size_t>(i)]; }, src, type, hidden, kind, group);
  }

  uint64_t load_acquire(const uint64_t* flag) { return Cpu::template load_acquire<kScope>(flag, kSite); }
  void store_release(uint64_t* flag, uint64_t value) { Cpu::template store_release<kScope>(warp, flag, value, kSite); }
  void publish_to(uint64_t* const* flags, int n, uint64_t value) {
    Cpu::template publish_to<kScope>(
        warp, n,
        [&](int i) {
          return detail::FlagStore{flags[i], value};
        },
        kSite);
  }
  void publish_entry(uint64_t* const* flags, int n, uint64_t value) {
    Cpu::publish_entry(
        warp, n,
        [&](int i) {
          return detail::FlagStore{flags[i], value};
        },
        kSite);
  }
  int poll_from(const uint64_t* const* flags, int n, uint64_t value) {
    return Cpu::template poll_from<kScope>(
        warp, n, [&](int i) { return flags[i]; }, value, kSite);
  }
  uint64_t fetch_add(uint64_t* flag, uint64_t value) { return Cpu::template fetch_add<kScope>(warp, flag, value, kSite); }
  uint64_t take(uint64_t* counter, uint64_t value) { return Cpu::take(warp, counter, value); }
  void post(uint64_t* flag, uint64_t value) { Cpu::post(warp, flag, value); }
  uint64_t peek(const uint64_t* flag) { return Cpu::peek(flag); }
  void count(uint64_t* statistic, uint64_t value) { Cpu::count(warp, statistic, value); }
  void count_max(uint64_t* statistic, uint64_t value) { Cpu::count_max(warp, statistic, value); }
  bool out_of_line(uint64_t* flag, uint64_t value) { return Cpu::out_of_line(warp, StoreAndPublish<Cpu>{}, flag, value); }
  bool out_of_line_if_cheap(uint64_t* flag, uint64_t value) {
    return Cpu::out_of_line_if_cheap(warp, StoreAndPublish<Cpu>{}, flag, value);
  }
  std::vector<uint64_t> block_sums(int warps, int rounds) {
    std::vector<uint64_t> words(static_cast<size_t>(warps)), sums(static_cast<size_t>(warps * rounds));
    detail::WorkerPool(1, warps).run([&](detail::CpuWarp& w) {
      for (int round = 0; round < rounds; ++round) {
        words[static_cast<size_t>(w.warp())] = block_word(w.warp(), round);
        Cpu::block_sync(w);
        uint64_t sum = 0;
        for (const uint64_t word : words) sum += word;
        sums[static_cast<size_t>(round * warps + w.warp())] = sum;
        Cpu::block_sync(w);
      }
    });
    return sums;
  }
  std::vector<int> count_lanes(int n) {
    std::vector<int> hits(static_cast<size_t>(n));
    Cpu::for_lanes(warp, n, [&](int i) { ++hits[static_cast<size_t>(i)]; });
    return hits;
  }
  uint64_t lanes_where(const std::vector<bool>& which) {
    return Cpu::lanes_where(warp, static_cast<int>(which.size()), [&](int i) { return which[static_cast<size_t>(i)]; });
  }
  uint64_t lanes_union(const std::vector<uint64_t>& of) {
    return Cpu::lanes_union(warp, static_cast<int>(of.size()), [&](int i) { return of[static_cast<size_t>(i)]; });
  }
  int64_t count_where(const std::vector<bool>& which) {
    return Cpu::count_where(warp, static_cast<int64_t>(which.size()), [&](int64_t i) { return which[static_cast<size_t>(i)]; });
  }
  detail::Located locate(int64_t index, const std::vector<int64_t>& lengths) {
    return Cpu::locate(warp, index, static_cast<int>(lengths.size()), [&](int i) { return lengths[static_cast<size_t>(i)]; });
  }
  detail::Located locate_many(int64_t index, const std::vector<int64_t>& lengths) {
    return Cpu::locate_many(warp, index, static_cast<int>(lengths.size()),
                            [&](int i) { return lengths[static_cast<size_t>(i)]; });
  }
  uint64_t now_ns() { return Cpu::now_ns(); }
  void pause(int64_t polls) { Cpu::pause(warp, polls); }
  std::byte* scratch() { return warp.scratch(); }

  detail::CpuWarp warp{0, 0, 1, 1, nullptr};
};

}  // namespace switchyard::conformance

// SPDX-License-Identifier: Apache-2.0
#include "check/scenario.hpp"
#include "run/index.hpp"

#include <fmt/core.h>

#include <cstring>

namespace switchyard::tool {
namespace {

std::string code_text(const void* row, DType type, int64_t c) {
  uint32_t bits = 0;
  std::memcpy(&bits, static_cast<const char*>(row) + dtype_bytes(type, c), dtype_bytes(type, 1));
  return fmt::format("{:g} (0x{:0{}x})", oracle::load(type, row, c), bits, dtype_bits(type) / 4);
}

/// The first of the token's choices that names the same expert as choice k.
int first_with_expert(const Scenario& s, int source, int64_t token, int k) {
  int first = 0;
  while (s.id(source, token, first) != s.id(source, token, k)) ++first;
  return first;
}

}  // namespace

oracle::Problem Scenario::problem(int64_t capacity) const {
  oracle::Problem p;
  p.world = world;
  p.experts = experts;
  p.topk = topk;
  p.layout = layout;
  p.alignment = alignment;
  if (capacity >= 0) {
    p.size = SizePolicy::capacity;
    p.capacity.assign(at(world), capacity);
    p.overflow = Overflow::drop_and_report;
  }
  for (const Routing& r : routing) {
    p.max_tokens = std::max(p.max_tokens, r.num_tokens);
    p.ids.emplace_back(r.topk_ids.begin(), r.topk_ids.end());
    if (weighted()) p.weights.push_back(r.topk_weights);
  }
  return p;
}

uint64_t output_key(const Scenario& s, uint64_t set, int dest, const oracle::Origin& origin) {
  const auto source = static_cast<uint64_t>(origin.source);
  const auto token = static_cast<uint64_t>(origin.token);
  if (origin.k < 0) return row_key(s.seed, set, RowKind::rank_output, static_cast<uint64_t>(dest), token, source);
  const auto expert = static_cast<uint64_t>(s.id(origin.source, origin.token, origin.k));
  const uint64_t route = token * static_cast<uint64_t>(s.topk) + static_cast<uint64_t>(origin.k);
  return row_key(s.seed, set, RowKind::expert_output, expert, route, source);
}

ExpectedSums::ExpectedSums(const Scenario& s, const CombineCase& c, int rank)
    : s_(s),
      c_(c),
      rank_(rank),
      owned_(oracle::owned(s.problem(c.capacity), rank)),
      weighted_(s.layout == Layout::expert_major && c.apply_weights && s.weighted()),
      row_bytes_(dtype_bytes(c.type, s.hidden)),
      rows_(at(std::max(s.topk, s.world)), std::vector<std::byte>(row_bytes_)),
      values_(at(s.hidden)) {
  for (int b = 0; b < c.num_bias; ++b) bias_[b].resize(row_bytes_);
}

/// Adds the row that rank `dest` returns for choice k of the token; k = -1 means rank-major.
void ExpectedSums::add_term(int dest, int64_t token, int k) {
  std::vector<std::byte>& row = rows_[terms_.size()];
  const auto source = static_cast<uint64_t>(rank_);
  if (c_.identity && !terms_.empty() && !c_.expert_scale) {
    row = rows_[0];  // the token's own row again
  } else if (c_.identity) {
    fill_row(row.data(), c_.type, s_.hidden, row_key(s_.seed, c_.set, RowKind::token, source, static_cast<uint64_t>(token)));
  } else {
    fill_row(row.data(), c_.type, s_.hidden,
             output_key(s_, c_.set, dest, {rank_, token, c_.repeats_alias ? first_with_expert(s_, rank_, token, k) : k}));
  }
  if (c_.expert_scale) {
    oracle::load_row(c_.type, row.data(), s_.hidden, values_.data());
    for (float& value : values_) value *= (*c_.expert_scale)[at(s_.id(rank_, token, k))];
    oracle::store_row(c_.type, values_.data(), s_.hidden, row.data());
  }
  terms_.push_back({row.data(), weighted_ ? s_.weight(rank_, token, k) : 1.0f, dest});
}

void ExpectedSums::make(int64_t token, void* out) {
  oracle::SumSpec sum;
  sum.type = c_.type;
  sum.hidden = s_.hidden;
  sum.order = c_.order;
  sum.host_of = c_.host_of;
  sum.weighted = weighted_;
  sum.pre_reduced = s_.layout == Layout::rank_major;
  for (int b = 0; b < c_.num_bias; ++b) {
    fill_row(bias_[b].data(), c_.type, s_.hidden,
             row_key(s_.seed, c_.set, RowKind::bias, static_cast<uint64_t>(rank_), static_cast<uint64_t>(token),
                     static_cast<uint64_t>(b)));
    sum.bias[b] = bias_[b].data();
  }
  terms_.clear();
  if (s_.layout == Layout::rank_major) {
    for (const oracle::Send& send : owned_.sends[at(token)]) add_term(send.rank, token, -1);
  } else {
    for (int k = 0; k < s_.topk; ++k)
      if (const int32_t id = owned_.kept_ids[at(token * s_.topk + k)]; id >= 0) add_term(s_.owner(id), token, k);
  }
  oracle::combine_row(sum, terms_, out);
}

std::string row_difference(const void* got, const void* expected, DType type, int64_t hidden) {
  const int64_t c = oracle::first_difference(type, got, expected, hidden);
  if (c == hidden) return "";
  return fmt::format("column {}: {}, expected {}", c, code_text(got, type, c), code_text(expected, type, c));
}

}  // namespace switchyard::tool

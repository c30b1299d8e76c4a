// SPDX-License-Identifier: Apache-2.0
// A handle as bytes: head {magic, version, payload bytes}, payload, and an FNV-1a checksum of everything before it. The payload
// contains the counts, the ids and the records; addresses, sends and per-expert tables are recomputed by the original rules.
// Arrays whose size can be chosen freely (static sizes) are stored in full, so that memory use stays proportional to the input
// size.
#include <algorithm>
#include <bit>
#include <limits>
#include <new>
#include <string>
#include <type_traits>

#include "plan/index.hpp"
#include "plan/decisions.hpp"
#include "plan/views.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {

namespace {

constexpr uint32_t kMagic = 0x48435753;  // "SWCH"
constexpr uint32_t kVersion = 2;
constexpr size_t kHeadBytes = 16, kChecksumBytes = 8;
constexpr int64_t kMaxIndex = std::numeric_limits<int32_t>::max();

uint64_t checksum(std::span<const std::byte> bytes) {
  uint64_t hash = 0xCBF29CE484222325u;
  for (const std::byte b : bytes) hash = (hash ^ static_cast<uint64_t>(b)) * 0x100000001B3u;
  return hash;
}

[[noreturn]] void reject(const std::string& what) { throw Error(ErrorCode::invalid_argument, "handle bytes: " + what); }

void require(bool ok, const char* what) {
  if (!ok) reject(what);
}

class Writer {
 public:
  template <class T>
  void put(T value) {
    if constexpr (std::is_enum_v<T>) {
      put(static_cast<std::underlying_type_t<T>>(value));
    } else if constexpr (std::is_same_v<T, float>) {
      put(std::bit_cast<uint32_t>(value));
    } else {
      const auto bits = static_cast<uint64_t>(value);
      for (size_t i = 0; i < sizeof(T); ++i) bytes_.push_back(static_cast<std::byte>(bits >> (8 * i)));
    }
  }
  template <class T>
  void put_vector(const std::vector<T>& v) {
    put(static_cast<uint64_t>(v.size()));
    for (const T value : v) put(value);
  }
  std::vector<std::byte>& bytes() { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <class T>
  T get() {
    if constexpr (std::is_same_v<T, float>) {
      return std::bit_cast<float>(get<uint32_t>());
    } else {
      require(bytes_.size() - at_ >= sizeof(T), "they end too early");
      uint64_t bits = 0;
      for (size_t i = 0; i < sizeof(T); ++i) bits |= static_cast<uint64_t>(bytes_[at_ + i]) << (8 * i);
      at_ += sizeof(T);
      return static_cast<T>(bits);
    }
  }
  template <class T>
  std::vector<T> get_vector(int64_t expected, const char* name) {
    const auto n = get<uint64_t>();
    if (n != static_cast<uint64_t>(expected)) {
      reject(std::string(name) + " has " + std::to_string(n) + " entries, its shape says " + std::to_string(expected));
    }
    require(n <= (bytes_.size() - at_) / sizeof(T), "they end too early");
    std::vector<T> v(n);
    for (T& value : v) value = get<T>();
    return v;
  }
  bool get_flag() {
    const auto flag = get<uint8_t>();
    require(flag <= 1, "a flag is neither 0 nor 1");
    return flag == 1;
  }
  bool at_end() const { return at_ == bytes_.size(); }

 private:
  std::span<const std::byte> bytes_;
  size_t at_ = 0;
};

int64_t in_range(int64_t value, int64_t low, int64_t high, const char* name) {
  if (value < low || value > high) {
    reject(std::string(name) + " is " + std::to_string(value) + ", allowed is " + std::to_string(low) + " to " +
           std::to_string(high));
  }
  return value;
}

void read_shape(Reader& in, HandleData& h) {
  h.layout = static_cast<Layout>(in_range(in.get<uint8_t>(), 0, std::ssize(NamesOf<Layout>::kAll) - 1, "layout"));
  h.alignment = static_cast<int>(in_range(in.get<int32_t>(), 1, kMaxIndex, "alignment"));
  const int world = static_cast<int>(in_range(in.get<int32_t>(), 1, kMaxRanks, "world"));
  h.rank = static_cast<int>(in_range(in.get<int32_t>(), 0, world - 1, "rank"));
  h.topk = static_cast<int>(in_range(in.get<int32_t>(), 1, kMaxTopk, "topk"));
  const int experts = static_cast<int>(in_range(in.get<int32_t>(), 1, kMaxIndex / kMaxRanks, "num_experts"));
  h.max_tokens = in_range(in.get<int64_t>(), 0, kMaxIndex, "max_tokens");
  h.tokens = in_range(in.get<int64_t>(), 0, h.max_tokens, "tokens");
  h.hidden = in_range(in.get<int64_t>(), 1, std::numeric_limits<int64_t>::max(), "hidden");
  h.rows_allocated = in_range(in.get<int64_t>(), 0, kMaxIndex, "rows_allocated");
  h.records_allocated = in_range(in.get<int64_t>(), 0, kMaxIndex, "records_allocated");
  h.identity = in.get<uint64_t>();
  h.map = ExpertRanges{experts, world};
  h.counts.world = world;
  h.counts.experts = experts;
}

void read_counts(Reader& in, HandleData& h) {
  GatheredCounts& c = h.counts;
  c.tokens = in.get_vector<int64_t>(c.world, "tokens of all ranks");
  c.capacity = in.get_vector<int64_t>(c.world, "capacity");
  c.touching = in.get_vector<int32_t>(int64_t{c.world} * c.world, "tokens per rank");
  c.routes = in.get_vector<int32_t>(int64_t{c.world} * c.experts, "routes per expert");
  for (const int64_t capacity : c.capacity) require(capacity >= 0, "a capacity is negative");
  for (int s = 0; s < c.world; ++s) {
    const int64_t tokens = in_range(c.tokens[idx(s)], 0, h.max_tokens, "tokens of a rank");
    int64_t all_routes = 0;
    for (int d = 0; d < c.world; ++d) {
      const int64_t touching = in_range(c.d(s, d), 0, tokens, "tokens of a rank that touch another");
      int64_t routes = 0;
      for (int e = h.map.first(d); e < h.map.first(d) + h.map.count(d); ++e) {
        require(c.s(s, e) >= 0, "a count of routes is negative");
        routes += c.s(s, e);
      }
      require(routes >= touching && routes <= touching * h.topk, "routes per expert do not fit the tokens per rank");
      all_routes += routes;
    }
    require(all_routes <= tokens * h.topk, "more routes than tokens have");
  }
  require(c.tokens[idx(h.rank)] == h.tokens, "tokens disagree with the tokens of all ranks");
  for (int d = 0; d < c.world; ++d) {
    const int64_t needed = c.rows_needed(h.layout, h.alignment, d);
    require(std::min(needed, c.capacity[idx(d)]) <= kMaxIndex && c.touching_before(c.world, d) <= kMaxIndex, "too many rows");
  }
}

/// Rebuilds and checks all data about this rank's own tokens, token by token.
class OwnerSide {
 public:
  explicit OwnerSide(HandleData& h) : h_(h), rows_(idx(h.counts.experts)), records_(idx(h.counts.world)), kept_(rows_.size()) {
    std::vector<int64_t> first;
    for (int d = 0; d < h.counts.world; ++d) {
      records_[idx(d)] = h.counts.touching_before(h.rank, d);
      if (h.layout == Layout::rank_major) continue;
      h.counts.expert_first_rows(h.alignment, d, first);
      for (int el = 0; el < h.map.count(d); ++el) {
        int64_t& row = rows_[idx(h.map.first(d) + el)] = first[idx(el)];
        for (int s = 0; s < h.rank; ++s) row += h.counts.s(s, h.map.first(d) + el);
      }
    }
  }

  /// `ranks` contains the destinations of the token's records in ascending order. `dropped_record` contains the [K] records of
  /// routes dropped at capacity, and -1 for other routes.
  void add_token(int64_t t, std::span<const int32_t> ranks, std::span<const int32_t> dropped_record) {
    const auto first_send = h_.sends.size();
    int last = -1;
    for (const int32_t rank : ranks) {
      require(rank > last && rank < h_.counts.world, "the ranks of a token do not ascend");
      h_.sends.push_back({last = rank, -1, static_cast<int32_t>(records_[idx(rank)]++)});
    }
    for (int k = 0; k < h_.topk; ++k) {
      const int64_t f = t * h_.topk + k;
      if (!h_.dropped.empty() && h_.dropped[idx(f)]) {
        drop(f, first_send, dropped_record[idx(k)]);
        continue;
      }
      require(dropped_record[idx(k)] == -1, "a record of a dropped route belongs to no dropped route");
      if (h_.ids[idx(f)] >= 0) keep(f, first_send);
    }
    for (size_t i = first_send; i < h_.sends.size(); ++i) {
      if (h_.sends[i].row >= 0) continue;
      const auto begin = h_.route_record.begin() + t * h_.topk;
      require(std::find(begin, begin + h_.topk, h_.sends[i].record) != begin + h_.topk,
              "a token went to a rank without a route to it");
    }
    h_.send_begin.push_back(static_cast<int64_t>(h_.sends.size()));
  }

  void finish() const {
    const GatheredCounts& c = h_.counts;
    int64_t missing = 0;
    for (int e = 0; e < c.experts; ++e) missing += c.s(h_.rank, e) - kept_[idx(e)];
    require(missing == std::count(h_.dropped.begin(), h_.dropped.end(), 1), "dropped disagrees with the routes per expert");
    for (int d = 0; d < c.world; ++d) {
      const int64_t before = c.touching_before(h_.rank, d);
      const int64_t capacity_left = kept_of(before, c.d(h_.rank, d), c.capacity[idx(d)]);
      const int64_t sent = h_.layout == Layout::rank_major ? capacity_left : c.d(h_.rank, d);
      require(records_[idx(d)] == before + sent, "ids disagree with the tokens per rank");
      const bool cut = c.rows_needed(h_.layout, h_.alignment, d) > c.capacity[idx(d)];
      for (int e = h_.map.first(d); e < h_.map.first(d) + h_.map.count(d); ++e) {
        const int64_t kept = kept_[idx(e)], all = c.s(h_.rank, e);
        require(cut ? kept <= all : kept == all, "ids disagree with the routes per expert");
        if (h_.layout == Layout::rank_major) continue;
        const int64_t start = rows_[idx(e)] - kept;
        require(kept == kept_of(start, all, c.capacity[idx(d)]), "ids disagree with the capacity");
      }
    }
  }

 private:
  void keep(int64_t f, size_t first_send) {
    const int32_t id = h_.ids[idx(f)];
    const int owner = h_.map.owner(id);
    const auto send = std::find_if(h_.sends.begin() + static_cast<std::ptrdiff_t>(first_send), h_.sends.end(),
                                   [&](const SendEntry& e) { return e.rank == owner; });
    require(send != h_.sends.end(), "a token did not go to the rank of its expert");
    const int64_t row = h_.layout == Layout::rank_major ? send->record : rows_[idx(id)]++;
    ++kept_[idx(id)];
    require(keeps(row, h_.counts.capacity[idx(owner)]), "a row lies beyond the capacity");
    if (send->row < 0) send->row = static_cast<int32_t>(row);
    h_.route_row[idx(f)] = static_cast<int32_t>(row);
    h_.route_record[idx(f)] = send->record;
  }

  void drop(int64_t f, size_t first_send, int32_t record) {
    require(h_.ids[idx(f)] < 0, "a dropped route has an expert");
    if (h_.layout == Layout::rank_major) {
      require(record == -1, "a dropped rank-major route has a record");
      return;
    }
    const bool known = std::any_of(h_.sends.begin() + static_cast<std::ptrdiff_t>(first_send), h_.sends.end(),
                                   [&](const SendEntry& e) { return e.record == record; });
    require(known, "the record of a dropped route was not sent");
    h_.route_record[idx(f)] = record;
  }

  HandleData& h_;
  std::vector<int64_t> rows_;     // expert-major: next row of this rank's segment of each expert
  std::vector<int64_t> records_;  // next record at each rank
  std::vector<int64_t> kept_;     // kept routes, by expert
};

void read_owner_side(Reader& in, HandleData& h) {
  const int64_t routes = h.tokens * h.topk;
  h.ids = in.get_vector<int32_t>(routes, "ids");
  for (const int32_t id : h.ids) in_range(id, -1, h.counts.experts - 1, "an expert id");
  if (in.get_flag()) h.weights = in.get_vector<float>(routes, "weights");
  std::vector<int32_t> dropped_record;
  const bool given = in.get_flag();
  h.reports_drops = given || dropped_at_capacity(h);  // earlier versions omitted the arrays if this rank lost no route
  if (given) {
    h.dropped = in.get_vector<uint8_t>(routes, "dropped");
    require(std::all_of(h.dropped.begin(), h.dropped.end(), [](uint8_t d) { return d <= 1; }), "dropped is neither 0 nor 1");
    dropped_record = in.get_vector<int32_t>(routes, "records of dropped routes");
  } else {
    h.dropped.assign(h.reports_drops ? idx(routes) : 0, 0);
    dropped_record.assign(idx(h.reports_drops ? routes : h.topk), -1);  // without drops all tokens share one
  }
  h.route_row.assign(idx(routes), -1);
  h.route_record.assign(idx(routes), -1);
  h.send_begin.assign(1, 0);
  const auto sends_of = in.get_vector<uint8_t>(h.tokens, "sends per token");
  int64_t num_sends = 0;
  for (const uint8_t n : sends_of) num_sends += n;
  const auto send_ranks = in.get_vector<int32_t>(num_sends, "ranks of sends");
  OwnerSide owner(h);
  std::span<const int32_t> rest(send_ranks);
  for (int64_t t = 0; t < h.tokens; ++t) {
    const size_t n = sends_of[idx(t)];
    const size_t at = h.dropped.empty() ? 0 : idx(t * h.topk);
    owner.add_token(t, rest.first(n), std::span(dropped_record).subspan(at, idx(h.topk)));
    rest = rest.subspan(n);
  }
  owner.finish();
}

/// Checks one record from `source`, whose routes refer to experts (rank-major) or rows (expert-major; the rows of each segment
/// are in order).
void check_record(const HandleData& h, int64_t record, int source, const std::vector<int64_t>& starts,
                  std::vector<int64_t>& next) {
  const int local_experts = h.map.count(h.rank);
  bool any = false;
  for (int k = 0; k < h.topk; ++k) {
    const size_t at = idx(record * h.topk + k);
    const int32_t route = h.record_route[at];
    if (route < 0) {
      require(route == -1, "a route of a record is below -1");
      require(h.record_weight.empty() || h.record_weight[at] == 0.0f, "a record has a weight without a route");
      continue;
    }
    any = true;
    int local_expert = route;
    if (h.layout == Layout::expert_major) {
      require(route < h.rows, "a record's row lies beyond the rows");
      local_expert = static_cast<int>(std::upper_bound(starts.begin(), starts.end(), route) - starts.begin()) - 1;
    }
    require(local_expert >= 0 && local_expert < local_experts, "a record names an expert of another rank");
    int64_t& n = next[idx(local_expert)];
    require(n < h.counts.s(source, h.map.first(h.rank) + local_expert), "more routes arrived than were counted");
    if (h.layout == Layout::expert_major) {
      int64_t row = starts[idx(local_expert)] + n;
      for (int s = 0; s < source; ++s) row += h.counts.s(s, h.map.first(h.rank) + local_expert);
      require(route == row, "the rows of an expert are out of order");
    }
    ++n;
  }
  const bool cut = h.counts.rows_needed(h.layout, h.alignment, h.rank) > h.counts.capacity[idx(h.rank)];
  require(any || (cut && h.layout == Layout::expert_major), "a record without a route");
}

void check_records(const HandleData& h) {
  std::vector<int64_t> starts;
  h.counts.expert_first_rows(h.alignment, h.rank, starts);
  const bool cut = h.counts.rows_needed(h.layout, h.alignment, h.rank) > h.counts.capacity[idx(h.rank)];
  int64_t record = 0;
  for (int source = 0; source < h.counts.world; ++source) {
    std::vector<int64_t> next(idx(h.map.count(h.rank)), 0);
    int64_t last_token = -1;
    for (const int64_t end = std::min(record + h.counts.d(source, h.rank), h.num_records); record < end; ++record) {
      const int64_t token = h.record_token[idx(record)];
      require(token > last_token && token < h.counts.tokens[idx(source)], "the tokens of a source do not ascend");
      last_token = token;
      check_record(h, record, source, starts, next);
    }
    for (int el = 0; el < h.map.count(h.rank); ++el) {
      int64_t expected = h.counts.s(source, h.map.first(h.rank) + el);
      if (h.layout == Layout::expert_major) {
        int64_t row = starts[idx(el)];
        for (int s = 0; s < source; ++s) row += h.counts.s(s, h.map.first(h.rank) + el);
        expected = kept_of(row, expected, h.rows);
      } else if (cut) {
        continue;
      }
      require(next[idx(el)] == expected, "fewer routes arrived than were counted");
    }
  }
}

template <class T>
void require_tail(const std::vector<T>& v, int64_t begin, T value, const char* what) {
  require(std::all_of(v.begin() + begin, v.end(), [&](T x) { return x == value; }), what);
}

void read_receiver_side(Reader& in, HandleData& h) {
  place_local_rows(h);
  require(h.rows_allocated >= h.rows, "fewer rows allocated than received");
  require(h.records_allocated >= h.num_records, "fewer records allocated than received");
  const bool same = h.layout == Layout::expert_major || h.records_allocated == h.rows_allocated;
  require(same, "rank-major rows and records disagree");
  h.record_token = in.get_vector<int32_t>(h.records_allocated, "tokens of records");
  h.record_route = in.get_vector<int32_t>(h.records_allocated * h.topk, "routes of records");
  if (in.get_flag()) h.record_weight = in.get_vector<float>(h.records_allocated * h.topk, "weights of records");
  require_tail(h.record_token, h.num_records, -1, "a token beyond the records");
  require_tail(h.record_route, h.num_records * h.topk, -1, "a route beyond the records");
  if (!h.record_weight.empty()) require_tail(h.record_weight, h.num_records * h.topk, 0.0f, "a weight beyond the records");
  check_records(h);
  std::vector<int64_t> row_source;
  if (h.layout == Layout::expert_major) row_source = in.get_vector<int64_t>(h.rows_allocated, "sources of rows");
  build_receiver_side(h);
  require(row_source == h.row_source, "the sources of the rows disagree with the records");
}

}  // namespace

std::vector<std::byte> serialize(const HandleData& h) {
  Writer out;
  out.put(kMagic);
  out.put(kVersion);
  out.put(uint64_t{0});  // payload bytes, filled in below
  out.put(h.layout);
  for (const int32_t value : {h.alignment, h.counts.world, h.rank, h.topk, h.counts.experts}) out.put(value);
  for (const int64_t value : {h.max_tokens, h.tokens, h.hidden, h.rows_allocated, h.records_allocated}) out.put(value);
  out.put(h.identity);
  out.put_vector(h.counts.tokens);
  out.put_vector(h.counts.capacity);
  out.put_vector(h.counts.touching);
  out.put_vector(h.counts.routes);

  out.put_vector(h.ids);
  out.put(static_cast<uint8_t>(!h.weights.empty()));
  if (!h.weights.empty()) out.put_vector(h.weights);
  out.put(static_cast<uint8_t>(h.reports_drops));
  if (h.reports_drops) {
    std::vector<int32_t> dropped_record(h.dropped.size(), -1);
    for (size_t f = 0; f < h.dropped.size(); ++f) {
      if (h.dropped[f]) dropped_record[f] = h.route_record[f];
    }
    out.put_vector(h.dropped);
    out.put_vector(dropped_record);
  }
  std::vector<uint8_t> sends_of(idx(h.tokens));
  std::vector<int32_t> send_ranks;
  for (int64_t t = 0; t < h.tokens; ++t)
    sends_of[idx(t)] = static_cast<uint8_t>(h.send_begin[idx(t + 1)] - h.send_begin[idx(t)]);
  for (const SendEntry& send : h.sends) send_ranks.push_back(send.rank);
  out.put_vector(sends_of);
  out.put_vector(send_ranks);

  out.put_vector(h.record_token);
  out.put_vector(h.record_route);
  out.put(static_cast<uint8_t>(!h.record_weight.empty()));
  if (!h.record_weight.empty()) out.put_vector(h.record_weight);
  if (h.layout == Layout::expert_major) out.put_vector(h.row_source);

  auto& bytes = out.bytes();
  const uint64_t payload = bytes.size() - kHeadBytes;
  for (size_t i = 0; i < 8; ++i) bytes[8 + i] = static_cast<std::byte>(payload >> (8 * i));
  out.put(checksum(bytes));
  return std::move(bytes);
}

std::shared_ptr<HandleData> deserialize(std::span<const std::byte> bytes) {
  require(bytes.size() >= kHeadBytes + kChecksumBytes, "too few for a head");
  Reader head(bytes.first(kHeadBytes));
  require(head.get<uint32_t>() == kMagic, "they do not begin with the magic number of a handle");
  if (const auto version = head.get<uint32_t>(); version != kVersion) {
    reject("version " + std::to_string(version) + ", this library reads version " + std::to_string(kVersion));
  }
  const size_t payload = bytes.size() - kHeadBytes - kChecksumBytes;
  if (const auto stated = head.get<uint64_t>(); stated != payload) {
    reject("the head says " + std::to_string(stated) + " payload bytes, there are " + std::to_string(payload));
  }
  require(Reader(bytes.last(kChecksumBytes)).get<uint64_t>() == checksum(bytes.first(kHeadBytes + payload)), "wrong checksum");
  try {
    Reader in(bytes.subspan(kHeadBytes, payload));
    auto h = std::make_shared<HandleData>();
    read_shape(in, *h);
    read_counts(in, *h);
    read_owner_side(in, *h);
    read_receiver_side(in, *h);
    require(in.at_end(), "more than a handle");
    return h;
  } catch (const std::bad_alloc&) {
    reject("their sizes do not fit this machine's memory");
  }
}

}  // namespace switchyard::detail

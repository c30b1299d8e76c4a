// SPDX-License-Identifier: Apache-2.0
#include "plan/model.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "plan/loads.hpp"
#include "switchyard/group.hpp"

namespace switchyard::tool {
namespace {

constexpr double kUsPerGb = 1e-3;   ///< microseconds of a byte at 1e9 bytes per second
constexpr double kChunk = 4 << 20;  ///< crossing rows are transferred in chunks of this many bytes
constexpr int kRoundsInFlight = 3;  ///< slots of a ring of chunks
constexpr double kCountsHead = 32;  ///< bytes of a row of counts in addition to the counts

double padded(double bytes) { return std::ceil(bytes / 128) * 128; }

/// Combines the rates of a worker, of a rank with several workers, and of a host.
class Machines {
 public:
  Machines(const Topology& topology, const HostsOfRanks& where) : t_(topology), where_(where) {}

  /// Number of ranks that share the workers or GPUs of rank `r`.
  int sharing(int r) const { return t_.one_machine ? where_.world() : where_.size(where_.host_of(r)); }
  /// Ranks are distributed over the GPUs; if there are more ranks than GPUs, each rank has a fraction of a GPU.
  double workers_of(int r) const {
    if (!t_.host.on_gpus()) return std::max(1, t_.host.workers / sharing(r));
    const int on_fullest = (sharing(r) + t_.host.ranks - 1) / t_.host.ranks;
    return 1.0 / on_fullest;
  }
  /// Maximum over ranks and over hosts. `rank(r)` is the time that one worker of rank r takes; `host(r)` is the time of rank
  /// r's part when all workers are busy.
  template <class Rank, class Host>
  double slowest(Rank rank, Host host) const {
    double max = 0;
    std::vector<double> hosts(static_cast<size_t>(where_.hosts()));
    for (int r = 0; r < where_.world(); ++r) {
      max = std::max(max, rank(r) / workers_of(r));
      hosts[t_.one_machine ? 0 : static_cast<size_t>(where_.host_of(r))] += host(r);
    }
    return std::max(max, *std::max_element(hosts.begin(), hosts.end()));
  }
  /// The same for times of workers that do not slow each other down.
  template <class Rank>
  double slowest(Rank rank) const {
    return slowest(rank, [&](int r) { return t_.host.on_gpus() ? 0.0 : rank(r) / t_.host.workers; });
  }

  double move_us(const MoveRate& rate, const MemoryLoad& load) const {
    const auto at = [&](double read_gbs, double write_gbs) {
      return [&load, read_gbs, write_gbs](int r) {
        const auto i = static_cast<size_t>(r);
        return kUsPerGb * (load.read[i] / read_gbs + load.write[i] / write_gbs);
      };
    };
    const auto alone = at(rate.read_gbs, rate.write_gbs);
    const double us = rate.host_read_gbs > 0 ? slowest(alone, at(rate.host_read_gbs, rate.host_write_gbs)) : slowest(alone);
    return us > 0 ? us + rate.start_us : 0;
  }
  double rate_us(const std::vector<double>& bytes, double gbs, double host_gbs) const {
    const auto at = [&](double rate) {
      return [&bytes, rate](int r) { return kUsPerGb * bytes[static_cast<size_t>(r)] / rate; };
    };
    return host_gbs > 0 ? slowest(at(gbs), at(host_gbs)) : slowest(at(gbs));
  }
  double links_us(const CallLoads& loads, double gbs) const {
    return std::max(rate_us(loads.link_out, gbs, 0), rate_us(loads.link_in, gbs, 0));
  }

 private:
  const Topology& t_;
  const HostsOfRanks& where_;
};

/// Number of bytes sent to one other rank at a time.
double message_of(const CallLoads& loads, const PlanBytes& bytes) {
  return loads.peers > 0 ? std::min(kChunk, bytes.network_out / loads.peers) : 0;
}

/// Maximum over the times of the rails, the hosts, and the middle of the network.
double network_us(const Topology& t, const HostsOfRanks& where, const CallLoads& loads, const PlanBytes& bytes) {
  if (bytes.network_all == 0) return 0;
  const NetworkTopology& n = t.network;
  const double message = message_of(loads, bytes);
  const double gbs = message > 0 ? message / (message / n.gbs + n.post_us / kUsPerGb / kRoundsInFlight) : n.gbs;
  const double host_gbs = n.host_gbs > 0 ? n.host_gbs : n.rails * n.gbs;
  double max = 0;
  for (int h = 0; h < where.hosts(); ++h) {
    std::vector<double> out(static_cast<size_t>(n.rails)), in(out.size());
    for (int r = where.first(h); r < where.first(h + 1); ++r) {
      const auto rail = static_cast<size_t>(where.rail(r) % n.rails), i = static_cast<size_t>(r);
      out[rail] += loads.net_out[i];
      in[rail] += loads.net_in[i];
    }
    for (size_t rail = 0; rail < out.size(); ++rail) max = std::max({max, out[rail] / gbs, in[rail] / gbs});
    if (!t.one_machine) max = std::max(max, std::accumulate(out.begin(), out.end(), 0.0) / host_gbs);
  }
  if (t.one_machine) return kUsPerGb * std::max(max, bytes.network_all / host_gbs);
  const double hosts = where.hosts();
  const double across = bytes.network_all * hosts / (4 * (hosts - 1));  // one way, with equal traffic of all pairs of hosts
  return kUsPerGb * std::max(max, across / (n.bisection * hosts / 2 * host_gbs));
}

/// Time of `rounds` rounds of small messages for counts and placements.
double counts_us(const Topology& t, const PlanShape& shape, const HostsOfRanks& where, Variant variant, int rounds) {
  if (where.hosts() == 1) return 0;  // already part of a call that moves nothing
  const double row = kCountsHead + 4.0 * (where.world() + shape.experts + where.hosts());
  const double peers = is_flat(variant) ? where.world() - where.max_host_size() : where.hosts() - 1;
  const double written = is_flat(variant) ? 0 : row * where.hosts() * (where.max_host_size() - 1);  // by proxies, to their host
  return rounds * (t.network.us + t.network.post_us) + kUsPerGb * (row * peers / t.network.gbs + written / t.host.link_gbs) +
         (is_flat(variant) ? 0 : t.host.link_us);
}

double plan_us(const Topology& t, const PlanShape& shape, const Traffic& traffic, Variant variant) {
  const HostsOfRanks& where = traffic.where();
  const auto rank = [&](int r) {
    double records = 0;
    for (int s = 0; s < where.world(); ++s)
      records += variant == Variant::flat_per_route ? traffic.routes(s, r) : traffic.pairs(s, r);
    return 1e-3 * shape.topk * (static_cast<double>(shape.tokens) * t.host.route_ns + records * t.host.record_read_ns);
  };
  const Machines machines(t, where);
  // Planning takes one thread per rank, regardless of the number of workers.
  return machines.slowest([&](int r) { return rank(r) * machines.workers_of(r); },
                          [&](int r) { return t.host.on_gpus() ? 0 : rank(r) / t.host.workers; });
}

/// Additional time that workers take to write records along with rows.
double records_us(const Topology& t, const PlanShape& shape, const HostsOfRanks& where, const CallLoads& loads) {
  const double ns = shape.topk * t.host.record_write_ns;
  return Machines(t, where).slowest([&](int r) { return 1e-3 * ns * loads.records[static_cast<size_t>(r)]; });
}

/// Time until the first chunk has crossed plus the time after the last one has crossed; all other chunks overlap with the
/// longest phase.
double fill_us(const Topology& t, const CallLoads& loads, const PlanBytes& bytes) {
  const double chunk = message_of(loads, bytes);
  if (chunk == 0) return 0;
  const MoveRate& copy = t.host.copy;
  const double in_memory = chunk * (1 / t.host.link_gbs + 1 / copy.read_gbs + 1 / copy.write_gbs);
  return t.network.us + (t.host.on_gpus() ? kUsPerGb * in_memory : 0);
}

/// Time of a call that moves nothing, with the same number of ranks.
double empty_us(const Topology& t, const HostsOfRanks& where, const std::vector<double>& times) {
  const double wake = Machines(t, where).workers_of(0) > 1 ? t.host.wake_us : 0;
  return wake + call_us(t.host, times, t.one_machine ? where.world() : where.max_host_size());
}

void add(CallPrediction& call, const char* name, double us, bool overlaps) {
  if (us > 0) call.phases.push_back({name, us, overlaps});
}

/// Adds the phases that move rows, and the sum of all phases.
void finish(CallPrediction& call, const Topology& t, const HostsOfRanks& where, const CallLoads& loads, double link_gbs,
            double link_start_us) {
  const Machines machines(t, where);
  const bool overlaps = t.host.on_gpus();
  call.bytes = loads.bytes(where);
  const double memory = machines.move_us(t.host.copy, loads.copy) + machines.move_us(t.host.sum, loads.sum);
  const double links = machines.links_us(loads, link_gbs);
  add(call, "quantise", machines.rate_us(loads.quantize, t.host.quantize_gbs, t.host.host_quantize_gbs), overlaps);
  // On a CPU, the same threads do all of the work, and writes to other ranks are already included in the written bytes.
  add(call, "memory", overlaps || memory >= links ? memory : 0, overlaps);
  add(call, "links", !overlaps ? (links > memory ? links : 0) : links > 0 ? links + link_start_us : 0, overlaps);
  add(call, "network", network_us(t, where, loads, call.bytes), overlaps);
  add(call, "fill", fill_us(t, loads, call.bytes), false);
  double longest = 0, max = 0;
  for (const PlanPhase& phase : call.phases) {
    if (phase.overlaps)
      longest = std::max(longest, phase.us);
    else
      call.us += phase.us;
    if (phase.us > max) call.bottleneck = phase.name;
    max = std::max(max, phase.us);
  }
  call.us += longest;
}

NormalConfig config_of(const PlanShape& shape) {
  NormalConfig c;
  c.hidden = shape.hidden;
  c.num_experts = shape.experts;
  c.topk = shape.topk;
  c.max_tokens = shape.tokens;
  c.dtype = shape.rows.result_type();
  return c;
}

/// See docs/design/0055-several-hosts.md: for each other host, there are rings of three chunks in each direction, plus an inbox
/// for a whole combine.
double network_memory(const PlanShape& shape, const HostsOfRanks& where, Variant variant) {
  if (where.hosts() == 1) return 0;
  const double hosts = where.hosts() - 1, tokens = static_cast<double>(shape.tokens), row = shape.returned_row();
  const double others = where.world() - where.max_host_size();
  const double rows_back = variant == Variant::per_host         ? std::min<double>(hosts, shape.topk)
                           : variant == Variant::flat_per_route ? shape.topk
                                                                : std::min<double>(others, shape.topk);
  const double inbox = tokens * rows_back * row;
  if (is_flat(variant))
    return tokens * std::min<double>(shape.topk, variant == Variant::flat_per_route ? shape.topk : others) * shape.sent_row() +
           inbox;
  const double slot = shape.slot(where.max_host_size()),
               rows = std::clamp(std::floor(kChunk / slot), 1.0, std::max(1.0, tokens));
  return 2 * kRoundsInFlight * hosts * rows * slot + inbox;
}

}  // namespace

const char* to_string(Variant variant) {
  switch (variant) {
    case Variant::flat_per_route: return "flat_per_route";
    case Variant::flat_per_rank: return "flat_per_rank";
    case Variant::hierarchical: return "hierarchical";
    case Variant::per_host: return "per_host";
  }
  return "";
}

bool is_flat(Variant variant) { return variant == Variant::flat_per_route || variant == Variant::flat_per_rank; }

double PlanShape::source_row() const {
  return static_cast<double>(dtype_bytes(rows.type, hidden) + scale_row_bytes(hidden, rows.scales));
}
double PlanShape::sent_row() const {
  if (quantize == ScaleKind::none) return source_row();
  return static_cast<double>(dtype_bytes(DType::fp8_e4m3, hidden) + scale_row_bytes(hidden, quantize));
}
double PlanShape::returned_row() const { return static_cast<double>(dtype_bytes(rows.result_type(), hidden)); }
double PlanShape::slot(int max_host_size) const {
  const ScaleKind scales = quantize != ScaleKind::none ? quantize : rows.scales;
  const auto scale_bytes = static_cast<double>(scale_row_bytes(hidden, scales));
  return padded(16.0 + 12 * std::min(topk, max_host_size) + 8 * topk) + padded(sent_row() - scale_bytes) + padded(scale_bytes);
}

double call_us(const HostTopology& host, const std::vector<double>& times, int ranks) {
  size_t i = 0;
  while (i + 1 < times.size() && host.call_ranks[i + 1] <= ranks) ++i;
  if (i + 1 == times.size() || host.call_ranks[i] >= ranks) return times[i];
  const double from = host.call_ranks[i], to = host.call_ranks[i + 1];
  return times[i] + (times[i + 1] - times[i]) * std::log(ranks / from) / std::log(to / from);
}

MemoryRequirement memory_for(const NormalConfig& config, int world, Backend backend) {
  if (world <= kMaxRanks) return NormalExchange::memory_required(config, world, backend);
  const double x[] = {kMaxRanks / 4.0, kMaxRanks / 2.0, kMaxRanks * 1.0}, w = world;
  const auto at = [&](size_t i) { return NormalExchange::memory_required(config, static_cast<int>(x[i]), backend); };
  const MemoryRequirement known[] = {at(0), at(1), at(2)};
  MemoryRequirement out;
  for (auto part : {&MemoryRequirement::control_bytes, &MemoryRequirement::pool_bytes, &MemoryRequirement::ring_bytes,
                    &MemoryRequirement::private_bytes}) {
    double sum = 0;
    for (size_t i = 0; i < 3; ++i) {
      const double a = x[(i + 1) % 3], b = x[(i + 2) % 3];
      sum += static_cast<double>(known[i].*part) * (w - a) * (w - b) / ((x[i] - a) * (x[i] - b));
    }
    out.*part = static_cast<size_t>(std::llround(std::max(0.0, sum)));
  }
  return out;
}

Prediction predict(const Topology& t, const PlanShape& shape, const Traffic& traffic, Variant variant) {
  const HostsOfRanks& where = traffic.where();
  Prediction p{variant, {}, {}, {}};
  add(p.dispatch, "call", empty_us(t, where, t.host.dispatch_us), false);
  add(p.dispatch, "counts", counts_us(t, shape, where, variant, 2), false);
  add(p.dispatch, "plan", plan_us(t, shape, traffic, variant), false);
  const CallLoads out = dispatch_loads(shape, traffic, variant);
  add(p.dispatch, "records", records_us(t, shape, where, out), false);
  finish(p.dispatch, t, where, out, t.host.link_gbs, t.host.copy.start_us);
  add(p.combine, "call", empty_us(t, where, t.host.combine_us), false);
  add(p.combine, "counts", where.hosts() > 1 ? t.network.us + t.network.post_us : 0, false);
  finish(p.combine, t, where, combine_loads(shape, traffic, variant), t.host.link_read_gbs, t.host.sum.start_us);
  p.memory.heap = memory_for(config_of(shape), where.world(), t.host.on_gpus() ? Backend::cuda : Backend::cpu);
  p.memory.continued = where.world() > kMaxRanks;
  p.memory.network = network_memory(shape, where, variant);
  return p;
}

}  // namespace switchyard::tool

// SPDX-License-Identifier: Apache-2.0
#include "plan/loads.hpp"

#include <algorithm>
#include <numeric>

namespace switchyard::tool {
namespace {

size_t idx(int i) { return static_cast<size_t>(i); }

/// Number of rows from `source` that `dest` receives (or returns).
double rows_between(const Traffic& traffic, Variant variant, int source, int dest) {
  return variant == Variant::flat_per_route ? traffic.routes(source, dest) : traffic.pairs(source, dest);
}

/// Adds the rows of `source` for the ranks of `host`, written by `writer`, which is one of those ranks.
void deliver(CallLoads& loads, const Traffic& traffic, Variant variant, int source, int writer, int host, double row) {
  const HostsOfRanks& where = traffic.where();
  for (int d = where.first(host); d < where.first(host + 1); ++d) {
    const double rows = rows_between(traffic, variant, source, d), bytes = row * rows;
    loads.records[idx(writer)] += rows;
    loads.copy.write[idx(writer)] += bytes;
    if (d == writer) continue;
    loads.link_out[idx(writer)] += bytes;
    loads.link_in[idx(d)] += bytes;
  }
}

/// Rows of owner `owner` on the ranks of `host`, read by `reader`, one of those ranks. \returns bytes
double collect(CallLoads& loads, const Traffic& traffic, Variant variant, int owner, int reader, int host, double row) {
  const HostsOfRanks& where = traffic.where();
  double all = 0;
  for (int d = where.first(host); d < where.first(host + 1); ++d) {
    const double bytes = row * rows_between(traffic, variant, owner, d);
    all += bytes;
    if (d == reader) continue;
    loads.link_out[idx(d)] += bytes;
    loads.link_in[idx(reader)] += bytes;
  }
  return all;
}

void cross(CallLoads& loads, int from, int to, double bytes) {
  loads.net_out[idx(from)] += bytes;
  loads.net_in[idx(to)] += bytes;
}

double max_of(const std::vector<double>& values) { return *std::max_element(values.begin(), values.end()); }

double peers_of(const HostsOfRanks& where, Variant variant) {
  if (!is_flat(variant)) return where.hosts() - 1;
  int min_host_size = where.world();
  for (int h = 0; h < where.hosts(); ++h) min_host_size = std::min(min_host_size, where.size(h));
  return where.world() - min_host_size;
}

/// Adds the rows that `source` sends to one other host.
void send_to_host(CallLoads& loads, const PlanShape& shape, const Traffic& traffic, Variant variant, int source, int host) {
  const HostsOfRanks& where = traffic.where();
  if (is_flat(variant)) {
    for (int d = where.first(host); d < where.first(host + 1); ++d) {
      const double rows = rows_between(traffic, variant, source, d), bytes = shape.sent_row() * rows;
      loads.records[idx(source)] += rows;
      loads.copy.write[idx(source)] += bytes;
      cross(loads, source, d, bytes);
    }
    return;
  }
  const double slots = traffic.tokens_to(source, host) * shape.slot(where.max_host_size());
  const int proxy = where.proxy(source, host);
  loads.copy.write[idx(source)] += slots;
  cross(loads, source, proxy, slots);
  loads.copy.read[idx(proxy)] += slots;
  deliver(loads, traffic, variant, source, proxy, host, shape.sent_row());
}

/// Adds the rows that `owner` receives from one other host.
void return_from_host(CallLoads& loads, const PlanShape& shape, const Traffic& traffic, Variant variant, int owner, int host) {
  const HostsOfRanks& where = traffic.where();
  const double row = shape.returned_row();
  if (is_flat(variant)) {
    for (int d = where.first(host); d < where.first(host + 1); ++d) {
      const double bytes = row * rows_between(traffic, variant, owner, d);
      loads.copy.read[idx(d)] += bytes;
      loads.copy.write[idx(d)] += bytes;
      loads.sum.read[idx(owner)] += bytes;
      cross(loads, d, owner, bytes);
    }
    return;
  }
  const int proxy = where.proxy(owner, host);
  const double read = collect(loads, traffic, variant, owner, proxy, host, row);
  const bool sums = variant == Variant::per_host;
  const double sent = sums ? row * traffic.tokens_to(owner, host) : read;
  MemoryLoad& load = sums ? loads.sum : loads.copy;
  load.read[idx(proxy)] += read;
  load.write[idx(proxy)] += sent;
  cross(loads, proxy, owner, sent);
  loads.sum.read[idx(owner)] += sent;
}

}  // namespace

CallLoads::CallLoads(int world) {
  for (std::vector<double>* list :
       {&copy.read, &copy.write, &sum.read, &sum.write, &quantize, &link_out, &link_in, &net_out, &net_in, &records})
    list->assign(idx(world), 0);
}

PlanBytes CallLoads::bytes(const HostsOfRanks& where) const {
  PlanBytes b;
  b.network_out = max_of(net_out);
  b.network_in = max_of(net_in);
  b.link_out = max_of(link_out);
  b.link_in = max_of(link_in);
  for (size_t r = 0; r < net_out.size(); ++r)
    b.memory = std::max(b.memory, copy.read[r] + copy.write[r] + sum.read[r] + sum.write[r]);
  for (int h = 0; h < where.hosts(); ++h)
    b.network_host =
        std::max(b.network_host, std::accumulate(net_out.begin() + where.first(h), net_out.begin() + where.first(h + 1), 0.0));
  b.network_all = std::accumulate(net_out.begin(), net_out.end(), 0.0);
  return b;
}

CallLoads dispatch_loads(const PlanShape& shape, const Traffic& traffic, Variant variant) {
  const HostsOfRanks& where = traffic.where();
  CallLoads loads(where.world());
  loads.peers = peers_of(where, variant);
  const bool quantises = shape.quantize != ScaleKind::none;
  for (int s = 0; s < where.world(); ++s) {
    const int own = where.host_of(s);
    double remote = 0;  // tokens, once per host
    for (int h = 0; h < where.hosts(); ++h) {
      if (h == own) continue;
      remote += traffic.tokens_to(s, h);
      send_to_host(loads, shape, traffic, variant, s, h);
    }
    deliver(loads, traffic, variant, s, s, own, shape.sent_row());
    // A token is read (and quantized) once for its own host and once for each other host, because a row that crosses is created
    // in its slot. In a flat exchange, the row is created once for all other hosts. Quantized rows are then in a cache.
    const double read = traffic.tokens_to(s, own) + (is_flat(variant) ? std::min(remote, traffic.tokens(s)) : remote);
    (quantises ? loads.quantize : loads.copy.read)[idx(s)] += shape.source_row() * read;
  }
  return loads;
}

CallLoads combine_loads(const PlanShape& shape, const Traffic& traffic, Variant variant) {
  const HostsOfRanks& where = traffic.where();
  CallLoads loads(where.world());
  loads.peers = peers_of(where, variant);
  const double row = shape.returned_row();
  for (int s = 0; s < where.world(); ++s) {
    const int own = where.host_of(s);
    for (int h = 0; h < where.hosts(); ++h)
      if (h != own) return_from_host(loads, shape, traffic, variant, s, h);
    loads.sum.read[idx(s)] += collect(loads, traffic, variant, s, s, own, row);
    loads.sum.write[idx(s)] += row * static_cast<double>(shape.tokens);
    if (variant != Variant::per_host || where.hosts() == 1) continue;
    const double own_sums = row * traffic.tokens_to(s, own);  // computed first; sums of other hosts are added to it
    loads.sum.write[idx(s)] += own_sums;
    loads.sum.read[idx(s)] += own_sums;
  }
  return loads;
}

}  // namespace switchyard::tool

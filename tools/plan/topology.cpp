// SPDX-License-Identifier: Apache-2.0
#include "plan/topology.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "cli/json_input.hpp"
#include "cli/words.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

constexpr const char* kFormat = "switchyard-topology";
constexpr int kVersion = 1;
constexpr int kMaxRanksPerHost = 64, kMaxHosts = 2048;

/// An object in the file, whose fields are read by name; unread fields are errors.
class Fields {
 public:
  Fields(const json& object, std::string path) : object_(object), path_(std::move(path)) {
    if (!object_.is_object()) fail("", "is not an object");
  }

  [[noreturn]] void fail(const std::string& name, const std::string& what) const {
    const std::string field = path_ + (path_.empty() || name.empty() ? "" : ".") + name;
    throw std::runtime_error((field.empty() ? "the document " : field + " ") + what);
  }
  bool has(const std::string& name) {
    known_.push_back(name);
    return object_.contains(name) && !object_.at(name).is_null();
  }
  const json& at(const std::string& name) {
    if (!has(name)) fail(name, "is missing");
    return object_.at(name);
  }
  Fields inner(const std::string& name) { return {at(name), path_ + (path_.empty() ? "" : ".") + name}; }
  std::string text(const std::string& name) {
    const json& value = at(name);
    if (!value.is_string() || value.get<std::string>().empty()) fail(name, fmt::format("is {}; allowed: a text", value.dump()));
    return value;
  }
  int integer(const std::string& name, int min, int max) { return integer_of(name, at(name), min, max); }
  int integer_of(const std::string& name, const json& value, int min, int max) const {
    const bool whole = value.is_number_integer() && value.get<int64_t>() >= min && value.get<int64_t>() <= max;
    if (!whole) fail(name, fmt::format("is {}; allowed: {} to {}", value.dump(), min, max));
    return value.get<int>();
  }
  /// A finite number greater than `above`.
  double number(const std::string& name, double above) {
    const json& value = at(name);
    return number_of(name, value, above);
  }
  double number_of(const std::string& name, const json& value, double above) const {
    const bool good = value.is_number() && std::isfinite(value.get<double>()) && value.get<double>() > above;
    if (!good) fail(name, fmt::format("is {}; allowed: a number {}", value.dump(), above < 0 ? "of at least 0" : "above 0"));
    return value.get<double>();
  }
  /// A non-empty list.
  const json& array(const std::string& name) {
    const json& value = at(name);
    if (!value.is_array() || value.empty()) fail(name, fmt::format("is {}; allowed: a list", value.dump()));
    return value;
  }
  bool truth(const std::string& name) {
    const json& value = at(name);
    if (!value.is_boolean()) fail(name, fmt::format("is {}; allowed: true or false", value.dump()));
    return value.get<bool>();
  }
  double rate(const std::string& name) { return number(name, 0); }
  double rate_or_none(const std::string& name) { return has(name) ? rate(name) : 0; }
  double time(const std::string& name) { return number(name, kNotNegative); }
  double time_or_none(const std::string& name) { return has(name) ? time(name) : 0; }

  void refuse_unknown_keys() const {
    for (const auto& [name, value] : object_.items())
      if (std::find(known_.begin(), known_.end(), name) == known_.end())
        fail(name, fmt::format("is not known; allowed: {}.{}", joined(known_, ", "), did_you_mean(name, known_)));
  }

 private:
  static constexpr double kNotNegative = -1e-300;
  const json& object_;
  std::string path_;
  std::vector<std::string> known_;
};

MoveRate move_rate(Fields f) {
  MoveRate rate;
  rate.start_us = f.time_or_none("start_us");
  rate.read_gbs = f.rate("read_gbs");
  rate.write_gbs = f.rate("write_gbs");
  rate.host_read_gbs = f.rate_or_none("host_read_gbs");
  rate.host_write_gbs = f.rate_or_none("host_write_gbs");
  if ((rate.host_read_gbs > 0) != (rate.host_write_gbs > 0)) f.fail("", "has one of host_read_gbs and host_write_gbs");
  f.refuse_unknown_keys();
  return rate;
}

void read_calls(Fields f, HostTopology& host) {
  for (const json& ranks : f.array("ranks")) {
    const int min = host.call_ranks.empty() ? 1 : host.call_ranks.back() + 1;
    host.call_ranks.push_back(f.integer_of("ranks", ranks, min, kMaxRanksPerHost));
  }
  const auto times = [&](const char* name, std::vector<double>& out) {
    for (const json& us : f.array(name)) out.push_back(f.number_of(name, us, 0));
    if (out.size() != host.call_ranks.size())
      f.fail(name, fmt::format("has {} times; allowed: {}, one for each number of ranks", out.size(), host.call_ranks.size()));
  };
  times("dispatch_us", host.dispatch_us);
  times("combine_us", host.combine_us);
  f.refuse_unknown_keys();
}

HostTopology host_from(Fields f) {
  HostTopology host;
  host.ranks = f.integer("ranks", 1, kMaxRanksPerHost);
  host.workers = f.has("workers") ? f.integer("workers", 1, 4096) : 0;
  host.copy = move_rate(f.inner("copy"));
  host.sum = move_rate(f.inner("sum"));
  host.quantize_gbs = f.rate("quantize_gbs");
  host.host_quantize_gbs = f.rate_or_none("host_quantize_gbs");
  host.link_gbs = f.rate("link_gbs");
  host.link_read_gbs = f.has("link_read_gbs") ? f.rate("link_read_gbs") : host.link_gbs;
  host.link_us = f.time("link_us");
  host.wake_us = f.time_or_none("wake_us");
  read_calls(f.inner("calls"), host);
  host.route_ns = f.time_or_none("route_ns");
  host.record_write_ns = f.time_or_none("record_write_ns");
  host.record_read_ns = f.time_or_none("record_read_ns");
  f.refuse_unknown_keys();
  return host;
}

NetworkTopology network_from(Fields f) {
  NetworkTopology network;
  network.rails = f.integer("rails", 1, kMaxRanksPerHost);
  network.gbs = f.rate("gbs");
  network.us = f.time("us");
  network.post_us = f.time_or_none("post_us");
  network.host_gbs = f.rate_or_none("host_gbs");
  if (f.has("bisection")) network.bisection = f.rate("bisection");
  if (network.bisection > 1) f.fail("bisection", fmt::format("is {}; allowed: above 0, at most 1", network.bisection));
  f.refuse_unknown_keys();
  return network;
}

/// Either a number of hosts or a list with the number of ranks on each host.
std::vector<int> hosts_from(Fields& f, const HostTopology& host) {
  const json& value = f.at("hosts");
  if (!value.is_array()) return std::vector<int>(static_cast<size_t>(f.integer("hosts", 1, kMaxHosts)), host.ranks);
  std::vector<int> hosts;
  for (const json& ranks : f.array("hosts")) hosts.push_back(f.integer_of("hosts", ranks, 1, host.ranks));
  return hosts;
}

json rate_json(const MoveRate& rate) {
  json out = {{"start_us", rate.start_us}, {"read_gbs", rate.read_gbs}, {"write_gbs", rate.write_gbs}};
  if (rate.host_read_gbs > 0) {
    out["host_read_gbs"] = rate.host_read_gbs;
    out["host_write_gbs"] = rate.host_write_gbs;
  }
  return out;
}

json host_json(const HostTopology& host) {
  json out = {{"ranks", host.ranks},
              {"copy", rate_json(host.copy)},
              {"sum", rate_json(host.sum)},
              {"quantize_gbs", host.quantize_gbs},
              {"link_gbs", host.link_gbs},
              {"link_read_gbs", host.link_read_gbs},
              {"link_us", host.link_us},
              {"calls", {{"ranks", host.call_ranks}, {"dispatch_us", host.dispatch_us}, {"combine_us", host.combine_us}}},
              {"route_ns", host.route_ns},
              {"record_write_ns", host.record_write_ns},
              {"record_read_ns", host.record_read_ns}};
  if (host.workers > 0) out["workers"] = host.workers;
  if (host.wake_us > 0) out["wake_us"] = host.wake_us;
  if (host.host_quantize_gbs > 0) out["host_quantize_gbs"] = host.host_quantize_gbs;
  return out;
}

}  // namespace

int Topology::max_ranks() const { return std::accumulate(hosts.begin(), hosts.end(), 0); }

Topology topology_from(const json& document) {
  Fields f(document, "");
  Topology t;
  if (!document.contains("format") || document.at("format") != kFormat)
    f.fail("format", fmt::format("is {}; allowed: \"{}\"", document.value("format", json()).dump(), kFormat));
  (void)f.text("format");
  (void)f.integer("version", kVersion, kVersion);
  t.name = f.text("name");
  t.source = f.text("source");
  t.host = host_from(f.inner("host"));
  t.hosts = hosts_from(f, t.host);
  t.has_network = f.has("network");
  if (t.has_network) t.network = network_from(f.inner("network"));
  if (t.hosts.size() > 1 && !t.has_network)
    f.fail("network", fmt::format("is missing, and there are {} hosts", t.hosts.size()));
  t.one_machine = f.has("one_machine") && f.truth("one_machine");
  (void)f.has("measured");  // measurement methods, for human readers
  f.refuse_unknown_keys();
  return t;
}

Topology read_topology(const std::string& path) {
  const InputFile file{"TOPOLOGY", path, "a file that `doctor --measure` wrote, or one of data/topologies"};
  const json document = read_json(file);
  try {
    return topology_from(document);
  } catch (const std::exception& e) {
    refuse(file, std::string("is not a topology: ") + e.what());
  }
}

json to_json(const Topology& t) {
  const bool equal = std::all_of(t.hosts.begin(), t.hosts.end(), [&](int ranks) { return ranks == t.host.ranks; });
  json out = {{"format", kFormat}, {"version", kVersion}, {"name", t.name}, {"source", t.source}, {"host", host_json(t.host)}};
  out["hosts"] = equal ? json(t.hosts.size()) : json(t.hosts);
  if (t.one_machine) out["one_machine"] = true;
  if (!t.has_network) return out;
  const NetworkTopology& n = t.network;
  out["network"] = {{"rails", n.rails}, {"gbs", n.gbs}, {"us", n.us}, {"post_us", n.post_us}, {"bisection", n.bisection}};
  if (n.host_gbs > 0) out["network"]["host_gbs"] = n.host_gbs;
  return out;
}

}  // namespace switchyard::tool

// SPDX-License-Identifier: Apache-2.0
#include "run/in_child.hpp"

#include <fmt/core.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "launch/forked_ranks.hpp"

namespace switchyard::tool {

using nlohmann::json;

json run_in_child(const std::function<json()>& body) {
  const auto answer = [&](launch::ChildRank& me) {
    const std::vector<uint8_t> bytes = json::to_cbor(body());
    me.say({bytes.begin(), bytes.end()});
  };
  const launch::RankEnd end = launch::run_ranks(1, answer, launch::kNoDeadline).front();
  if (!end.error.empty()) throw std::runtime_error(end.error);
  if (end.signal != 0)
    throw std::runtime_error(fmt::format("the process was ended by signal {} ({})", end.signal, strsignal(end.signal)));
  if (end.said.empty()) throw std::runtime_error("the process ended without an answer");
  return json::from_cbor(end.said.front());
}

}  // namespace switchyard::tool

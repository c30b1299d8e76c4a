// SPDX-License-Identifier: Apache-2.0
// doctor's findings about environment variables.
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "cli/words.hpp"
#include "doctor/doctor.hpp"
#include "switchyard/group.hpp"
#include "switchyard/status.hpp"

extern char** environ;

namespace switchyard::tool {
namespace {

constexpr std::string_view kOwn = "SWITCHYARD_";

/// Variables read by the library, this tool and the Python package, without the SWITCHYARD_ prefix.
const std::vector<std::string> kKnown = {
    "RANK",    "WORLD_SIZE", "STORE",         "JOB_TOKEN", "TUNING",          "CUDA_HEAP", "DATA_DIR", "HOST",  "NETWORK",
    "NUM_SMS", "LIBRARY",    "LAYER_LIBRARY", "DEEP_EP",   "DEEP_EP_BACKEND", "VLLM",      "SGLANG",   "PYTHON"};
/// Variables read only by the project's scripts and tests, except those that begin with TEST_.
const std::vector<std::string> kOfDevelopers = {"WERROR",       "SEED",         "RANDOM_CALLS", "RANDOM_EXCHANGES",
                                                "QUEUED_CALLS", "GPU_OPTIONAL", "BUNDLE_GPU"};
/// Each of these variables requests a rank in a group.
constexpr const char* kRankVariables[] = {"SWITCHYARD_RANK",      "SWITCHYARD_WORLD_SIZE", "RANK",        "WORLD_SIZE",
                                          "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",  "SLURM_PROCID"};

bool contains(const std::vector<std::string>& all, const std::string& one) {
  return std::find(all.begin(), all.end(), one) != all.end();
}

bool is_set(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0';
}

/// The rank that Group::from_environment would assign to this process.
Finding rank_finding() {
  Finding f{"Environment", "rank of a group", Verdict::ok, "", "", ""};
  try {
    const Membership me = Group::find_in_environment();
    f.value = fmt::format("rank {} of {}{}", me.rank, me.world, me.store.empty() ? "" : ", meeting at " + me.store);
  } catch (const Error& error) {
    const bool asked = std::any_of(std::begin(kRankVariables), std::end(kRankVariables), is_set);
    f.verdict = asked ? Verdict::limited : Verdict::note;
    f.value =
        asked ? "refused by Group::from_environment" : "none: no variables of SWITCHYARD_RANK, torchrun, Open MPI or Slurm";
    f.reason =
        asked ? error.what() : "Group::from_environment would refuse; the verbs of this tool start their ranks themselves";
    if (asked)
      f.action =
          "set the missing variables, or unset those that a launcher has left; the verbs of this tool start their ranks "
          "themselves";
  }
  return f;
}

bool shown(const std::string& name) {
  const std::vector<std::string> prefixes = {std::string(kOwn), "OMPI_COMM_WORLD_", "OMP_",         "DNNL_", "ONEDNN_",
                                             "CUDA_VISIBLE_",   "SLURM_PROCID",     "SLURM_NTASKS", "NCCL_"};
  const std::vector<std::string> torchrun = {"RANK",        "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
                                             "MASTER_ADDR", "MASTER_PORT"};
  return contains(torchrun, name) ||
         std::any_of(prefixes.begin(), prefixes.end(), [&](const std::string& p) { return name.rfind(p, 0) == 0; });
}

Finding variable_finding(const std::string& name, const std::string& value) {
  const bool secret = name.find("TOKEN") != std::string::npos;
  Finding f{"Environment", name, Verdict::note, secret && !value.empty() ? "(set, not shown)" : value, "", ""};
  if (name.rfind(kOwn, 0) != 0) return f;
  const std::string rest = name.substr(kOwn.size());
  if (contains(kKnown, rest) || contains(kOfDevelopers, rest) || rest.rfind("TEST_", 0) == 0) return f;
  f.verdict = Verdict::limited;
  f.reason = "neither the library, this tool nor the Python package reads it";
  const std::string meant = closest(rest, kKnown);
  f.action = meant.empty() ? fmt::format("unset it; known: {}{}", kOwn, joined(kKnown, fmt::format(", {}", kOwn)))
                           : fmt::format("did you mean {}{}?", kOwn, meant);
  return f;
}

}  // namespace

std::vector<Finding> check_environment() {
  std::vector<Finding> out;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const std::string name = text.substr(0, text.find('='));
    if (shown(name)) out.push_back(variable_finding(name, text.substr(std::min(text.size(), name.size() + 1))));
  }
  std::sort(out.begin(), out.end(), [](const Finding& a, const Finding& b) { return a.name < b.name; });
  out.insert(out.begin(), rank_finding());
  return out;
}

}  // namespace switchyard::tool

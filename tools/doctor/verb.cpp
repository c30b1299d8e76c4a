// SPDX-License-Identifier: Apache-2.0
// The options of `switchyard doctor`.
#include <memory>

#include "cli/options.hpp"
#include "cli/verb.hpp"
#include "doctor/doctor.hpp"

namespace switchyard::tool {
namespace {

void declare(Options& add, DoctorOptions& o) {
  add.json_output(o.json, "All findings as JSON on stdout");
  add.footer(
      "\nEach line says ok, limited or no; for the last two, why and what to do. '-' marks information.\n"
      "Exit status 1: something that the CPU backend needs is missing.\n");
}

VerbRun add(Options& options) {
  const auto o = std::make_shared<DoctorOptions>();
  declare(options, *o);
  return [o] { return run_doctor(*o); };
}

}  // namespace

const Verb kDoctorVerb{"doctor", "Say what this machine can do and, where not, why and what to do", add};

}  // namespace switchyard::tool

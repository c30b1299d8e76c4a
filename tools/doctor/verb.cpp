// SPDX-License-Identifier: Apache-2.0
// The options of `switchyard doctor`.
#include <memory>
#include <string>
#include <utility>

#include "cli/options.hpp"
#include "cli/verb.hpp"
#include "doctor/doctor.hpp"
#include "doctor/measure.hpp"
#include "run/names.hpp"

namespace switchyard::tool {
namespace {

void declare(Options& add, DoctorOptions& o, MeasureOptions& m) {
  add.json_output(o.json, "All findings as JSON on stdout");
  add.group("Numbers for `switchyard plan`");
  add.file(
      "--measure", m.path,
      "Instead: measure copies, sums, links, planning, empty calls and the network of this machine to itself, and write them "
      "as a topology file");
  add.choice("--backend", m.backend, kBackends, "--measure: the CPU, or the GPUs of this machine");
  add.integer("--hosts", m.hosts, 1, 64, "--measure: hosts of the test bed in the file, all of them this machine");
  add.integer("--seconds", m.seconds, 1, 600, "--measure: for memory and network, roughly");
  add.footer(
      "\nEach line says ok, limited or no; for the last two, why and what to do. '-' marks information.\n"
      "Exit status 1: something that the CPU backend needs is missing.\n"
      "\nExamples:\n"
      "  switchyard doctor\n"
      "  switchyard doctor --measure here.json\n"
      "  switchyard doctor --measure gpus.json --backend cuda\n");
}

VerbRun add(Options& options) {
  const auto o = std::make_shared<DoctorOptions>();
  const auto m = std::make_shared<MeasureOptions>();
  declare(options, *o, *m);
  return [o, m] {
    if (m->path.empty()) {
      const MeasureOptions usual;
      for (const auto& [flag, changed] : {std::pair("--backend", m->backend != usual.backend),
                                          {"--hosts", m->hosts != usual.hosts},
                                          {"--seconds", m->seconds != usual.seconds}})
        if (changed) throw UsageError(std::string(flag) + ": given without --measure, to which it belongs");
      return run_doctor(*o);
    }
    if (o->json) throw UsageError("--json: given with --measure, which writes JSON to its FILE");
    return run_measure(*m);
  };
}

}  // namespace

const Verb kDoctorVerb{"doctor", "Say what this machine can do and, where not, why and what to do", add};

}  // namespace switchyard::tool

// SPDX-License-Identifier: Apache-2.0
// Options of `switchyard doctor`.
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

void declare(Options& add, DoctorOptions& o, MeasureOptions& m, bool& engines) {
  add.json_output(o.json, "Print all findings as JSON");
  add.toggle("--engines", engines,
             "Instead, list the inference and training engines of a Python environment and the form that would be active in "
             "each. SWITCHYARD_PYTHON names its interpreter; default: python3");
  add.group("Numbers for `switchyard plan`");
  add.file("--measure", m.path,
           "Measure the rates of memory, links and network loopback of this machine and the cost of calls, and write them to a "
           "topology file, instead of the report");
  add.choice("--backend", m.backend, kBackends, "With --measure: measure the CPU or the GPUs");
  add.integer("--hosts", m.hosts, 1, 64,
              "With --measure: number of hosts to write to the file, each with the rates of this machine");
  add.integer("--seconds", m.seconds, 1, 600, "With --measure: approximate time to spend on memory and network");
  add.on_selected([add, &m, &engines] {
    for (const char* flag : {"--json", "--measure"})
      if (engines && add.has(flag)) throw UsageError(std::string(flag) + ": given with --engines, which prints only text");
    for (const char* flag : {"--backend", "--hosts", "--seconds"})
      if (m.path.empty() && add.has(flag))
        throw UsageError(std::string(flag) + ": given without --measure, to which it belongs");
  });
  add.footer(
      "\nEach line starts with ok, limited or no; limited and no come with the reason and a remedy. '-' marks information.\n"
      "Exit status 1: a requirement of the CPU backend is missing.\n"
      "\nExamples:\n"
      "  switchyard doctor\n"
      "  switchyard doctor --engines\n"
      "  switchyard doctor --measure here.json\n"
      "  switchyard doctor --measure gpus.json --backend cuda\n");
}

VerbRun add(Options& options) {
  const auto o = std::make_shared<DoctorOptions>();
  const auto m = std::make_shared<MeasureOptions>();
  const auto engines = std::make_shared<bool>(false);
  declare(options, *o, *m, *engines);
  return [o, m, engines] {
    if (*engines) return list_engines();
    if (m->path.empty()) return run_doctor(*o);
    if (o->json) throw UsageError("--json: given with --measure, which writes JSON to its FILE");
    return run_measure(*m);
  };
}

}  // namespace

const Verb kDoctorVerb{"doctor", "Report what this machine supports, and what to change where it does not", add};

}  // namespace switchyard::tool

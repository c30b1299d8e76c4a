// SPDX-License-Identifier: Apache-2.0
#include "verbs.hpp"

#include "bench/driver.hpp"
#include "demo/demo.hpp"
#include "doctor/doctor.hpp"
#include "plan/run_plan.hpp"
#include "report/plot.hpp"
#include "trace/record.hpp"
#include "tune/tune.hpp"
#include "verify/verify.hpp"

namespace switchyard::tool {

std::span<const Verb* const> all_verbs() {
  static constexpr const Verb* kVerbs[] = {&kDemoVerb, &kVerifyVerb, &kBenchVerb, &kTraceVerb,
                                           &kTuneVerb, &kPlotVerb,   &kPlanVerb,  &kDoctorVerb};
  return kVerbs;
}

}  // namespace switchyard::tool

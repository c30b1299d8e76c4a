// SPDX-License-Identifier: Apache-2.0
// The verbs' options on the command line, and their actions.
#pragma once

#include "bench.hpp"
#include "cli.hpp"
#include "demo.hpp"
#include "doctor.hpp"
#include "plot.hpp"
#include "trace_verb.hpp"
#include "tune.hpp"
#include "verify.hpp"
#include "verify_ledger.hpp"

namespace switchyard::tool {

struct VerbOptions {
  DemoOptions demo;
  VerifyOptions verify;
  LedgerVerifyOptions verify_ledger;
  BenchOptions bench;
  TraceVerbOptions trace;
  TuneOptions tune;
  PlotOptions plot;
  DoctorOptions doctor;
};

void declare_demo(CLI::App& app, VerbOptions& options);
void declare_verify(CLI::App& app, VerbOptions& options);
void declare_bench(CLI::App& app, VerbOptions& options);
void declare_trace(CLI::App& app, VerbOptions& options);
void declare_tune(CLI::App& app, VerbOptions& options);
void declare_plot(CLI::App& app, VerbOptions& options);
void declare_doctor(CLI::App& app, VerbOptions& options);

/// \returns the exit status
int act_demo(const VerbOptions& options);
int act_verify(const VerbOptions& options);
int act_bench(const VerbOptions& options);
int act_trace(const VerbOptions& options);
int act_tune(const VerbOptions& options);
int act_plot(const VerbOptions& options);
int act_doctor(const VerbOptions& options);

}  // namespace switchyard::tool

// SPDX-License-Identifier: Apache-2.0
// The command-line tool: verbs, help, and error messages.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "cli/build_info.hpp"
#include "cli/flags.hpp"
#include "cli/options.hpp"
#include "cli/verb.hpp"
#include "cli/words.hpp"
#include "switchyard/status.hpp"
#include "verbs.hpp"

namespace switchyard::tool {
namespace {

bool is_verb(const std::string& word) {
  const auto verbs = all_verbs();
  return std::any_of(verbs.begin(), verbs.end(), [&](const Verb* verb) { return word == verb->name; });
}

std::vector<std::string> flags_of(const CLI::App& app) {
  std::vector<std::string> flags;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) flags.push_back("--" + name);
    for (const std::string& name : option->get_snames()) flags.push_back("-" + name);
  }
  return flags;
}

/// The innermost verb on the command line, and its full name: "verify ledger", or "" without a verb.
struct Chosen {
  const CLI::App* app;
  std::string name;
};
Chosen chosen_verb(const CLI::App& app) {
  Chosen chosen{&app, ""};
  for (auto inner = app.get_subcommands(); !inner.empty(); inner = chosen.app->get_subcommands()) {
    chosen.app = inner.front();
    chosen.name += (chosen.name.empty() ? "" : " ") + chosen.app->get_name();
  }
  return chosen;
}

std::vector<std::string> verbs_of(const CLI::App& app) {
  std::vector<std::string> verbs;
  for (const CLI::App* verb : app.get_subcommands([](const CLI::App*) { return true; })) verbs.push_back(verb->get_name());
  return verbs;
}

/// "Could not convert: --json = out.json" for an option that is a toggle.
std::string explain_switch(const CLI::App& app, const std::string& what) {
  const std::string given = what.substr(what.find(':') + 2);
  const std::string flag = given.substr(0, given.find(' '));
  const CLI::Option* option = app.get_option_no_throw(flag);
  std::string meaning = option == nullptr ? "" : " (" + option->get_description() + ")";
  std::replace(meaning.begin(), meaning.end(), '\n', ' ');
  return fmt::format("{}: '{}' given, but it is a switch that takes no value{}", flag, given.substr(given.find('=') + 2),
                     meaning);
}

/// Messages for arguments that the parser reports only as extra or missing.
std::string explain(const CLI::App& app, const CLI::ParseError& error) {
  const Chosen chosen = chosen_verb(app);
  std::string what = error.what();
  if (const size_t end = what.find(" was given a disallowed flag override"); end != std::string::npos)
    return fmt::format("--{}: given with a value, but it is a switch that takes no value", what.substr(0, end));
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) != nullptr)
    return fmt::format("{}: no value given, or several where one is allowed", what.substr(0, what.find(':')));
  if (dynamic_cast<const CLI::ConversionError*>(&error) != nullptr) return explain_switch(*chosen.app, what);
  if (dynamic_cast<const CLI::ExtrasError*>(&error) == nullptr) return what;
  std::vector<std::string> rest = app.remaining(true);
  if (rest.empty()) return what;
  const std::string first = rest.front().substr(0, rest.front().find('='));
  if (first.rfind('-', 0) == 0) {
    return fmt::format("{}: no such option{}.{}", first, chosen.name.empty() ? "" : " of '" + chosen.name + "'",
                       did_you_mean(first, flags_of(*chosen.app)));
  }
  const std::vector<std::string> all = verbs_of(app), verbs = verbs_of(*chosen.app);
  if (!chosen.name.empty() && std::find(all.begin(), all.end(), first) != all.end())
    return fmt::format("'{}': given after '{}'; one verb at a time", first, chosen.name);
  if (!chosen.name.empty())
    return fmt::format("'{}': '{}' takes no such argument; options begin with -.{}", first, chosen.name,
                       did_you_mean(first, verbs));
  std::string hint = did_you_mean(first, verbs);
  for (const std::string& verb : verbs)
    for (const std::string& kind : verbs_of(*app.get_subcommand(verb)))
      if (kind == first) hint = fmt::format(" Did you mean '{} {}'?", verb, kind);
  return fmt::format("'{}': no such verb; allowed: {}.{}", first, joined(verbs, ", "), hint);
}

/// Rejects `verify --json ledger`: the option belongs to `verify`, which is not run. \throws UsageError
void refuse_options_before_verb(const CLI::App& app) {
  for (const CLI::App* verb = &app; !verb->get_subcommands().empty(); verb = verb->get_subcommands().front()) {
    const std::string next = verb->get_subcommands().front()->get_name();
    for (const CLI::Option* option : verb->get_options())
      if (option->count() > 0)
        throw UsageError(fmt::format("{}: given before '{}', whose options must follow it", option->get_name(), next));
  }
}

int usage_error(const CLI::App& app, const std::string& text) {
  const Chosen chosen = chosen_verb(app);
  fmt::print(stderr, "switchyard: {}\nTry: switchyard{} --help\n", text, chosen.name.empty() ? "" : " " + chosen.name);
  return kExitUsage;
}

/// Errors about invalid arguments are usage errors; all others are run-time errors.
int library_error(const CLI::App& app, const Error& error) {
  const std::string text = text_with_flags(error, flags_of(*chosen_verb(app).app));
  if (error.code() == ErrorCode::invalid_argument) return usage_error(app, text);
  fmt::print(stderr, "switchyard: {} ({})\n", text, to_string(error.code()));
  return kExitRuntime;
}

void print_help(const CLI::App& app) {
  const Chosen chosen = chosen_verb(app);
  const std::string before = chosen.name.substr(0, chosen.name.rfind(' ') == std::string::npos ? 0 : chosen.name.rfind(' '));
  fmt::print("{}", chosen.name.empty() ? app.help() : chosen.app->help("switchyard" + (before.empty() ? "" : " " + before)));
}

int run(int argc, char** argv) {
  CLI::App app("Runs, checks and measures expert parallelism for Mixture-of-Experts models on this machine.", "switchyard");
  app.formatter(std::make_shared<CLI::Formatter>());
  app.get_formatter()->column_width(34);
  app.set_help_flag("-h,--help", "Print this text and exit");
  app.set_version_flag("--version", build_description(), "Print version, commit and build, and exit");
  app.fallthrough(false);
  app.require_subcommand(0, 1);
  const bool has_doctor = is_verb("doctor");
  app.footer(std::string("\n") + (has_doctor ? "Start with `switchyard doctor`, then `switchyard demo`.\n" : "") +
             "`switchyard VERB --help` lists the options of a verb, with examples.\n"
             "Exit status: 0 success, 1 a check failed, 2 wrong usage, 3 an error at run time");
  std::vector<std::pair<CLI::App*, VerbRun>> verbs;
  for (const Verb* verb : all_verbs()) {
    CLI::App* sub = app.add_subcommand(verb->name, verb->help);
    sub->set_help_flag("-h,--help", "Print this text and exit");
    Options options(*sub);
    verbs.emplace_back(sub, verb->add(options));
  }
  try {
    app.parse(argc, argv);
    if (app.get_subcommands().empty()) {
      fmt::print("{}", app.help());
      return argc > 1 ? kExitUsage : kExitOk;
    }
    refuse_options_before_verb(app);
    for (const auto& [verb, act] : verbs)
      if (verb->parsed()) return act();
    return kExitUsage;
  } catch (const CLI::CallForHelp&) {
    print_help(app);
    return kExitOk;
  } catch (const CLI::CallForVersion&) {
    fmt::print("switchyard {}\n", build_description());
    return kExitOk;
  } catch (const CLI::ParseError& e) {
    return usage_error(app, explain(app, e));
  } catch (const UsageError& e) {
    return usage_error(app, e.what());
  } catch (const Error& e) {
    return library_error(app, e);
  } catch (const std::exception& e) {
    fmt::print(stderr, "switchyard: {}\n", e.what());
    return kExitRuntime;
  }
}

}  // namespace

/// Checks that all output was written, which fails on a full disk. \returns the exit status
static int with_output_written(int status) {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return status;
  std::fprintf(stderr, "switchyard: standard output cannot be written: %s\n", std::strerror(errno));
  return kExitRuntime;
}

}  // namespace switchyard::tool

/// Accepts `help` and `help VERB`, which users often type first.
int main(int argc, char** argv) try {
  std::signal(SIGXFSZ, SIG_IGN);  // writing beyond `ulimit -f` then fails with an error, as on a full disk
  // If ranks share a GPU, their streams must not share a queue, and lazy loading may wait for another rank's kernel.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  std::vector<std::string> args(argv, argv + argc);
  if (args.size() >= 2 && args[1] == "help") {
    args.erase(args.begin() + 1);
    if (args.size() < 2 || switchyard::tool::is_verb(args[1])) args.emplace_back("--help");  // otherwise: an unknown verb
  }
  std::vector<char*> pointers;
  for (std::string& arg : args) pointers.push_back(arg.data());
  return switchyard::tool::with_output_written(switchyard::tool::run(static_cast<int>(pointers.size()), pointers.data()));
} catch (const std::exception& e) {  // there is not even enough memory for the arguments
  std::fprintf(stderr, "switchyard: %s\n", e.what());
  return switchyard::tool::kExitRuntime;
}

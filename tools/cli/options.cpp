// SPDX-License-Identifier: Apache-2.0
#include "cli/options.hpp"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <limits>

#include "cli/verb.hpp"
#include "cli/words.hpp"
#include "measure/result_file.hpp"

namespace switchyard::tool {
namespace {

constexpr size_t kHelpWidth = 72;  // width of the description column

/// Factor for a size suffix; 0 if the suffix is unknown.
int64_t suffix_factor(std::string suffix) {
  suffix = canonical(suffix);
  if (suffix.empty()) return 1;
  if (suffix == "k") return 1000;
  if (suffix == "m") return 1000 * 1000;
  if (suffix == "ki") return 1024;
  if (suffix == "mi") return 1024 * 1024;
  return 0;
}

std::string range_text(int64_t min, int64_t max) {
  if (max == std::numeric_limits<int64_t>::max()) return "an integer of at least " + std::to_string(min);
  return "an integer from " + std::to_string(min) + " to " + std::to_string(max);
}

std::string joined_integers(const std::vector<int64_t>& values) {
  std::string out;
  for (const int64_t v : values) out += (out.empty() ? "" : ",") + std::to_string(v);
  return out;
}

}  // namespace

int64_t parse_integer(const std::string& flag, const std::string& text, int64_t min, int64_t max, const std::string& also) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  const int64_t factor = error == std::errc() ? suffix_factor(std::string(rest, end)) : 0;
  int64_t scaled = 0;
  if (factor == 0 || __builtin_mul_overflow(value, factor, &scaled) || scaled < min || scaled > max) {
    throw UsageError(flag + ": '" + text + "' given; allowed: " + range_text(min, max) + also);
  }
  return scaled;
}

std::vector<int64_t> parse_integers(const std::string& flag, const std::string& text, int64_t min, int64_t max) {
  std::vector<int64_t> values;
  const auto add = [&](int64_t v) {
    if (std::find(values.begin(), values.end(), v) == values.end()) values.push_back(v);
  };
  for (const std::string& part : split(text, ',')) {
    const size_t dash = part.find('-', 1);
    const std::string begin = part.substr(0, dash), end = dash == std::string::npos ? begin : part.substr(dash + 1);
    if (begin.empty() || end.empty())
      throw UsageError(flag + ": '" + text + "' given; allowed: values and ranges first-last, separated by commas, each " +
                       range_text(min, max));
    const int64_t first = parse_integer(flag, begin, min, max), last = parse_integer(flag, end, min, max);
    if (last < first || last - first > 1000)
      throw UsageError(flag + ": range '" + part + "' given; allowed: first-last with first <= last, at most 1000 values");
    for (int64_t v = first; v <= last; ++v) add(v);
  }
  return values;
}

std::string parse_choice(const std::string& flag, const std::string& text, const std::vector<std::string>& allowed) {
  for (const std::string& choice : allowed) {
    if (canonical(choice) == canonical(text)) return choice;
  }
  throw UsageError(flag + ": '" + text + "' given; allowed: " + joined(allowed, ", ") + "." + did_you_mean(text, allowed));
}

std::vector<std::string> parse_choices(const std::string& flag, const std::string& text,
                                       const std::vector<std::string>& allowed) {
  if (canonical(text) == "all") return allowed;
  std::vector<std::string> with_all = allowed;
  with_all.push_back("all");
  std::vector<std::string> values;
  for (const std::string& part : split(text, ',')) {
    if (part == "all") throw UsageError(flag + ": '" + text + "' given; 'all' stands alone");
    const std::string choice = parse_choice(flag, part, with_all);
    if (std::find(values.begin(), values.end(), choice) == values.end()) values.push_back(choice);
  }
  return values;
}

CLI::Option* Options::finish(CLI::Option* option, const std::string& type_name, const std::string& default_text) {
  option->group(group_);
  option->type_name(type_name + (default_text.empty() ? "" : " [" + default_text + "]"));
  option->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  return option;
}

void Options::integer(const std::string& flag, int64_t& target, int64_t min, int64_t max, const std::string& help) {
  finish(app_->add_option_function<std::string>(
             flag, [&target, flag, min, max](const std::string& text) { target = parse_integer(flag, text, min, max); },
             wrapped(help, kHelpWidth)),
         "N", std::to_string(target));
}

void Options::automatic(const std::string& flag, int64_t& target, int64_t min, int64_t max, const std::string& help) {
  const auto take = [&target, flag, min, max](const std::string& text) {
    target = canonical(text) == "auto" ? 0 : parse_integer(flag, text, min, max, ", or auto");
  };
  finish(app_->add_option_function<std::string>(flag, take, wrapped(help, kHelpWidth)), "N", "auto");
}

void Options::integers(const std::string& flag, std::vector<int64_t>& target, int64_t min, int64_t max,
                       const std::string& help) {
  finish(app_->add_option_function<std::string>(
             flag, [&target, flag, min, max](const std::string& text) { target = parse_integers(flag, text, min, max); },
             wrapped(help, kHelpWidth)),
         "N,...", joined_integers(target));
}

void Options::choice(const std::string& flag, std::string& target, const std::vector<std::string>& allowed,
                     const std::string& help) {
  finish(app_->add_option_function<std::string>(
             flag, [&target, flag, allowed](const std::string& text) { target = parse_choice(flag, text, allowed); },
             wrapped(help + "\n" + joined(allowed, " | "), kHelpWidth)),
         "NAME", target);
}

void Options::choices(const std::string& flag, std::vector<std::string>& target, const std::vector<std::string>& allowed,
                      const std::string& help) {
  finish(app_->add_option_function<std::string>(
             flag, [&target, flag, allowed](const std::string& text) { target = parse_choices(flag, text, allowed); },
             wrapped(help + "\n" + joined(allowed, ", ") + "; or all", kHelpWidth)),
         "NAME,...", joined(target, ","));
}

void Options::text(const std::string& flag, std::string& target, const std::string& type_name, const std::string& help) {
  finish(app_->add_option_function<std::string>(
             flag, [&target](const std::string& text) { target = text; }, wrapped(help, kHelpWidth)),
         type_name, target);
}

void Options::path(const std::string& flag, std::string& target, const std::string& kind, const std::string& type_name,
                   const std::string& help) {
  const auto take = [&target, flag, kind](const std::string& text) {
    if (text.empty()) throw UsageError(flag + ": '' given; allowed: the path of a " + kind);
    target = text;
  };
  finish(app_->add_option_function<std::string>(flag, take, wrapped(help, kHelpWidth)), type_name, target);
}

void Options::file(const std::string& flag, std::string& target, const std::string& help) {
  path(flag, target, "file", "FILE", help);
}

void Options::folder(const std::string& flag, std::string& target, const std::string& help) {
  path(flag, target, "folder", "DIR", help);
}

void Options::texts(const std::string& flag, std::vector<std::string>& target, const std::string& type_name, bool split_commas,
                    const std::string& help) {
  const auto take = [&target, split_commas](const std::vector<std::string>& all) {
    target.clear();
    for (const std::string& text : all) {
      for (const std::string& part : split_commas ? split(text, ',') : std::vector<std::string>{text}) target.push_back(part);
    }
  };
  app_->add_option_function<std::vector<std::string>>(flag, take, wrapped(help, kHelpWidth))
      ->group(group_)
      ->type_name(type_name)
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
}

void Options::argument(const std::string& name, std::string& target, const std::string& help) {
  file(name, target, help);
  app_->get_option(name)->required()->type_name("");
}

void Options::toggle(const std::string& flag, bool& target, const std::string& help) {
  app_->add_flag_callback(
          flag, [&target] { target = true; }, wrapped(help, kHelpWidth))
      ->group(group_)
      ->disable_flag_override();
}

void Options::toggle_off(const std::string& flag, bool& target, const std::string& help) {
  app_->add_flag_callback(
          flag, [&target] { target = false; }, wrapped(help, kHelpWidth))
      ->group(group_)
      ->disable_flag_override();
}

void Options::json_output(bool& target, const std::string& help) {
  const std::string flag = "--json", standard = measure::kStandardOutput;
  const auto take = [&target, flag, standard, help](const std::string& text) {
    if (text != standard)
      throw UsageError(flag + ": '" + text + "' given, but it is a switch that takes no value (" + help + ")");
    target = true;
  };
  app_->add_option_function<std::string>(flag, take, wrapped(help, kHelpWidth))
      ->group(group_)
      ->type_name("")
      ->expected(0, 1)
      ->default_str(standard)  // value of the flag without an argument
      ->option_text(" ")       // the help presents it as a toggle
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
}

void Options::footer(const std::string& text) { app_->footer(text); }

Options Options::verb(const std::string& name, const std::string& help) {
  CLI::App* const inner = app_->add_subcommand(name, help);
  inner->set_help_flag("-h,--help", "Print this text and exit");
  return Options(*inner);
}

void Options::on_selected(std::function<void()> act) { app_->callback(std::move(act)); }

bool Options::has(const std::string& flag) const { return app_->count(flag) > 0; }

std::vector<std::string> Options::given() const {
  std::vector<std::string> names;
  for (const CLI::Option* option : app_->get_options())
    if (option->count() > 0) names.push_back(option->get_name());
  return names;
}

}  // namespace switchyard::tool

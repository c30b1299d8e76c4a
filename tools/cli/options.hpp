// SPDX-License-Identifier: Apache-2.0
// The verbs' options, with validated values and clear errors. Verbs include this header instead of the parser's, which takes
// seconds to compile.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace switchyard::tool {

/// Parses an integer in [min, max]; accepts 4096, 4k, 4ki (= 4096), 1m. The error lists `also` among the allowed values.
/// \throws UsageError
int64_t parse_integer(const std::string& flag, const std::string& text, int64_t min, int64_t max, const std::string& also = "");
/// Parses comma-separated integers and ranges, "1,2,4" or "1-4,8". Each value appears once, in the given order. \throws
/// UsageError
std::vector<int64_t> parse_integers(const std::string& flag, const std::string& text, int64_t min, int64_t max);
/// One of `allowed`; '-' equals '_', and case does not matter. \throws UsageError
std::string parse_choice(const std::string& flag, const std::string& text, const std::vector<std::string>& allowed);
/// Comma-separated choices, or "all". \throws UsageError
std::vector<std::string> parse_choices(const std::string& flag, const std::string& text,
                                       const std::vector<std::string>& allowed);

/// Adds validated options to a verb. Targets must outlive parsing; the help shows their current values as defaults.
class Options {
 public:
  explicit Options(CLI::App& app) : app_(&app) {}
  void group(const std::string& name) { group_ = name; }
  void integer(const std::string& flag, int64_t& target, int64_t min, int64_t max, const std::string& help);
  /// 0 in `target` means "chosen automatically". The help shows it as auto; the flag accepts both auto and 0.
  void automatic(const std::string& flag, int64_t& target, int64_t min, int64_t max, const std::string& help);
  void integers(const std::string& flag, std::vector<int64_t>& target, int64_t min, int64_t max, const std::string& help);
  void choice(const std::string& flag, std::string& target, const std::vector<std::string>& allowed, const std::string& help);
  void choices(const std::string& flag, std::vector<std::string>& target, const std::vector<std::string>& allowed,
               const std::string& help);
  void text(const std::string& flag, std::string& target, const std::string& type_name, const std::string& help);
  /// A path, which must not be empty; folder(): the path of a folder.
  void folder(const std::string& flag, std::string& target, const std::string& help);
  void file(const std::string& flag, std::string& target, const std::string& help);
  /// A required path without a flag.
  void argument(const std::string& name, std::string& target, const std::string& help);
  /// May be repeated; with `split_commas`, each occurrence also accepts several comma-separated values.
  void texts(const std::string& flag, std::vector<std::string>& target, const std::string& type_name, bool split_commas,
             const std::string& help);
  void toggle(const std::string& flag, bool& target, const std::string& help);
  /// A toggle that sets `target` to false.
  void toggle_off(const std::string& flag, bool& target, const std::string& help);
  /// --json for a verb that prints either text or JSON to standard output: a toggle that also accepts "-", for consistency with
  /// verbs whose --json names a file.
  void json_output(bool& target, const std::string& help);
  /// Text below the options in the help output.
  void footer(const std::string& text);

  /// A subcommand of this verb, such as `ledger` in `verify ledger`.
  Options verb(const std::string& name, const std::string& help);
  /// `act` is called after the options have been parsed if this verb is on the command line.
  void on_selected(std::function<void()> act);
  /// For use in on_selected: whether an option is on the command line, and the names of all options given there.
  bool has(const std::string& flag) const;
  std::vector<std::string> given() const;

 private:
  void path(const std::string& flag, std::string& target, const std::string& kind, const std::string& type_name,
            const std::string& help);
  CLI::Option* finish(CLI::Option* option, const std::string& type_name, const std::string& default_text);
  CLI::App* app_;
  std::string group_ = "Options";
};

}  // namespace switchyard::tool

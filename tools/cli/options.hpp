// SPDX-License-Identifier: Apache-2.0
// Options of the verbs: checked values and clear errors. Verbs see this instead of the parser, which takes seconds to compile.
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

/// Integer in [min, max]; accepts 4096, 4k, 4ki (= 4096), 1m. `also` is added to the allowed values in the error. \throws
/// UsageError
int64_t parse_integer(const std::string& flag, const std::string& text, int64_t min, int64_t max, const std::string& also = "");
/// Comma-separated integers and ranges: "1,2,4" or "1-4,8". Each once, in the order given. \throws UsageError
std::vector<int64_t> parse_integers(const std::string& flag, const std::string& text, int64_t min, int64_t max);
/// One of `allowed`; '-' and '_' are the same, case does not matter. \throws UsageError
std::string parse_choice(const std::string& flag, const std::string& text, const std::vector<std::string>& allowed);
/// Comma-separated choices, or "all". \throws UsageError
std::vector<std::string> parse_choices(const std::string& flag, const std::string& text,
                                       const std::vector<std::string>& allowed);

/// Adds checked options to a verb. Targets must outlive the parse; their present values are shown as defaults.
class Options {
 public:
  explicit Options(CLI::App& app) : app_(&app) {}
  void group(const std::string& name) { group_ = name; }
  void integer(const std::string& flag, int64_t& target, int64_t min, int64_t max, const std::string& help);
  /// 0 in `target` means "chosen automatically": shown as auto, and accepted as auto or 0.
  void automatic(const std::string& flag, int64_t& target, int64_t min, int64_t max, const std::string& help);
  void integers(const std::string& flag, std::vector<int64_t>& target, int64_t min, int64_t max, const std::string& help);
  void choice(const std::string& flag, std::string& target, const std::vector<std::string>& allowed, const std::string& help);
  void choices(const std::string& flag, std::vector<std::string>& target, const std::vector<std::string>& allowed,
               const std::string& help);
  void text(const std::string& flag, std::string& target, const std::string& type_name, const std::string& help);
  /// A path, not empty; folder(): of a folder.
  void folder(const std::string& flag, std::string& target, const std::string& help);
  void file(const std::string& flag, std::string& target, const std::string& help);
  /// A path without a flag; it must be given.
  void argument(const std::string& name, std::string& target, const std::string& help);
  /// May be given several times; with `split_commas` each time also several, comma-separated.
  void texts(const std::string& flag, std::vector<std::string>& target, const std::string& type_name, bool split_commas,
             const std::string& help);
  void toggle(const std::string& flag, bool& target, const std::string& help);
  /// A toggle that makes `target` false.
  void toggle_off(const std::string& flag, bool& target, const std::string& help);
  /// --json of a verb whose output is either text or JSON on standard output: a toggle that takes "-" too, which says the same
  /// here and in verbs whose --json names a file.
  void json_output(bool& target, const std::string& help);
  /// What stands below the options in the help.
  void footer(const std::string& text);

  /// A verb behind this one, as `ledger` in `verify ledger`.
  Options verb(const std::string& name, const std::string& help);
  /// Called when this verb stands on the command line and its options have been taken.
  void on_selected(std::function<void()> act);
  /// In on_selected: an option is on the command line; the names of all that are.
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

// SPDX-License-Identifier: Apache-2.0
// Options of the verbs: checked values, clear errors, suggestions for what was probably meant.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace CLI {  // <CLI/CLI.hpp> takes seconds to compile: only who calls it includes it
class App;
class Option;
}  // namespace CLI

namespace switchyard::tool {

/// Exit statuses, as documented in docs/cli.md.
enum ExitCode : int { kExitOk = 0, kExitCheckFailed = 1, kExitUsage = 2, kExitRuntime = 3 };

/// The command line is wrong: exit status 2. The text names the flag, what was given and what is allowed.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The candidate with the smallest edit distance (transpositions count once), if it is close enough to be a slip; else "".
std::string closest(const std::string& text, const std::vector<std::string>& candidates);
/// " Did you mean '--ranks'?" or "".
std::string did_you_mean(const std::string& text, const std::vector<std::string>& candidates);

/// An error text of the library that begins with members of its structures, or a product of them, with the `flags` that set
/// them instead: "LowLatencyConfig::max_tokens = 70000: ..." becomes "--tokens = 70000: ...". Other texts stay.
std::string in_flags(const std::string& text, const std::vector<std::string>& flags);

/// Words that options of several verbs take.
inline const std::vector<std::string> kLayouts = {"rank_major", "expert_major"};
inline const std::vector<std::string> kRowTypes = {"bf16", "f16", "f32", "fp8"};
inline const std::vector<std::string> kQuantize = {"none", "f32", "ue8m0"};
inline const std::vector<std::string> kOrders = {"per_rank", "per_route"};
inline const std::vector<std::string> kScaleOrders = {"row_major", "column_major"};

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

/// What the least of each kind of file has, a little less than what tiny runs write.
inline constexpr size_t kLeastJson = 2048, kLeastPage = 8192, kLeastReport = 28'000;

/// A file that a verb writes when it is done; no path: it does not.
struct OutputFile {
  std::string flag, path;
  size_t least = 0;  ///< bytes that it will have at least
};
/// What cannot be written is better known before minutes of measuring. Leaves no file behind. --json and --html may say "-":
/// standard output then gets that document alone, and what the verb prints goes to stderr. \throws UsageError, also if two
/// flags name the same file
void check_outputs(const std::vector<OutputFile>& files);

/// Refuses what does not fit into nine tenths of the memory. `what`: flags and values that decide it. \throws UsageError
void require_memory(const std::string& what, double needed, size_t available);

/// Adds checked options to a verb. Targets must outlive the parse; their present values are shown as defaults.
class Options {
 public:
  explicit Options(CLI::App& app) : app_(app) {}
  void group(const std::string& name) { group_ = name; }
  void integer(const std::string& flag, int64_t& target, int64_t min, int64_t max, const std::string& help);
  /// 0 in `target` means "chosen automatically": shown as auto, and accepted as auto or 0.
  void automatic(const std::string& flag, int64_t& target, int64_t min, int64_t max, const std::string& help);
  void integers(const std::string& flag, std::vector<int64_t>& target, int64_t min, int64_t max, const std::string& help);
  void choice(const std::string& flag, std::string& target, const std::vector<std::string>& allowed, const std::string& help);
  void choices(const std::string& flag, std::vector<std::string>& target, const std::vector<std::string>& allowed,
               const std::string& help);
  void text(const std::string& flag, std::string& target, const std::string& type_name, const std::string& help);
  /// A path, not empty.
  void file(const std::string& flag, std::string& target, const std::string& help);
  /// May be given several times; with `split_commas` each time also several, comma-separated.
  void texts(const std::string& flag, std::vector<std::string>& target, const std::string& type_name, bool split_commas,
             const std::string& help);
  void toggle(const std::string& flag, bool& target, const std::string& help);

 private:
  CLI::Option* finish(CLI::Option* option, const std::string& type_name, const std::string& default_text);
  CLI::App& app_;
  std::string group_ = "Options";
};

/// Breaks `text` into lines of at most `width` columns.
std::string wrapped(const std::string& text, size_t width);
std::string joined(const std::vector<std::string>& parts, const std::string& separator);
std::vector<std::string> split(const std::string& text, char separator);

}  // namespace switchyard::tool

// SPDX-License-Identifier: Apache-2.0
#include "cli.hpp"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <charconv>
#include <filesystem>
#include <iterator>
#include <limits>
#include <regex>

#include "../../bench/result_file.hpp"
#include "style.hpp"

namespace switchyard::tool {
namespace {

constexpr size_t kHelpWidth = 72;  // of the description column

/// Edit distance with insertions, deletions, substitutions and swaps of neighbours, each at cost 1.
size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) {
    for (size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        d[i][j] = i + j;
        continue;
      }
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] != b[j - 1] ? 1 : 0)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  }
  return d[a.size()][b.size()];
}

std::string canonical(std::string text) {
  for (char& c : text) c = c == '-' ? '_' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

/// Factor of a size suffix, or 0.
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

/// What sets a member of the library's configs and options; -M, -K, --pes and --experts-per-pe are those of `verify ledger`.
struct FlagOfMember {
  const char* member;
  const char* flag;
};
constexpr FlagOfMember kFlagOfMember[] = {
    {"max_tokens", "--tokens"},
    {"max_tokens", "-M"},
    {"hidden", "--hidden"},
    {"hidden", "-K"},
    {"world", "--ranks"},
    {"world", "--pes"},
    {"num_experts", "--experts"},
    {"num_experts", "--experts-per-pe"},
    {"topk", "--topk"},
    {"pieces", "--pieces"},
    {"expert_alignment", "--alignment"},
    {"num_channels", "--channels"},
    {"slots", "--slots"},
    {"send_chunk", "--send-chunk"},
    {"num_blocks", "--blocks"},
    {"num_warps", "--warps"},
    {"num_sms", "--sms"},
};

/// Of the candidates the one that other verbs, or other programs, call `text`; else "".
std::string same_meaning(const std::string& text, const std::vector<std::string>& candidates) {
  const auto given = [&](const std::string& word) {
    return std::find(candidates.begin(), candidates.end(), word) != candidates.end();
  };
  if (text == "gpu" && given("cuda")) return "cuda";
  for (const FlagOfMember& one : kFlagOfMember) {
    if (text != one.flag) continue;
    for (const FlagOfMember& other : kFlagOfMember)
      if (std::string(one.member) == other.member && given(other.flag)) return other.flag;
  }
  return "";
}

}  // namespace

std::string joined(const std::vector<std::string>& parts, const std::string& separator) {
  std::string out;
  for (const std::string& part : parts) out += (&part == parts.data() ? "" : separator) + part;
  return out;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == separator) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

std::string wrapped(const std::string& text, size_t width) {
  std::string out;
  size_t column = 0;
  for (const std::string& paragraph : split(text, '\n')) {
    if (!out.empty()) out += '\n';
    column = 0;
    for (const std::string& word : split(paragraph, ' ')) {
      if (column > 0 && column + 1 + word.size() > width) {
        out += '\n';
        column = 0;
      }
      if (column > 0) {
        out += ' ';
        ++column;
      }
      out += word;
      column += word.size();
    }
  }
  return out;
}

std::string closest(const std::string& text, const std::vector<std::string>& candidates) {
  const std::string wanted = canonical(text);
  std::string best;
  size_t best_distance = std::numeric_limits<size_t>::max();
  for (const std::string& candidate : candidates) {
    const std::string c = canonical(candidate);
    size_t distance = edit_distance(wanted, c);
    if (wanted.size() >= 3 && c.size() > wanted.size() && c.compare(0, wanted.size(), wanted) == 0)
      distance = 1;  // abbreviated
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  }
  const size_t tolerated = std::max<size_t>(1, canonical(best).size() / 3);
  return best_distance <= tolerated ? best : "";
}

std::string did_you_mean(const std::string& text, const std::vector<std::string>& candidates) {
  const std::string same = same_meaning(text, candidates), best = same.empty() ? closest(text, candidates) : same;
  return best.empty() ? "" : " Did you mean '" + best + "'?";
}

std::string in_flags(const std::string& text, const std::vector<std::string>& flags) {
  static const std::regex head("^(rank \\d+: )?(?:\\w+::)?\\w+(?: [*x] (?:\\w+::)?\\w+)*"), member("(?:\\w+::)?(\\w+)");
  std::smatch all;
  if (!std::regex_search(text, all, head)) return text;
  const std::string begin = all[0];
  std::string out = all[1];
  std::string rest = begin.substr(out.size());
  for (std::smatch one; std::regex_search(rest, one, member); rest = one.suffix()) {
    out += one.prefix();
    const auto known = std::find_if(std::begin(kFlagOfMember), std::end(kFlagOfMember), [&](const FlagOfMember& f) {
      return one[1] == f.member && std::find(flags.begin(), flags.end(), f.flag) != flags.end();
    });
    out += known == std::end(kFlagOfMember) ? one.str() : known->flag;
  }
  return out + rest + all.suffix().str();
}

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

void check_outputs(const std::vector<OutputFile>& files) {
  std::vector<std::filesystem::path> targets;
  for (const OutputFile& file : files) {
    if (file.path.empty()) continue;
    const bool standard = file.path == bench::kStandardOutput;
    if (standard && file.flag != "--json" && file.flag != "--html")
      throw UsageError(file.flag + ": '-' given; allowed: a file (--json - and --html - write to standard output)");
    const std::string problem = bench::why_not_writable(file.path, file.least);
    if (!problem.empty()) throw UsageError(file.flag + ": cannot write '" + file.path + "': " + problem);
    std::error_code ignored;
    targets.push_back(std::filesystem::weakly_canonical(std::filesystem::absolute(file.path, ignored), ignored));
    if (std::find(targets.begin(), targets.end() - 1, targets.back()) != targets.end() - 1)
      throw UsageError(file.flag + ": '" + file.path + "' given, to which another flag writes; allowed: a file of its own");
  }
  for (const OutputFile& file : files)
    if (file.path == bench::kStandardOutput) bench::claim_standard_output();
}

void require_memory(const std::string& what, double needed, size_t available) {
  const auto most = static_cast<double>(available);
  if (needed <= 0.9 * most) return;
  throw UsageError(what + " need about " + binary_size(needed) + ", " + binary_size(most) +
                   " are available; make one of them smaller");
}

CLI::Option* Options::finish(CLI::Option* option, const std::string& type_name, const std::string& default_text) {
  option->group(group_);
  option->type_name(type_name + (default_text.empty() ? "" : " [" + default_text + "]"));
  option->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  return option;
}

void Options::integer(const std::string& flag, int64_t& target, int64_t min, int64_t max, const std::string& help) {
  finish(app_.add_option_function<std::string>(
             flag, [&target, flag, min, max](const std::string& text) { target = parse_integer(flag, text, min, max); },
             wrapped(help, kHelpWidth)),
         "N", std::to_string(target));
}

void Options::automatic(const std::string& flag, int64_t& target, int64_t min, int64_t max, const std::string& help) {
  const auto take = [&target, flag, min, max](const std::string& text) {
    target = canonical(text) == "auto" ? 0 : parse_integer(flag, text, min, max, ", or auto");
  };
  finish(app_.add_option_function<std::string>(flag, take, wrapped(help, kHelpWidth)), "N", "auto");
}

void Options::integers(const std::string& flag, std::vector<int64_t>& target, int64_t min, int64_t max,
                       const std::string& help) {
  finish(app_.add_option_function<std::string>(
             flag, [&target, flag, min, max](const std::string& text) { target = parse_integers(flag, text, min, max); },
             wrapped(help, kHelpWidth)),
         "N,...", joined_integers(target));
}

void Options::choice(const std::string& flag, std::string& target, const std::vector<std::string>& allowed,
                     const std::string& help) {
  finish(app_.add_option_function<std::string>(
             flag, [&target, flag, allowed](const std::string& text) { target = parse_choice(flag, text, allowed); },
             wrapped(help + "\n" + joined(allowed, " | "), kHelpWidth)),
         "NAME", target);
}

void Options::choices(const std::string& flag, std::vector<std::string>& target, const std::vector<std::string>& allowed,
                      const std::string& help) {
  finish(app_.add_option_function<std::string>(
             flag, [&target, flag, allowed](const std::string& text) { target = parse_choices(flag, text, allowed); },
             wrapped(help + "\n" + joined(allowed, ", ") + "; or all", kHelpWidth)),
         "NAME,...", joined(target, ","));
}

void Options::text(const std::string& flag, std::string& target, const std::string& type_name, const std::string& help) {
  finish(app_.add_option_function<std::string>(
             flag, [&target](const std::string& text) { target = text; }, wrapped(help, kHelpWidth)),
         type_name, target);
}

void Options::file(const std::string& flag, std::string& target, const std::string& help) {
  const auto take = [&target, flag](const std::string& text) {
    if (text.empty()) throw UsageError(flag + ": '' given; allowed: the path of a file");
    target = text;
  };
  finish(app_.add_option_function<std::string>(flag, take, wrapped(help, kHelpWidth)), "FILE", target);
}

void Options::texts(const std::string& flag, std::vector<std::string>& target, const std::string& type_name, bool split_commas,
                    const std::string& help) {
  const auto take = [&target, split_commas](const std::vector<std::string>& all) {
    target.clear();
    for (const std::string& text : all) {
      for (const std::string& part : split_commas ? split(text, ',') : std::vector<std::string>{text}) target.push_back(part);
    }
  };
  app_.add_option_function<std::vector<std::string>>(flag, take, wrapped(help, kHelpWidth))
      ->group(group_)
      ->type_name(type_name)
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
}

void Options::toggle(const std::string& flag, bool& target, const std::string& help) {
  app_.add_flag_callback(
          flag, [&target] { target = true; }, wrapped(help, kHelpWidth))
      ->group(group_);
}

}  // namespace switchyard::tool

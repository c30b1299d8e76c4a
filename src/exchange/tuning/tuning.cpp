// SPDX-License-Identifier: Apache-2.0
#include "switchyard/tuning.hpp"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>
#include <set>
#include <string_view>

#include "base/enum_text.hpp"
#include "switchyard/status.hpp"

namespace switchyard {

namespace {

constexpr char kBuiltIn[] =
#include "default_tuning.inc"
    ;
constexpr const char* kFirstLine = "switchyard-tuning 1";
constexpr const char* kAnyGpu = "cuda";
constexpr const char* kVariable = "SWITCHYARD_TUNING";

constexpr unsigned bit(TuningMode mode) { return 1u << static_cast<unsigned>(mode); }
constexpr unsigned kNormal = bit(TuningMode::normal) | bit(TuningMode::normal_expert_major),
                   kLowLatency = bit(TuningMode::low_latency), kWhole = bit(TuningMode::flat) | bit(TuningMode::ledger);

struct ValueKey {
  const char* name;
  int TuningValues::*target;
  int max;
  unsigned modes;
};
constexpr int kMaxSms = 1024;
constexpr ValueKey kValues[] = {
    {"dispatch_sms", &TuningValues::dispatch_sms, kMaxSms, kNormal | kLowLatency},
    {"combine_sms", &TuningValues::combine_sms, kMaxSms, kNormal | kLowLatency},
    {"quantized_dispatch_sms", &TuningValues::quantized_dispatch_sms, kMaxSms, kNormal},
    {"sms", &TuningValues::sms, kMaxSms, kWhole},
    {"dispatch_warps", &TuningValues::dispatch_warps, kMaxDispatchWarps, kNormal},
    {"dispatch_warps", &TuningValues::dispatch_warps, kMaxLowLatencyWarps, kLowLatency},
    {"dispatch_stages", &TuningValues::dispatch_stages, kMaxDispatchStages, kNormal},
    {"combine_warps", &TuningValues::combine_warps, kMaxCombineWarps, kNormal},
    {"combine_warps", &TuningValues::combine_warps, kMaxLowLatencyWarps, kLowLatency},
    {"warps", &TuningValues::warps, kMaxLowLatencyWarps, bit(TuningMode::flat)},
    {"warps", &TuningValues::warps, kMaxLedgerWarps, bit(TuningMode::ledger)},
    {"pieces", &TuningValues::pieces, 16, kLowLatency},
    {"chunk_kib", &TuningValues::chunk_kib, kMaxChunkKib, bit(TuningMode::ledger)},
};

struct Pair {
  std::string_view key, value;
};

/// One line of a file, with errors that state its position.
class Line {
 public:
  Line(const std::string& file, int number, std::string_view text) : file_(file), number_(number), rest_(text) {}

  /// `what` may quote the file, so control characters are replaced.
  [[noreturn]] void fail(std::string what) const {
    std::replace_if(
        what.begin(), what.end(), [](unsigned char c) { return c < ' ' || c == 0x7f; }, '?');
    throw Error(ErrorCode::invalid_argument, file_ + ", line " + std::to_string(number_) + ": " + what);
  }

  /// The next KEY=VALUE or KEY="VALUE"; nullopt at the end.
  std::optional<Pair> next() {
    rest_.remove_prefix(std::min(rest_.find_first_not_of(" \t"), rest_.size()));
    if (rest_.empty()) return std::nullopt;
    const size_t equals = rest_.find('='), space = rest_.find_first_of(" \t");
    if (equals == std::string_view::npos || equals == 0 || space < equals)
      fail("'" + std::string(rest_.substr(0, space)) + "' given: must be KEY=VALUE");
    Pair pair{rest_.substr(0, equals), {}};
    rest_.remove_prefix(equals + 1);
    const bool quoted = !rest_.empty() && rest_[0] == '"';
    const size_t end = quoted ? rest_.find('"', 1) : std::min(rest_.find_first_of(" \t"), rest_.size());
    if (end == std::string_view::npos) fail(std::string(pair.key) + ": the closing quote is missing");
    pair.value = quoted ? rest_.substr(1, end - 1) : rest_.substr(0, end);
    rest_.remove_prefix(quoted ? end + 1 : end);
    return pair;
  }

  int64_t integer(const Pair& pair, int64_t max) const {
    int64_t value = 0;
    const auto [end, error] = std::from_chars(pair.value.data(), pair.value.data() + pair.value.size(), value);
    if (error != std::errc() || end != pair.value.data() + pair.value.size() || value < 1 || value > max)
      fail(std::string(pair.key) + " = '" + std::string(pair.value) + "': must be an integer in [1, " + std::to_string(max) +
           "]");
    return value;
  }

  TuningMode mode(const Pair& pair) const {
    if (const auto known = from_string<TuningMode>(pair.value)) return *known;
    fail("mode = '" + std::string(pair.value) + "': must be " +
         detail::names_where<TuningMode>([](TuningMode) { return true; }));
  }

 private:
  const std::string& file_;
  int number_;
  std::string_view rest_;
};

constexpr const char* kNeeded[] = {"device", "mode", "ranks", "hidden", "tokens"};

std::string allowed_keys(TuningMode mode) {
  std::string names;
  for (const char* name : kNeeded) names += std::string(names.empty() ? "" : ", ") + name;
  for (const ValueKey& v : kValues)
    if (v.modes & bit(mode)) names += std::string(", ") + v.name;
  return names;
}

/// Returns false if the key of `pair` is not common to all entries.
bool take_key(const Line& line, const Pair& pair, TuningKey& key) {
  if (pair.key == "device") {
    if (pair.value.empty()) line.fail("device = '': must be cpu, cuda or the name of a GPU");
    key.device = pair.value;
  } else if (pair.key == "mode") {
    key.mode = line.mode(pair);
  } else if (pair.key == "ranks") {
    key.ranks = static_cast<int>(line.integer(pair, kMaxRanks));
  } else if (pair.key == "hidden") {
    key.hidden = line.integer(pair, int64_t{1} << 24);
  } else if (pair.key == "tokens") {
    key.max_tokens = line.integer(pair, int64_t{1} << 26);
  } else {
    return false;
  }
  return true;
}

TuningEntry parse_entry(Line line, int number) {
  TuningEntry entry;
  entry.line = number;
  std::vector<Pair> values;
  std::set<std::string_view> seen;
  while (const auto pair = line.next()) {
    if (!seen.insert(pair->key).second) line.fail("'" + std::string(pair->key) + "' given twice: allowed once");
    if (!take_key(line, *pair, entry.key)) values.push_back(*pair);
  }
  for (const char* name : kNeeded)
    if (seen.count(name) == 0)
      line.fail(std::string(name) + " is missing: every entry needs device, mode, ranks, hidden, tokens");
  for (const Pair& pair : values) {
    const auto* known = std::find_if(std::begin(kValues), std::end(kValues), [&](const ValueKey& v) {
      return v.name == pair.key && (v.modes & bit(entry.key.mode)) != 0;
    });
    if (known == std::end(kValues))
      line.fail("unknown key '" + std::string(pair.key) + "': mode " + to_string(entry.key.mode) + " has " +
                allowed_keys(entry.key.mode));
    entry.values.*known->target = static_cast<int>(line.integer(pair, known->max));
  }
  return entry;
}

double distance(const TuningKey& a, const TuningKey& b) {
  const auto octaves = [](int64_t x, int64_t y) {
    return std::abs(std::log2(static_cast<double>(std::max<int64_t>(x, 1)) / static_cast<double>(std::max<int64_t>(y, 1))));
  };
  return octaves(a.max_tokens, b.max_tokens) + octaves(a.hidden, b.hidden) + 2 * octaves(a.ranks, b.ranks);
}

}  // namespace

const char* to_string(TuningMode mode) noexcept { return to_string<TuningMode>(mode); }

std::string TuningEntry::text() const {
  std::string out = "device=\"" + key.device + "\" mode=" + to_string(key.mode) + " ranks=" + std::to_string(key.ranks) +
                    " hidden=" + std::to_string(key.hidden) + " tokens=" + std::to_string(key.max_tokens);
  for (const ValueKey& v : kValues)
    if (values.*v.target > 0 && (v.modes & bit(key.mode)) != 0)
      out += std::string(" ") + v.name + "=" + std::to_string(values.*v.target);
  return out;
}

const char* TuningFile::first_line() noexcept { return kFirstLine; }

TuningFile TuningFile::parse(const std::string& text, const std::string& name) {
  TuningFile file{name, {}};
  std::string_view rest = text;
  for (int number = 1; number == 1 || !rest.empty(); ++number) {
    const size_t end = std::min(rest.find('\n'), rest.size());
    std::string_view line = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    line = line.substr(0, line.find_last_not_of(" \t\r") + 1);
    if (number == 1) {
      if (line != kFirstLine)
        Line(name, number, line).fail("'" + std::string(line.substr(0, 40)) + "' given: must be '" + kFirstLine + "'");
      continue;
    }
    const size_t begin = line.find_first_not_of(" \t");
    if (begin == std::string_view::npos || line[begin] == '#') continue;
    file.entries.push_back(parse_entry(Line(name, number, line), number));
  }
  return file;
}

TuningFile TuningFile::read(const std::string& path) {
  const auto fail = [&](const char* why) { throw Error(ErrorCode::invalid_argument, path + ": cannot be read: " + why); };
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) fail("is not a regular file");
  std::ifstream in(path, std::ios::binary);
  if (!in) fail(std::strerror(errno));
  return parse({std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()}, path);
}

const TuningEntry* TuningFile::nearest(const TuningKey& key) const {
  const auto of_device = [&](std::string_view device) {
    const TuningEntry* best = nullptr;
    double least = std::numeric_limits<double>::infinity();
    for (const TuningEntry& entry : entries) {
      if (entry.key.device != device || entry.key.mode != key.mode) continue;
      const double here = distance(entry.key, key);
      if (here < least) best = &entry, least = here;
    }
    return best;
  };
  const TuningEntry* const own = of_device(key.device);
  return own != nullptr || key.device == "cpu" ? own : of_device(kAnyGpu);
}

Tuning Tuning::from_environment() {
  std::vector<TuningFile> files;
  const char* path = std::getenv(kVariable);
  if (path && *path) {
    try {
      files.push_back(TuningFile::read(path));
    } catch (const Error& error) {
      throw Error(error.code(), std::string(kVariable) + ": " + error.what());
    }
  }
  files.push_back(TuningFile::parse(kBuiltIn, "built-in values"));
  return Tuning(std::move(files));
}

TuningValues Tuning::find(const TuningKey& key) const {
  for (const TuningFile& file : files_)
    if (const TuningEntry* entry = file.nearest(key)) return entry->values;
  return {};
}

}  // namespace switchyard

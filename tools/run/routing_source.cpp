// SPDX-License-Identifier: Apache-2.0
#include "run/routing_source.hpp"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <limits>

#include "cli/build_info.hpp"
#include "cli/options.hpp"
#include "cli/verb.hpp"
#include "cli/words.hpp"
#include "run/rows.hpp"

namespace switchyard::tool {
namespace {

/// A word, its meaning, and the meaning of the number that may follow it.
struct Word {
  const char* name;
  const char* number;
  const char* meaning;
  bool whole = false;  ///< an integer >= 0
};
constexpr Word kWords[] = {
    {"recorded", "layer=N", "the recording of the project: a trained gate of 256 experts, top-8, on real text"},
    {"uniform", "", "all experts equally likely"},
    {"zipf", "exponent", "skewed: the i-th most popular expert has a probability proportional to i^-exponent (1.2)"},
    {"group_limited", "groups", "experts of 4 of 8 groups (or of as many as given), uniform inside them", true},
    {"gate", "", "the DeepSeek-V3 gate: sigmoid, correction bias, 4 of 8 groups, normalized weights"},
    {"softmax", "", "softmax over the logits, top-k (Mixtral, Qwen)"},
    {"round_robin", "", "exactly balanced"},
    {"rank_skew", "ratio", "the experts of rank 0 receive this multiple of the mean routes of a rank (1.8)"},
    {"all_to_one", "rank", "all routes go to the experts of one rank (0)", true},
    {"one_expert", "expert", "one route of each token goes to one expert (0); the others are dropped", true},
    {"drops", "fraction", "uniform, with a fraction of the routes dropped (0.3)"},
    {"duplicates", "", "uniform, but a token may name an expert twice"},
};

const Word* find_word(const std::string& name) {
  for (const Word& word : kWords) {
    if (name == word.name) return &word;
  }
  return nullptr;
}

std::optional<double> to_number(const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

bool exists(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::exists(path, ignored);
}

bool looks_like_path(const std::string& text) {
  return text.find('/') != std::string::npos || text.find(".safetensors") != std::string::npos ||
         text.find(".npy") != std::string::npos || exists(text);
}

/// The number after a word, if present. \throws UsageError
std::optional<double> number_of(const std::string& flag, const std::string& spec, const Word& word) {
  const size_t colon = spec.find(':');
  if (colon == std::string::npos) return std::nullopt;
  const std::string text = spec.substr(colon + 1);
  if (word.whole) return static_cast<double>(parse_integer(flag + " " + word.name, text, 0, std::numeric_limits<int>::max()));
  const std::optional<double> number = to_number(text);
  if (number && *word.number != 0) return number;
  const std::string alone = "'" + std::string(word.name) + "'";
  throw UsageError(fmt::format(
      "{}: '{}' given; allowed: {}", flag, spec,
      *word.number == 0 ? alone + ", without a number" : fmt::format("{} or '{}:<{}>'", alone, word.name, word.number)));
}

/// The layer in "layer=3"; none if `text` has another form. \throws UsageError
std::optional<int> layer_of(const std::string& flag, const std::string& text) {
  if (text.rfind("layer=", 0) != 0) return std::nullopt;
  return static_cast<int>(parse_integer(flag + " layer", text.substr(6), 0, 1 << 20));
}

Routing slice(const Routing& all, int64_t first, int64_t tokens) {
  Routing part;
  part.num_experts = all.num_experts;
  part.topk = all.topk;
  part.num_tokens = tokens;
  const auto begin = static_cast<std::ptrdiff_t>(first * all.topk);
  const auto end = static_cast<std::ptrdiff_t>((first + tokens) * all.topk);
  part.topk_ids.assign(all.topk_ids.begin() + begin, all.topk_ids.begin() + end);
  if (!all.topk_weights.empty()) part.topk_weights.assign(all.topk_weights.begin() + begin, all.topk_weights.begin() + end);
  return part;
}

/// Fraction of a recorded layer's routes whose id is outside [0, experts).
double share_without_expert(const RoutingFile& file, int layer, int experts) {
  int64_t routes = 0, without = 0;
  for (int r = 0; r < file.ranks(layer); ++r) {
    const Routing routing = file.read(layer, r, experts);
    routes += std::ssize(routing.topk_ids);
    without +=
        std::count_if(routing.topk_ids.begin(), routing.topk_ids.end(), [&](int32_t id) { return id < 0 || id >= experts; });
  }
  return routes > 0 ? static_cast<double>(without) / static_cast<double>(routes) : 0;
}

/// Logits of one token without a model, in closed form and with about the spread of a trained gate's.
void make_up_logits(uint64_t seed, int rank, int64_t token, float* out, int64_t experts) {
  fill_row(out, DType::f32, experts,
           row_key(seed, 77, RowKind::bias, static_cast<uint64_t>(rank), static_cast<uint64_t>(token)));
}

}  // namespace

std::vector<std::string> RoutingSource::words() {
  std::vector<std::string> names;
  for (const Word& word : kWords) names.emplace_back(word.name);
  return names;
}

std::string RoutingSource::help() {
  std::string text = "Routing sources (--routing):\n";
  for (const Word& word : kWords) {
    const std::string name = std::string(word.name) + (*word.number != 0 ? std::string("[:") + word.number + "]" : "");
    text += fmt::format("  {:<22} {}\n", name, word.meaning);
  }
  text +=
      fmt::format("  {:<22} {}\n", "FILE[:layer=N]", "a recording: .safetensors, .npy or a folder of .npy (docs/routing.md)");
  return text;
}

RoutingSource::RoutingSource(const std::string& flag, const std::string& spec, const RoutingGeometry& geometry)
    : spec_(spec), world_(geometry.world), seed_(geometry.seed) {
  const size_t colon = spec.rfind(':');
  const std::optional<int> layer = colon == std::string::npos ? std::nullopt : layer_of(flag, spec.substr(colon + 1));
  const std::string path = layer ? spec.substr(0, colon) : spec;
  std::string name = path.substr(0, path.find(':'));
  std::replace(name.begin(), name.end(), '-', '_');
  const Word* word = name.size() == path.size() || !exists(path) ? find_word(name) : nullptr;
  if (word != nullptr && name == "recorded") {
    if (name.size() != path.size())
      throw UsageError(fmt::format("{}: '{}' given; allowed: 'recorded' or 'recorded:layer=N'", flag, spec));
    use_default(flag, layer, geometry);
  } else if (word != nullptr) {
    use_word(flag, name, number_of(flag, spec, *word), geometry);
  } else if (looks_like_path(path)) {
    use_file(flag, path, layer, geometry);
  } else {
    throw UsageError(fmt::format("{}: '{}' given; allowed: {}, or the path of a recording.{}", flag, spec,
                                 joined(words(), ", "), did_you_mean(name, words())));
  }
}

void RoutingSource::use_default(const std::string& flag, std::optional<int> layer, const RoutingGeometry& g) {
  const std::string path = find_data_file(kDefaultRecording);
  if (path.empty())
    throw UsageError(
        fmt::format("{}: the recording of the project was not found; searched {}. Give a FILE, or set "
                    "SWITCHYARD_DATA_DIR to the project's data folder, or use --routing zipf",
                    flag, data_search_path(kDefaultRecording)));
  use_file(flag, path, layer, g);
}

void RoutingSource::use_word(const std::string& flag, const std::string& word, const std::optional<double>& number,
                             const RoutingGeometry& g) {
  experts_ = static_cast<int>(g.experts > 0 ? g.experts : g.default_experts);
  topk_ = g.topk > 0 ? static_cast<int>(g.topk) : 8;
  if (topk_ > experts_)
    throw UsageError(fmt::format("--topk: {} given, which exceeds --experts {}; allowed: 1 to {}",
                                 g.topk > 0 ? std::to_string(topk_) : fmt::format("auto ({})", topk_), experts_, experts_));
  generator_.num_experts = experts_;
  generator_.topk = topk_;
  generator_.world = world_;
  generator_.seed = seed_;
  description_ = word;
  if (word == "gate" || word == "softmax") {
    kind_ = word == "gate" ? Kind::deepseek : Kind::softmax;
    description_ = word == "gate" ? "DeepSeek-V3 gate" : "softmax gate";
  } else if (word == "zipf") {
    generator_.pattern = Pattern::zipf;
    generator_.zipf_exponent = number.value_or(1.2);
    description_ = fmt::format("zipf, exponent {:g}", generator_.zipf_exponent);
  } else if (word == "group_limited") {
    generator_.pattern = Pattern::group_limited;
    generator_.topk_groups = static_cast<int>(number.value_or(4));
    description_ = fmt::format("{} of {} groups", generator_.topk_groups, generator_.num_groups);
  } else if (word == "rank_skew") {
    generator_.pattern = Pattern::rank_skew;
    generator_.rank_skew = number.value_or(std::min(1.8, static_cast<double>(world_)));
    description_ = fmt::format("rank_skew, {:g} times the mean on rank 0", generator_.rank_skew);
  } else if (word == "round_robin") {
    generator_.pattern = Pattern::round_robin;
  } else if (word == "all_to_one" || word == "one_expert") {
    generator_.pattern = Pattern::all_to_one;
    generator_.target_is_expert = word == "one_expert";
    generator_.target = static_cast<int>(number.value_or(0));
    description_ = fmt::format("all to {} {}", word == "one_expert" ? "expert" : "rank", generator_.target);
  } else if (word == "drops") {
    generator_.drop_fraction = number.value_or(0.3);
    description_ = fmt::format("uniform, {:g} % dropped", 100 * generator_.drop_fraction);
  } else if (word == "duplicates") {
    generator_.duplicates = true;
    description_ = "uniform with duplicates";
  }
  try {
    if (is_gate()) {
      gate(nullptr, 0);
    } else {
      generate(generator_, 0, 0);
    }
  } catch (const Error& e) {
    throw UsageError(fmt::format("{}: '{}' does not fit --experts {} --topk {} with {} ranks: {}", flag, spec_, experts_, topk_,
                                 world_, e.what()));
  }
}

void RoutingSource::use_file(const std::string& flag, const std::string& path, std::optional<int> layer,
                             const RoutingGeometry& g) {
  kind_ = Kind::recording;
  if (access(path.c_str(), R_OK) != 0)
    throw UsageError(fmt::format("{}: cannot read '{}': {}", flag, path, std::strerror(errno)));
  try {
    file_ = std::make_shared<RoutingFile>(RoutingFile::open(path));
  } catch (const Error& e) {
    throw UsageError(fmt::format("{}: {}", flag, e.what()));
  }
  const std::vector<int> layers = file_->layers();
  layer_ = layer.value_or(layers.front());
  if (std::find(layers.begin(), layers.end(), layer_) == layers.end()) {
    std::string names;
    for (const int l : layers) names += (names.empty() ? "" : ", ") + (l == kNoLayer ? std::string("none") : std::to_string(l));
    throw UsageError(fmt::format("{}: layer {} given; {} has layers: {}", flag, layer_, path, names));
  }
  topk_ = file_->topk(layer_);
  if (g.topk > 0 && g.topk != topk_)
    throw UsageError(fmt::format("--topk: {} given; the recording {} has {}", g.topk, path, topk_));
  experts_ = file_->num_experts() > 0 ? file_->num_experts() : static_cast<int>(g.experts);
  if (experts_ == 0)
    throw UsageError(fmt::format("--experts is needed: the recording {} does not say how many experts there are", path));
  if (g.experts > 0 && g.experts != experts_) {
    throw UsageError(fmt::format("--experts: {} given; the recording {} has {}", g.experts, path, experts_));
  }
  const std::string name = std::filesystem::path(path).filename().string();
  description_ = fmt::format("recorded on {} ranks ({}{})", file_->ranks(layer_), name,
                             layer_ == kNoLayer ? "" : fmt::format(", layer {}", layer_));
  const double without = share_without_expert(*file_, layer_, experts_);
  if (without > 0) description_ += fmt::format(", {:.2g} % of routes without an expert", 100 * without);
}

Routing RoutingSource::gate(const float* logits, int64_t tokens) const {
  if (kind_ == Kind::softmax) return route(SoftmaxGate{experts_, topk_, true}, logits, tokens);
  DeepSeekV3Gate config;
  config.num_experts = experts_;
  config.topk = topk_;
  if (experts_ % config.num_groups != 0) config.num_groups = config.topk_groups = 1;
  std::vector<float> bias(static_cast<size_t>(experts_));
  for (size_t e = 0; e < bias.size(); ++e) bias[e] = 0.02f * (static_cast<float>((e * 37) % 101) / 50.0f - 1.0f);
  return route(config, logits, tokens, bias.data());
}

std::vector<Routing> RoutingSource::batches(int rank, int64_t tokens, int64_t count) const {
  Routing all;
  switch (kind_) {
    case Kind::generator: all = generate(generator_, rank, tokens * count); break;
    case Kind::recording: all = file_->read_share(layer_, rank, tokens * count, experts_); break;
    case Kind::deepseek:
    case Kind::softmax: {
      std::vector<float> logits(static_cast<size_t>(tokens * count * experts_));
      for (int64_t t = 0; t < tokens * count; ++t) make_up_logits(seed_, rank, t, logits.data() + t * experts_, experts_);
      all = gate(logits.data(), tokens * count);
      break;
    }
  }
  std::vector<Routing> parts;
  for (int64_t i = 0; i < count; ++i) parts.push_back(slice(all, i * tokens, tokens));
  return parts;
}

std::vector<Routing> RoutingSource::all_ranks(int64_t tokens) const {
  std::vector<Routing> all;
  for (int r = 0; r < world_; ++r) all.push_back(std::move(batches(r, tokens, 1).front()));
  return all;
}

}  // namespace switchyard::tool

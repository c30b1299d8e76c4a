// SPDX-License-Identifier: Apache-2.0
// Sources of routing: a recording, a generator, or a gate, selected by a single word on the command line.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "switchyard/routing.hpp"

namespace switchyard::tool {

/// Path of the project's recording, relative to the data folder.
inline constexpr const char* kDefaultRecording = "routing/moe_lm_e256_k8_layer3.safetensors";

/// Geometry requested on the command line; 0 means the recording's value or the default.
struct RoutingGeometry {
  int64_t experts = 0;
  int64_t topk = 0;
  int world = 1;
  uint64_t seed = 1;
  int64_t default_experts = 256;  ///< together with 8 experts per token, the geometry of DeepSeek-V3
};

/// A source of routing for all ranks in a group. Immutable after construction; const functions may be called from any thread.
class RoutingSource {
 public:
  /// `spec` is either one of words() with an optional ":number", or the path of a recording with an optional ":layer=N"; the
  /// word `recorded` also accepts ":layer=N". If a file named exactly `spec` exists, it takes precedence over a word with a
  /// suffix. \throws UsageError naming `flag`, also for a missing file; switchyard::Error(io) for a file that is not a
  /// recording
  RoutingSource(const std::string& flag, const std::string& spec, const RoutingGeometry& geometry);

  int experts() const { return experts_; }
  int topk() const { return topk_; }
  /// "uniform", "zipf, exponent 1.2", "recorded on 8 ranks (moe_lm_e256_k8_layer3.safetensors, layer 3)".
  const std::string& description() const { return description_; }
  const std::string& spec() const { return spec_; }
  /// True for `gate` and `softmax`, which compute ids from logits. The demo computes the logits from the rows (see gate());
  /// other verbs use synthetic logits.
  bool is_gate() const { return kind_ == Kind::deepseek || kind_ == Kind::softmax; }
  /// Routes by this source's gate. \pre is_gate()
  Routing gate(const float* logits, int64_t tokens) const;

  /// `count` consecutive batches of `tokens` tokens each for a rank. A rank's batches are the same on every rank that requests
  /// them.
  std::vector<Routing> batches(int rank, int64_t tokens, int64_t count) const;
  /// One batch for each rank.
  std::vector<Routing> all_ranks(int64_t tokens) const;

  /// The words, and a help text that describes them.
  static std::vector<std::string> words();
  static std::string help();

 private:
  enum class Kind { generator, recording, deepseek, softmax };
  void use_word(const std::string& flag, const std::string& word, const std::optional<double>& number,
                const RoutingGeometry& g);
  void use_default(const std::string& flag, std::optional<int> layer, const RoutingGeometry& g);
  void use_file(const std::string& flag, const std::string& path, std::optional<int> layer, const RoutingGeometry& g);

  Kind kind_ = Kind::generator;
  std::string spec_;
  std::string description_;
  int experts_ = 256;
  int topk_ = 8;
  int world_ = 1;
  uint64_t seed_ = 1;
  GeneratorSpec generator_;
  std::shared_ptr<const RoutingFile> file_;
  int layer_ = kNoLayer;
};

}  // namespace switchyard::tool

// SPDX-License-Identifier: Apache-2.0
// Where routing comes from: a recording, a generator, or a gate, named by one word on the command line.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "switchyard/routing.hpp"

namespace switchyard::tool {

/// The recording that comes with the project, below the data folder.
inline constexpr const char* kDefaultRecording = "routing/moe_lm_e256_k8_layer3.safetensors";

/// Geometry wanted on the command line; 0: the recording's own, or the usual numbers.
struct RoutingGeometry {
  int64_t experts = 0;
  int64_t topk = 0;
  int world = 1;
  uint64_t seed = 1;
  int64_t default_experts = 256;  ///< as DeepSeek-V3, like 8 experts per token
};

/// A source of routing for all ranks of a group. Immutable after construction; const calls from any thread.
class RoutingSource {
 public:
  /// `spec` is one of words(), with an optional ":number", or the path of a recording, with an optional ":layer=N", which also
  /// the word `recorded` takes. A file of that whole name wins over a word with something behind it. \throws UsageError naming
  /// `flag`, also for a file that is not there; switchyard::Error(io) for one that is no recording.
  RoutingSource(const std::string& flag, const std::string& spec, const RoutingGeometry& geometry);

  int experts() const { return experts_; }
  int topk() const { return topk_; }
  /// "uniform", "zipf, exponent 1.2", "recorded on 8 ranks (moe_lm_e256_k8_layer3.safetensors, layer 3)".
  const std::string& description() const { return description_; }
  const std::string& spec() const { return spec_; }
  /// True for `gate` and `softmax`: ids come from logits. The demo makes them from the rows (see gate()); others take made-up
  /// ones.
  bool is_gate() const { return kind_ == Kind::deepseek || kind_ == Kind::softmax; }
  /// Routes by this source's gate. \pre is_gate()
  Routing gate(const float* logits, int64_t tokens) const;

  /// `count` consecutive batches of `tokens` tokens of a rank. Every rank's are the same wherever they are asked for.
  std::vector<Routing> batches(int rank, int64_t tokens, int64_t count) const;
  /// One batch of every rank.
  std::vector<Routing> all_ranks(int64_t tokens) const;

  /// The words, and a help text about them.
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

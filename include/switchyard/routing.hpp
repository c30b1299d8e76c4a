// SPDX-License-Identifier: Apache-2.0
/// \file
/// Routing input: the experts of each token. Provides gates that compute it from logits, generators of synthetic routing, and
/// files of recorded routing. Host code, single-threaded, requiring no group; docs/routing.md describes how to record a running
/// model. Library switchyard_workload (CMake: switchyard::workload).
///
/// All functions are local, synchronous and free of global state: different threads may call them concurrently, and const
/// objects may be shared between threads. Identical inputs give bit-identical results on every machine (IEEE 754 arithmetic,
/// with the library's own exp and log).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "switchyard/status.hpp"
#include "switchyard/types.hpp"

namespace switchyard {

/// Experts chosen for the tokens of one rank. Dense, row-major.
struct Routing {
  int num_experts = 0;              ///< E
  int topk = 0;                     ///< K in [1, kMaxTopk]
  int64_t num_tokens = 0;           ///< T
  std::vector<int32_t> topk_ids;    ///< [T, K]; an id outside [0, E) means "no expert" (drop)
  std::vector<float> topk_weights;  ///< [T, K], or empty: no weights

  /// Returns the ids as input for dispatch. Valid until `topk_ids` is modified.
  ExpertIds expert_ids() const { return ExpertIds::of(topk_ids.data(), num_tokens, topk); }
};

/// Mean number of distinct ranks to which a token of `routing` is sent, excluding dropped routes; 0 without tokens. Experts are
/// split as in the exchanges, in consecutive ranges of which the first `E mod world` have one more expert. Uniform choices
/// without duplicates over evenly split experts give `W * (1 - C(E - E/W, K) / C(E, K))`, such as 3.614 for E 256, K 8, W 4.
/// \throws Error(invalid_argument) if world is not in [1, kMaxRanks] or the routing's sizes are inconsistent.
double mean_ranks_per_token(const Routing& routing, int world);

/// Throws Error(invalid_argument) unless K, T and E are in range and the vectors have matching sizes.
void check_routing(const Routing& routing);

// ---------------------------------------------------------------------------------------------------------------------- gates

/// Gate of DeepSeek-V3 (technical report, section 2.1.2, and the published inference code): sigmoid scores, a correction bias
/// that affects only the selection, and selection limited to the best groups of consecutive experts.
struct DeepSeekV3Gate {
  int num_experts = 256;  ///< E, a multiple of num_groups
  int topk = 8;           ///< K in [1, kMaxTopk], at most topk_groups * E / num_groups
  int num_groups = 8;     ///< groups of E / num_groups consecutive experts; 1: no groups
  int topk_groups = 4;    ///< groups that a token may use, in [1, num_groups]
  float scaling = 2.5f;   ///< factor of all weights, finite
  bool normalize = true;  ///< weights of a token sum to `scaling`; otherwise weight = score * scaling
};

/// Routes `num_tokens` tokens.
///   score[e]  = 1 / (1 + exp(-logit[e])), computed in float64, rounded to float32
///   choice[e] = score[e] + correction_bias[e], float32
///   group     = sum of its two largest `choice` (or its only one, if it has one expert); the topk_groups largest are kept
///   ids       = the K largest `choice` in the kept groups, in descending order; on ties the lower id (or group) first
///   weights   = score[id] (without the bias) / (their sum, k ascending, + 1e-20) * scaling, float32
/// Experts outside the kept groups are never chosen, even if their `choice` is larger than that of chosen experts.
/// \param logits float32 [tokens, E]; infinities are allowed, NaN is not
/// \param correction_bias float32 [E], finite, or null for zeros
/// \throws Error(invalid_argument) naming the setting, or the token and expert, that is out of range.
Routing route(const DeepSeekV3Gate& gate, const float* logits, int64_t num_tokens, const float* correction_bias = nullptr);

/// Softmax gate. With `renormalize`, a token's weights sum to 1 (Mixtral: softmax over the chosen logits; Qwen with
/// norm_topk_prob). Otherwise, a weight is the probability among all experts (Qwen without norm_topk_prob).
struct SoftmaxGate {
  int num_experts = 8;  ///< E >= 1
  int topk = 2;         ///< K in [1, min(E, kMaxTopk)]
  bool renormalize = true;
};

/// Routes `num_tokens` tokens to the experts with the K largest logits, in descending order; on ties, the lower id comes first.
/// weight = exp(logit - max), divided by the sum of these values over the chosen experts (renormalize) or all experts; computed
/// in float64, rounded to float32.
/// \param logits float32 [tokens, E]; -inf masks an expert, which is then chosen only if fewer than K others are left, with
/// weight 0. NaN, +inf and a token without any finite logit are errors.
/// \throws Error(invalid_argument) naming the setting, or the token and expert, that is out of range.
Routing route(const SoftmaxGate& gate, const float* logits, int64_t num_tokens);

/// Gate projection: float32 [tokens, E] = rows [tokens, H] times transposed gate weights [E, H]. Products and sums are float32,
/// with columns in ascending order. Implemented as a simple loop for demos and tests: about 1 s for 4096 tokens, H 1024, E 256
/// on one core.
/// \param rows, gate_weights bf16, f16 or f32, `cols` equal
/// \throws Error(invalid_argument) for fp8, different `cols`, negative sizes, or null data with a nonzero size.
std::vector<float> gate_logits(const ConstRows& rows, const ConstRows& gate_weights);

// ----------------------------------------------------------------------------------------------------------------- generators

/// Kinds of synthetic routing. The choice of experts depends only on (seed, rank, token) and the specification.
enum class Pattern : uint8_t {
  uniform = 0,        ///< all experts equally likely
  zipf = 1,           ///< the i-th most popular expert (i from 0) has likelihood (i + 1)^-zipf_exponent; popularity is shuffled
                      ///< over the ids by the seed, equally on all ranks; without duplicates: drawn without replacement
  all_to_one = 2,     ///< all routes to `target`, see GeneratorSpec
  round_robin = 3,    ///< id[t][k] = (t * K + k) mod E on every rank: exactly balanced if E divides T * K
  group_limited = 4,  ///< topk_groups of num_groups groups of consecutive experts uniformly, then uniformly among their experts
  /// the experts of rank `target` receive rank_skew times the mean number of routes per rank; each token contributes
  /// K*rank_skew/W of these routes, rounded up or down; uniform within the experts of `target` and within all others
  rank_skew = 5,
};

/// Convert to and from a stable name such as "all_to_one". \throws Error(invalid_argument) listing the names.
const char* to_string(Pattern pattern) noexcept;
Pattern pattern_from_string(const std::string& name);

/// Parameters of a generator; identical on all ranks.
struct GeneratorSpec {
  Pattern pattern = Pattern::uniform;
  int num_experts = 256;          ///< E in [1, 2^24]
  int topk = 8;                   ///< K in [1, kMaxTopk]; without duplicates at most the number of experts that can be chosen
  int world = 1;                  ///< W in [1, kMaxRanks]; used only by all_to_one to a rank and rank_skew
  double zipf_exponent = 1.2;     ///< in [0, 16]
  bool target_is_expert = false;  ///< all_to_one: `target` is an expert instead of a rank
  int target = 0;  ///< all_to_one: rank whose experts receive all routes (uniformly), or the one expert that does. A single
                   ///< expert is chosen once per token and the other routes are dropped; with `duplicates` it is chosen K
                   ///< times. rank_skew: the rank with the given ratio
  double rank_skew = 1.8;    ///< rank_skew: in [0, W]; requires enough experts on and off rank `target`
  int num_groups = 8;        ///< group_limited; divides E
  int topk_groups = 4;       ///< group_limited; in [1, num_groups]
  double drop_fraction = 0;  ///< probability, in [0, 1], that a route is dropped (id -1); does not change the other ids
  bool duplicates = false;   ///< draw the K choices of a token independently, so that an expert may occur twice
  uint64_t seed = 1;
};

/// Generates routing for `num_tokens` tokens on `rank`. Reproducible on any platform: the random numbers for token t of rank r
/// are a SplitMix64 sequence seeded by a mix of (seed, r, t) (docs/routing.md), so the routing for fewer tokens is a prefix of
/// that for more. A token's ids are distinct unless `duplicates` is set. Dropped routes have id -1 and weight 0; a token's kept
/// weights are positive and sum to 1.
/// \throws Error(invalid_argument) naming the field, rank (must be in [0, world)) or number of tokens (must be >= 0) that is
/// out of range.
Routing generate(const GeneratorSpec& spec, int rank, int64_t num_tokens);

// ---------------------------------------------------------------------------------------------------------------------- files

/// Layer number of tensors whose names have no `layer{l}.` part.
inline constexpr int kNoLayer = -1;

/// Recorded routing, read from
///   - a `.safetensors` file with tensors `[layer{l}.][rank{r}.]topk_ids`, integers of 8 to 64 bits, signed or unsigned, `[T,
///     K]`, and optionally `[layer{l}.][rank{r}.]topk_weights`, float32, float16 or bfloat16, of the same shape. Without
///     `rank{r}.`, the shape may also be `[R, T, K]`, for R ranks (`[T, K]`: one rank). Other tensors are ignored. The metadata
///     entry `num_experts` gives E.
///   - a `.npy` file of integers (format 1, 2 or 3; little endian, C order), `[T, K]` or `[R, T, K]`. If its name contains
///     `topk_ids`, the weights (float32 or float16) are read from the file with `topk_weights` in its place, if that exists.
///   - a folder of `.npy` files, each named like a tensor above, for example `layer3.rank0.topk_ids.npy`.
/// The kind is detected by content, not by name. Ranks are numbered from 0 without gaps. T may differ by rank; K is the same
/// for all ranks of a layer.
///
/// open() checks all names, types, shapes and sizes without reading data. Its memory use is proportional to the header, and
/// every size field is checked against the file's size before use. read() reads one tensor pair. Files are not kept open. Every
/// malformed file results in Error(io) with the message "<file>: <tensor or 'header'>: expected <what>, found <what>"; Git LFS
/// pointers, compressed files, .npz or PyTorch files, web pages and similar files are reported by kind.
class RoutingFile {
 public:
  RoutingFile(const RoutingFile&) = default;
  RoutingFile& operator=(const RoutingFile&) = default;

  /// \throws Error(io) if the file cannot be opened or is malformed.
  static RoutingFile open(const std::string& path);
  /// Opens a file image in memory, which is copied. `name` is used only in error messages; no separate weights file is searched
  /// for.
  static RoutingFile parse(std::span<const std::byte> image, const std::string& name);

  /// Layers in ascending order; kNoLayer for names without a layer. Never empty.
  std::vector<int> layers() const;
  /// A layer's number of recorded ranks R, its K, whether every rank has weights, and the T of one rank. \throws
  /// Error(invalid_argument) naming the existing layers or ranks.
  int ranks(int layer) const;
  int topk(int layer) const;
  bool has_weights(int layer) const;
  int64_t num_tokens(int layer, int rank) const;
  /// E from the file's metadata, or 0 if it has none. Metadata values are strings (safetensors); the metadata is empty for
  /// `.npy`.
  int num_experts() const noexcept;
  const std::map<std::string, std::string>& metadata() const noexcept;

  /// Returns the recording of one rank. Ids are returned unchanged, except that those outside int32 become -1 (dropped).
  /// \param num_experts E; 0 takes it from the metadata. Required for files without it; must not be less than the metadata's
  /// value.
  /// \throws Error(invalid_argument) for an unknown layer or rank or a wrong num_experts, Error(io) if reading fails or a
  /// weight is not finite (naming its index).
  Routing read(int layer, int rank, int num_experts = 0) const;

  /// Returns `num_tokens` tokens for rank `rank` in a group of any size. They are taken from recorded rank `rank mod R`,
  /// starting at recorded token `(rank / R) * num_tokens` and wrapping around at its end, so groups larger than R reuse no
  /// token until the recording is exhausted.
  /// \throws as read(); also Error(invalid_argument) if num_tokens > 0 and that rank recorded no tokens.
  Routing read_share(int layer, int rank, int64_t num_tokens, int num_experts = 0) const;

  struct Impl;

 private:
  // Not movable because a RoutingFile always refers to a file. Copies share the file.
  explicit RoutingFile(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<const Impl> impl_;
};

/// One entry of a recording.
struct RecordedRouting {
  int layer = kNoLayer;  ///< >= 0, or kNoLayer
  int rank = 0;          ///< >= 0
  Routing routing;
};

/// Writes a recording that RoutingFile can read: `topk_ids` as int32, `topk_weights` as float32, and `metadata` with
/// `num_experts` added. The file is created atomically (written next to `path` and renamed).
/// \throws Error(invalid_argument) if the routing is inconsistent, a (layer, rank) occurs twice, E differs, or metadata is not
///         UTF-8; Error(io) naming the file and the reason.
void write_safetensors(const std::string& path, std::span<const RecordedRouting> recording,
                       const std::map<std::string, std::string>& metadata = {});

/// Writes ids as int32 `.npy`: [T, K] for one rank, [R, T, K] for several ranks, which must have the same T and K. With
/// weights, the file name in `path` must contain `topk_ids`; the weights are written as float32 to the file with `topk_weights`
/// in its place.
/// \throws as write_safetensors.
void write_npy(const std::string& path, std::span<const Routing> ranks);

}  // namespace switchyard

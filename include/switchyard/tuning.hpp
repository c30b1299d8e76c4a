// SPDX-License-Identifier: Apache-2.0
/// \file
/// Tuning: launch shapes that were measured, by device, mode and shape. A group that is formed while SWITCHYARD_TUNING names a
/// file takes them from it; nothing here has to be called for that. docs/tuning.md describes the file and the look-up,
/// `switchyard tune` makes one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "switchyard/status.hpp"
#include "switchyard/types.hpp"

namespace switchyard {

/// What a value is for: a mode, and in normal mode the layout of its objects. `normal`: Layout::rank_major.
enum class TuningMode : uint8_t { normal = 0, low_latency = 1, flat = 2, ledger = 3, normal_expert_major = 4 };
template <>
struct NamesOf<TuningMode> {
  static constexpr Named<TuningMode> kAll[] = {{TuningMode::normal, "normal"},
                                               {TuningMode::low_latency, "low_latency"},
                                               {TuningMode::flat, "flat"},
                                               {TuningMode::ledger, "ledger"},
                                               {TuningMode::normal_expert_major, "normal_expert_major"}};
};
/// "normal", "low_latency", ...
const char* to_string(TuningMode mode) noexcept;

/// Most warps per block, and copies of a warp under way, that the kernels of normal mode are compiled for.
inline constexpr int kMostDispatchWarps = 14, kMostCombineWarps = 20, kMostDispatchStages = 2;
/// Most warps per block of the kernels of low-latency mode, the flat exchange's among them, and of the ledger combine.
inline constexpr int kMostLowLatencyWarps = 16, kMostLedgerWarps = 16;
/// Size of a chunk of the ledger combine in KiB: the largest, and the one that is used without a tuning.
inline constexpr int kMostChunkKib = 1024, kUsualChunkKib = 64;

/// The values of an entry. 0 means that the entry says nothing, and the library chooses. Options that a caller gives win over
/// the values. A call of normal mode that is given another number of multiprocessors than it would take by itself does not use
/// the entry's warps and stages either.
struct TuningValues {
  int dispatch_sms = 0;     ///< normal in both layouts, low_latency: multiprocessors, at most those of the rank
  int combine_sms = 0;      ///< normal in both layouts, low_latency: multiprocessors, at most those of the rank
  int sms = 0;              ///< flat, ledger: multiprocessors, at most those of the rank
  int dispatch_warps = 0;   ///< normal, direct staging: warps per block, in [1, kMostDispatchWarps]; low_latency, too
  int dispatch_stages = 0;  ///< normal, direct staging: in [1, kMostDispatchStages], fewer if shared memory has no room
  int combine_warps = 0;    ///< normal, direct staging: in [1, kMostCombineWarps]; low_latency, too
  int pieces = 0;           ///< low_latency, and flat with it: LowLatencyConfig::pieces
  int warps = 0;            ///< flat, ledger: warps per block, in [1, kMostLowLatencyWarps] and [1, kMostLedgerWarps]
  int chunk_kib = 0;        ///< ledger: rows return in copies of about this many KiB, at least a row; in [1, kMostChunkKib]
  /// normal, direct staging: of dispatches that quantise rows on the way, instead of `dispatch_sms`; 0:
  /// kDefaultQuantizingSms. The warps and stages of an entry are for the other dispatches.
  int quantized_dispatch_sms = 0;

  bool operator==(const TuningValues&) const = default;
};

/// What was measured. `tokens`: NormalConfig::max_tokens and its like.
struct TuningKey {
  std::string device;  ///< "cpu", or the name of the GPU as the driver gives it; of an entry also "cuda": any GPU
  TuningMode mode = TuningMode::normal;
  int ranks = 1;
  int64_t hidden = 1, tokens = 1;

  bool operator==(const TuningKey&) const = default;
};

struct TuningEntry {
  TuningKey key;
  TuningValues values;
  int line = 0;  ///< in its file

  /// As a line of a file.
  std::string text() const;
};

/// A tuning file.
struct TuningFile {
  std::string name;
  std::vector<TuningEntry> entries;  ///< by line

  /// \throws Error(invalid_argument) naming file, line, key, what was given and what is allowed.
  static TuningFile parse(const std::string& text, const std::string& name);
  /// Parses the file at `path`. Throws as parse does, and if the file cannot be read.
  static TuningFile read(const std::string& path);
  static const char* first_line() noexcept;

  /// The entry of this device and mode that is nearest to `key`, or null: least |log2| of tokens + of hidden + 2 * of ranks,
  /// the earlier line if several are equally near. Entries of any GPU count if there is none of this GPU and mode.
  const TuningEntry* nearest(const TuningKey& key) const;
};

/// What is in force: the file that SWITCHYARD_TUNING names, if it is set and not empty, then what is built in.
class Tuning {
 public:
  /// \throws as TuningFile::read, also naming the variable.
  static Tuning from_environment();
  explicit Tuning(std::vector<TuningFile> files) : files_(std::move(files)) {}

  /// Values of the nearest entry in the first file that has one of this device and mode; else all 0.
  TuningValues find(const TuningKey& key) const;
  const std::vector<TuningFile>& files() const noexcept { return files_; }

 private:
  std::vector<TuningFile> files_;
};

}  // namespace switchyard

// SPDX-License-Identifier: Apache-2.0
/// \file
/// Tuning: measured launch shapes by device, mode and problem shape. Groups automatically use the file named by
/// SWITCHYARD_TUNING when they are formed, without calls to this interface. docs/tuning.md describes the file and the lookup;
/// `switchyard tune` writes such a file.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "switchyard/status.hpp"
#include "switchyard/types.hpp"

namespace switchyard {

/// Mode to which a value applies and, for normal mode, the layout. `normal`: Layout::rank_major.
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

/// Maximum warps per block and maximum copies in flight per warp for which normal-mode kernels are compiled.
inline constexpr int kMaxDispatchWarps = 14, kMaxCombineWarps = 20, kMaxDispatchStages = 2;
/// Maximum warps per block of the kernels for low-latency mode (including the flat exchange) and the ledger combine.
inline constexpr int kMaxLowLatencyWarps = 16, kMaxLedgerWarps = 16;
/// Maximum chunk size of the ledger combine in KiB, and its default without a tuning.
inline constexpr int kMaxChunkKib = 1024, kDefaultChunkKib = 64;

/// Values of an entry; 0 means unset, and the library chooses. The caller's options override these values. A normal-mode call
/// whose num_sms differs from its default also ignores the entry's warps and stages.
struct TuningValues {
  int dispatch_sms = 0;     ///< normal in both layouts, low_latency: multiprocessors, at most those of the rank
  int combine_sms = 0;      ///< normal in both layouts, low_latency: multiprocessors, at most those of the rank
  int sms = 0;              ///< flat, ledger: multiprocessors, at most those of the rank
  int dispatch_warps = 0;   ///< normal, direct staging: warps per block, in [1, kMaxDispatchWarps]; also low_latency
  int dispatch_stages = 0;  ///< normal, direct staging: in [1, kMaxDispatchStages], fewer if shared memory is too small
  int combine_warps = 0;    ///< normal, direct staging: in [1, kMaxCombineWarps]; also low_latency
  int pieces = 0;           ///< low_latency, and flat with it: LowLatencyConfig::pieces
  int warps = 0;            ///< flat, ledger: warps per block, in [1, kMaxLowLatencyWarps] and [1, kMaxLedgerWarps]
  int chunk_kib = 0;        ///< ledger: rows return in copies of about this many KiB, at least a row; in [1, kMaxChunkKib]
  /// normal, direct staging: multiprocessors of quantizing dispatches, in place of `dispatch_sms`; 0: kDefaultQuantizingSms. An
  /// entry's warps and stages apply only to other dispatches.
  int quantized_dispatch_sms = 0;

  bool operator==(const TuningValues&) const = default;
};

/// Key of a measurement. `max_tokens` is NormalConfig::max_tokens or its counterpart.
struct TuningKey {
  std::string device;  ///< "cpu", or the name of the GPU as the driver reports it; in an entry also "cuda": any GPU
  TuningMode mode = TuningMode::normal;
  int ranks = 1;
  int64_t hidden = 1, max_tokens = 1;

  bool operator==(const TuningKey&) const = default;
};

struct TuningEntry {
  TuningKey key;
  TuningValues values;
  int line = 0;  ///< line number in its file

  /// Returns the entry as a line of a tuning file.
  std::string text() const;
};

/// A tuning file.
struct TuningFile {
  std::string name;
  std::vector<TuningEntry> entries;  ///< in line order

  /// \throws Error(invalid_argument) naming the file, the line, the key, the given value and the allowed values.
  static TuningFile parse(const std::string& text, const std::string& name);
  /// Parses the file at `path`. \throws as parse, and also if the file cannot be read.
  static TuningFile read(const std::string& path);
  static const char* first_line() noexcept;

  /// Returns the entry for this device and mode nearest to `key`, or null. The distance is the sum of |log2| of the ratios of
  /// tokens, hidden and ranks, with ranks counted twice; on a tie, the earlier line wins. Entries for any GPU are used only if
  /// there are none for this GPU and mode.
  const TuningEntry* nearest(const TuningKey& key) const;
};

/// The active tuning: the file named by SWITCHYARD_TUNING, if set and not empty, then the built-in table.
class Tuning {
 public:
  /// \throws as TuningFile::read, also naming the variable.
  static Tuning from_environment();
  explicit Tuning(std::vector<TuningFile> files) : files_(std::move(files)) {}

  /// Returns the values of the nearest entry in the first file with an entry for this device and mode, or all 0.
  TuningValues find(const TuningKey& key) const;
  const std::vector<TuningFile>& files() const noexcept { return files_; }

 private:
  std::vector<TuningFile> files_;
};

}  // namespace switchyard

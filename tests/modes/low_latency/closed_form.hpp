// SPDX-License-Identifier: Apache-2.0
// Low-latency calls in closed form: every rank's inputs to call n and its expected results are functions of numbers only. A GPU
// can therefore create the inputs of thousands of queued calls and judge every element of their results without the host. The
// CPU backend runs the same code (closed_form_test.cpp), which also shows that the judge detects errors. Shares no code with
// src/.
//
// All values are integers times powers of two, small enough that every sum is exact in the type of its rows. The suites with an
// oracle cover rounding.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/macros.hpp"
#include "switchyard/types.hpp"

namespace harness {

using switchyard::DType;
using switchyard::ScaleKind;

/// A job is called for each i in [0, size()), in any order, by GPU threads or in a loop.
enum class Checked : int32_t { rows_of_expert, source_range, row_source, row, scale, sum, beyond_tokens };

/// The first mismatch, and the number of mismatches. Initially all zero.
struct Verdict {
  unsigned long long mismatches, rows, calls;  ///< rows, calls: numbers judged
  unsigned long long call;
  long long place;
  int32_t what;
  uint32_t expected, got;

  SWITCHYARD_FN void count_row() { add(&rows); }
  SWITCHYARD_FN void count_call() { add(&calls); }
  SWITCHYARD_FN void judge(Checked kind, uint64_t n, int64_t at, uint32_t want, uint32_t have) {
    if (want == have || add(&mismatches) != 0) return;
    call = n, place = at, what = static_cast<int32_t>(kind), expected = want, got = have;
  }

 private:
  static SWITCHYARD_FN unsigned long long add(unsigned long long* to) {
#if defined(__CUDA_ARCH__)
    return atomicAdd(to, 1ULL);
#else
    return (*to)++;  // each rank has its own verdict
#endif
  }
};

/// The shape of an object, and the rules for its calls.
struct Form {
  uint64_t seed = 1;
  int world = 1, experts = 1, topk = 1, max_tokens = 1, hidden = 16;
  DType type = DType::bf16;
  ScaleKind scales = ScaleKind::none;
  int group = switchyard::kScaleGroup;
  bool column_major = false;

  SWITCHYARD_FN uint64_t draw(uint64_t what, uint64_t n, int64_t a = 0, int64_t b = 0, int64_t c = 0) const {
    uint64_t x = seed;
    for (const uint64_t word : {what, n, static_cast<uint64_t>(a), static_cast<uint64_t>(b), static_cast<uint64_t>(c)}) {
      x = (x ^ word) * 0x9E3779B97F4A7C15u + 0xD1B54A32D192ED03u;
      x = (x ^ x >> 29) * 0xBF58476D1CE4E5B9u;
      x ^= x >> 32;
    }
    return x;
  }
  /// Maps `bits` to [0, n).
  SWITCHYARD_FN int one_of(int n, uint64_t bits) const { return static_cast<int>(bits % static_cast<uint64_t>(n)); }
  /// -3 to 3.
  SWITCHYARD_FN float small(uint64_t bits) const { return static_cast<float>(one_of(7, bits) - 3); }

  SWITCHYARD_FN int first_expert(int rank) const {
    const int more = experts % world;
    return experts / world * rank + (rank < more ? rank : more);
  }
  SWITCHYARD_FN int experts_of(int rank) const { return first_expert(rank + 1) - first_expert(rank); }
  SWITCHYARD_FN int rows_per_expert() const { return world * max_tokens; }
  SWITCHYARD_FN int groups() const { return (hidden + group - 1) / group; }

  // --- Inputs of call n
  SWITCHYARD_FN int tokens(uint64_t n, int rank) const {
    const int kind = one_of(6, draw(1, n, rank));
    return kind == 0 ? 0 : kind == 1 ? max_tokens : one_of(max_tokens + 1, draw(2, n, rank));
  }
  /// T as stored in memory: calls clamp values below 0 or above max_tokens.
  SWITCHYARD_FN int stated_tokens(uint64_t n, int rank) const {
    const int t = tokens(n, rank), way = one_of(4, draw(15, n, rank));
    if (way < 2 || (t != 0 && t != max_tokens)) return t;
    if (t == 0) return way == 2 ? -1 : static_cast<int>(0x80000000);
    return way == 2 ? max_tokens + 1 : 0x7FFFFFFF;
  }
  /// Returns an expert, or an id that is not a route.
  SWITCHYARD_FN int id(uint64_t n, int rank, int t, int k) const {
    const int way = one_of(10, draw(3, n));
    if (way < 2 && one_of(3, draw(4, n, rank, t, k)) == 0) return one_of(2, draw(5, n, rank, t, k)) ? -1 : experts + 7;
    if (way == 2) return one_of(experts, draw(6, n));  // all routes go to one expert
    return one_of(experts, draw(7, n, rank, t, k));
  }
  SWITCHYARD_FN bool is_expert(int e) const { return e >= 0 && e < experts; }
  /// 1/2, 1 or 2.
  SWITCHYARD_FN float weight(uint64_t n, int rank, int t, int k) const {
    return 0.5f * static_cast<float>(1 << one_of(3, draw(9, n, rank, t, k)));
  }
  /// The power of two by which a group of columns is scaled. `given`: the rows were quantized by the caller, unlike any
  /// quantizer does: with different float32 scales, and with groups that have no large element.
  SWITCHYARD_FN float scale(uint64_t n, int rank, int t, int g, bool given = false) const {
    const float power = static_cast<float>(1 << one_of(8, draw(10, n, rank, t, g))) / 16;
    return given && scales == ScaleKind::f32 ? power * static_cast<float>(8 + one_of(8, draw(16, n, rank, t, g))) : power;
  }
  /// Element of a row to be quantized, without its scale: the element's value is this times the scale. Each group has an
  /// element of +-448, so the scale is exact.
  SWITCHYARD_FN float unscaled(uint64_t n, int rank, int t, int c, bool given = false) const {
    const float value = small(draw(11, n, rank, t, c));
    if (scales == ScaleKind::none) return value;
    if (given) return value * static_cast<float>(1 << one_of(6, draw(12, n, rank, t, c)));
    const int begin = c / group * group, length = hidden - begin < group ? hidden - begin : group;
    const bool peak = c - begin == one_of(length, draw(12, n, rank, t, begin));
    return !peak ? value : value < 0 ? -448.0f : 448.0f;
  }
  SWITCHYARD_FN float x(uint64_t n, int rank, int t, int c) const {
    const float value = unscaled(n, rank, t, c);
    return scales == ScaleKind::none ? value : value * scale(n, rank, t, c / group);
  }

  // --- Experts
  SWITCHYARD_FN float factor(int expert) const { return static_cast<float>(1 + one_of(2, draw(13, 0, expert))); }
  /// An expert's answer to a token in combine n.
  SWITCHYARD_FN float answer(uint64_t n, int expert, int source, int t, int c) const {
    return small(draw(14, n, expert * int64_t{64} + source, t, c));
  }

  // --- Derived from the ids
  /// The token's first choice that is `expert`, or topk if there is none.
  SWITCHYARD_FN int first_choice(uint64_t n, int rank, int t, int expert) const {
    int k = 0;
    while (k < topk && id(n, rank, t, k) != expert) ++k;
    return k;
  }
  /// Number of rows that the first `limit` tokens of `source` send to `expert`.
  SWITCHYARD_FN int rows_from(uint64_t n, int source, int limit, int expert) const {
    int rows = 0;
    for (int t = 0; t < limit; ++t) rows += first_choice(n, source, t, expert) < topk ? 1 : 0;
    return rows;
  }
};

/// The bits of a number that is exact in the type.
SWITCHYARD_FN inline uint32_t exact_bits(DType type, float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if (type == DType::f32) return bits;
  if (type == DType::bf16) return bits >> 16;
  const uint32_t sign = bits >> 31, magnitude = bits & 0x7FFFFFFF;
  if (type == DType::f16) return sign << 15 | (magnitude == 0 ? 0 : (magnitude >> 13) - ((127 - 15) << 10));
  return sign << 7 | (magnitude == 0 ? 0 : (magnitude >> 20) - ((127 - 7) << 3));  // fp8 e4m3
}
SWITCHYARD_FN inline uint32_t element(DType type, const void* row, int64_t c) {
  if (type == DType::f32) return static_cast<const uint32_t*>(row)[c];
  if (type == DType::fp8_e4m3) return static_cast<const uint8_t*>(row)[c];
  return static_cast<const uint16_t*>(row)[c];
}
SWITCHYARD_FN inline void set_element(DType type, void* row, int64_t c, uint32_t bits) {
  if (type == DType::f32) {
    static_cast<uint32_t*>(row)[c] = bits;
  } else if (type == DType::fp8_e4m3) {
    static_cast<uint8_t*>(row)[c] = static_cast<uint8_t>(bits);
  } else {
    static_cast<uint16_t*>(row)[c] = static_cast<uint16_t>(bits);
  }
}

/// NaN in every type: the content of memory that must not be read, and of memory that must not be written.
inline constexpr uint32_t kNaN = 0xFFFFFFFF, kUntouched = 0xA5A5A5A5;
SWITCHYARD_FN inline uint32_t truncated(DType type, uint32_t bits) {
  return type == DType::f32 ? bits : type == DType::fp8_e4m3 ? bits & 0xFF : bits & 0xFFFF;
}

/// The number of a call: that of the k-th of `per_replay` calls in a graph that has been replayed *replays times, or just
/// `first`.
struct CallNumber {
  uint64_t first = 0;
  const uint64_t* replays = nullptr;
  uint64_t per_replay = 0;
  SWITCHYARD_FN uint64_t operator()() const { return first + (replays ? *replays * per_replay : 0); }
};

/// A rank's arrays for one call with max_tokens tokens.
struct CallArrays {
  void* x = nullptr;      ///< [max_tokens, H]
  void* codes = nullptr;  ///< x as fp8 with row-major scales, for rows quantized by the caller
  void* scales = nullptr;
  void* ids = nullptr;        ///< [max_tokens, K], int32 or int64
  float* weights = nullptr;   ///< [max_tokens, K]
  float* factors = nullptr;   ///< [local experts]
  int32_t* tokens = nullptr;  ///< [1]
  void* out = nullptr;        ///< [max_tokens, H]
  bool int64_ids = false;
};

/// Fills all arrays. `out` is filled with kUntouched; `codes` and `scales` are skipped if they are null. Entries beyond T are
/// rows of NaN, and experts that no token has chosen.
struct MakeInputs {
  Form f;
  CallNumber number;
  int rank;
  CallArrays a;

  SWITCHYARD_FN int64_t size() const {
    const int64_t elements = int64_t{f.max_tokens} * f.hidden, choices = int64_t{f.max_tokens} * f.topk;
    const int64_t max = elements > choices ? elements : choices;
    return max > f.experts ? max : f.experts;
  }
  SWITCHYARD_FN void operator()(int64_t i) const {
    const uint64_t n = number();
    const int tokens = f.tokens(n, rank);
    if (i == 0) *a.tokens = f.stated_tokens(n, rank);
    if (i < f.experts_of(rank)) a.factors[i] = f.factor(f.first_expert(rank) + static_cast<int>(i));
    if (i < int64_t{f.max_tokens} * f.topk) {
      const int t = static_cast<int>(i / f.topk), k = static_cast<int>(i % f.topk);
      const int id = t < tokens ? f.id(n, rank, t, k) : static_cast<int>(i % f.experts);
      if (a.int64_ids) {
        static_cast<int64_t*>(a.ids)[i] = id;
      } else {
        static_cast<int32_t*>(a.ids)[i] = id;
      }
      a.weights[i] = t < tokens ? f.weight(n, rank, t, k) : -77.0f;
    }
    if (i >= int64_t{f.max_tokens} * f.hidden) return;
    const int t = static_cast<int>(i / f.hidden), c = static_cast<int>(i % f.hidden);
    set_element(f.type, a.x, i, t < tokens ? exact_bits(f.type, f.x(n, rank, t, c)) : kNaN);
    set_element(f.type, a.out, i, kUntouched);
    if (a.codes != nullptr) give(n, i, t, c, t < tokens);
  }

 private:
  SWITCHYARD_FN void give(uint64_t n, int64_t i, int t, int c, bool counts) const {
    const uint32_t code = counts ? exact_bits(DType::fp8_e4m3, f.unscaled(n, rank, t, c, true)) : kNaN;
    set_element(DType::fp8_e4m3, a.codes, i, code);
    if (c % f.group != 0) return;
    const int g = c / f.group;
    auto* const row =
        static_cast<std::byte*>(a.scales) + t * static_cast<int64_t>(switchyard::scale_row_bytes(f.hidden, f.scales, f.group));
    const uint32_t bits = counts ? exact_bits(DType::f32, f.scale(n, rank, t, g, true)) : kNaN;
    if (f.scales == ScaleKind::f32) {
      memcpy(row + g * 4, &bits, 4);
    } else {
      row[g] = static_cast<std::byte>(bits >> 23);
    }
  }
};

/// Location of the rows delivered by a dispatch.
struct DeliveredArrays {
  const void* x;
  const void* scales;
  const int32_t* rows_of_expert;
  const int64_t* source_range;
  const int64_t* row_source;
};

/// Number of columns that one job call judges or fills.
inline constexpr int kColumnsAtOnce = 64;

/// The row parts of all local experts.
struct RowParts {
  int rank;
  SWITCHYARD_FN static int parts(const Form& f) { return (f.hidden + kColumnsAtOnce - 1) / kColumnsAtOnce; }
  SWITCHYARD_FN int64_t size(const Form& f) const { return int64_t{f.experts_of(rank)} * f.rows_per_expert() * parts(f); }
  /// Row `row` of local expert `expert`, starting at column `begin`.
  struct Part {
    int expert, row, begin, end;
  };
  SWITCHYARD_FN Part part(const Form& f, int64_t i) const {
    const int64_t row = i / parts(f);
    const int begin = static_cast<int>(i % parts(f)) * kColumnsAtOnce;
    const int end = begin + kColumnsAtOnce < f.hidden ? begin + kColumnsAtOnce : f.hidden;
    return {static_cast<int>(row / f.rows_per_expert()), static_cast<int>(row % f.rows_per_expert()), begin, end};
  }
};

/// Judges all data that dispatch n delivered on this rank.
struct JudgeDispatch {
  Form f;
  CallNumber number;
  RowParts rows;
  DeliveredArrays d;
  Verdict* verdict;
  bool given = false;  ///< the rows were passed as CallArrays::codes

  SWITCHYARD_FN int64_t size() const { return rows.size(f) > 0 ? rows.size(f) : 1; }
  SWITCHYARD_FN void operator()(int64_t i) const {
    if (i == 0) verdict->count_call();
    if (rows.size(f) == 0) return;
    const uint64_t n = number();
    const RowParts::Part p = rows.part(f, i);
    const int expert = f.first_expert(rows.rank) + p.expert;
    if (p.row == 0 && p.begin == 0) judge_counts(n, p.expert, expert);
    if (p.row >= d.rows_of_expert[p.expert]) return;
    const int64_t at = int64_t{p.expert} * f.rows_per_expert() + p.row, from = d.row_source[at];
    const int source = static_cast<int>(from >> 48), k = static_cast<int>(from >> 32 & 0xFFFF), t = static_cast<int>(from);
    if (p.begin == 0) {
      verdict->count_row();
      judge_source(n, p, expert, source, t, k);
    }
    if (source < 0 || source >= f.world || t < 0 || t >= f.max_tokens) return;  // already reported
    const DType type = f.scales == ScaleKind::none ? f.type : DType::fp8_e4m3;
    for (int c = p.begin; c < p.end; ++c) {
      const int64_t place = at * f.hidden + c;
      verdict->judge(Checked::row, n, place, exact_bits(type, f.unscaled(n, source, t, c, given)), element(type, d.x, place));
    }
    if (p.begin == 0 && f.scales != ScaleKind::none) judge_scales(n, p, source, t);
  }

 private:
  SWITCHYARD_FN void judge_counts(uint64_t n, int local, int expert) const {
    int first = 0;
    for (int source = 0; source < f.world; ++source) {
      const int local_rows = f.rows_from(n, source, f.tokens(n, source), expert);
      const int64_t at = int64_t{local} * f.world + source, range = d.source_range[at];
      verdict->judge(Checked::source_range, n, at, static_cast<uint32_t>(local_rows), static_cast<uint32_t>(range));
      verdict->judge(Checked::source_range, n, at, static_cast<uint32_t>(first), static_cast<uint32_t>(range >> 32));
      first += local_rows;
    }
    verdict->judge(Checked::rows_of_expert, n, local, static_cast<uint32_t>(first),
                   static_cast<uint32_t>(d.rows_of_expert[local]));
  }
  /// The k-th choice of the row's source must be its first choice of this expert, and the expected number of its earlier tokens
  /// must also have chosen the expert.
  SWITCHYARD_FN void judge_source(uint64_t n, const RowParts::Part& p, int expert, int source, int t, int k) const {
    const int64_t at = int64_t{p.expert} * f.rows_per_expert() + p.row;
    const bool valid = source >= 0 && source < f.world && t >= 0 && t < f.tokens(n, source);
    verdict->judge(Checked::row_source, n, at, 1, valid ? 1 : 0);
    if (!valid) return;
    verdict->judge(Checked::row_source, n, at, static_cast<uint32_t>(f.first_choice(n, source, t, expert)),
                   static_cast<uint32_t>(k));
    const int first = static_cast<int>(d.source_range[int64_t{p.expert} * f.world + source] >> 32);
    verdict->judge(Checked::row_source, n, at, static_cast<uint32_t>(first + f.rows_from(n, source, t, expert)),
                   static_cast<uint32_t>(p.row));
  }
  SWITCHYARD_FN void judge_scales(uint64_t n, const RowParts::Part& p, int source, int t) const {
    const int64_t at = int64_t{p.expert} * f.rows_per_expert() + p.row, all = (f.rows_per_expert() + 3) & ~3;
    const int64_t row_scales = static_cast<int64_t>(switchyard::scale_row_bytes(f.hidden, f.scales, f.group));
    for (int g = 0; g < f.groups(); ++g) {
      const uint32_t expected = exact_bits(DType::f32, f.scale(n, source, t, g, given));
      const auto* const base = static_cast<const std::byte*>(d.scales);
      uint32_t got = 0;
      if (f.scales == ScaleKind::f32) {
        const int64_t place =
            f.column_major ? ((int64_t{p.expert} * f.groups() + g) * all + p.row) * 4 : at * row_scales + g * 4;
        memcpy(&got, base + place, 4);
      } else {
        const int64_t words = (f.groups() + 3) / 4;
        const int64_t place = f.column_major ? ((p.expert * words + g / 4) * all + p.row) * 4 + g % 4 : at * row_scales + g;
        got = static_cast<uint32_t>(base[place]) << 23;
      }
      verdict->judge(Checked::scale, n, at * f.groups() + g, expected, got);
    }
  }
};

/// Fills the local experts' answers to dispatch `from`, and all other rows with NaN.
struct MakeAnswers {
  Form f;
  CallNumber number;
  RowParts rows;
  DeliveredArrays d;
  void* y;

  SWITCHYARD_FN int64_t size() const { return rows.size(f); }
  SWITCHYARD_FN void operator()(int64_t i) const {
    const uint64_t n = number();
    const RowParts::Part p = rows.part(f, i);
    const int expert = f.first_expert(rows.rank) + p.expert;
    const int64_t at = int64_t{p.expert} * f.rows_per_expert() + p.row;
    const bool row = p.row < d.rows_of_expert[p.expert];
    const int64_t from = row ? d.row_source[at] : 0;
    for (int c = p.begin; c < p.end; ++c) {
      const float value = row ? f.answer(n, expert, static_cast<int>(from >> 48), static_cast<int>(from), c) : 0.0f;
      set_element(f.type, y, at * f.hidden + c, row ? exact_bits(f.type, value) : kNaN);
    }
  }
};

/// The experts' answers in a combine, and the source of the weights.
enum class Answers : int32_t { made, the_rows, the_rows_times_factors };
enum class Weights : int32_t { none, of_dispatch, of_combine };

/// Judges the sums of combine n of dispatch `dispatched`, and checks that nothing was written beyond them.
struct JudgeSums {
  Form f;
  CallNumber number, dispatched;
  int rank;
  Answers answers;
  Weights weights;
  const void* out;
  Verdict* verdict;

  SWITCHYARD_FN int64_t size() const { return int64_t{f.max_tokens} * RowParts::parts(f); }
  SWITCHYARD_FN void operator()(int64_t i) const {
    const int t = static_cast<int>(i / RowParts::parts(f)), begin = static_cast<int>(i % RowParts::parts(f)) * kColumnsAtOnce;
    const int end = begin + kColumnsAtOnce < f.hidden ? begin + kColumnsAtOnce : f.hidden;
    const uint64_t n = number(), from = dispatched();
    const bool summed = t < f.tokens(from, rank);
    if (i == 0) verdict->count_call();
    if (begin == 0 && summed) verdict->count_row();
    for (int c = begin; c < end; ++c) {
      const int64_t place = int64_t{t} * f.hidden + c;
      const uint32_t got = element(f.type, out, place);
      if (summed) {
        verdict->judge(Checked::sum, n, place, exact_bits(f.type, sum(n, from, t, c)), got);
      } else {
        verdict->judge(Checked::beyond_tokens, n, place, truncated(f.type, kUntouched), got);
      }
    }
  }

 private:
  SWITCHYARD_FN float sum(uint64_t n, uint64_t from, int t, int c) const {
    float total = 0;
    for (int k = 0; k < f.topk; ++k) {
      const int expert = f.id(from, rank, t, k);
      if (!f.is_expert(expert)) continue;
      const float weight = weights == Weights::none ? 1.0f : f.weight(weights == Weights::of_combine ? n : from, rank, t, k);
      const float row = answers == Answers::made ? f.answer(n, expert, rank, t, c) : f.x(from, rank, t, c);
      total += weight * row * (answers == Answers::the_rows_times_factors ? f.factor(expert) : 1.0f);
    }
    return total;
  }
};

/// Overwrites memory that a call no longer needs.
struct Spoil {
  uint32_t* words;
  int64_t count;
  uint32_t with = kNaN;
  SWITCHYARD_FN int64_t size() const { return count; }
  SWITCHYARD_FN void operator()(int64_t i) const { words[i] = with; }
};

/// Counts a graph's replays.
struct CountReplay {
  uint64_t* replays;
  SWITCHYARD_FN int64_t size() const { return 1; }
  SWITCHYARD_FN void operator()(int64_t) const { ++*replays; }
};

/// Creates the weights of call n, which replace those of its dispatch.
struct MakeWeights {
  Form f;
  CallNumber number;
  int rank;
  float* weights;
  SWITCHYARD_FN int64_t size() const { return int64_t{f.max_tokens} * f.topk; }
  SWITCHYARD_FN void operator()(int64_t i) const {
    weights[i] = f.weight(number(), rank, static_cast<int>(i / f.topk), static_cast<int>(i % f.topk));
  }
};

}  // namespace harness

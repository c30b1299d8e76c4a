// SPDX-License-Identifier: Apache-2.0
// The gradients of an expert MLP through the C ABI on a GPU. Rows consist of small integers, so sums are exact; expected values
// are computed by the loops in this file.
#include <math.h>

#include "gpu/gemm/c_layer_rows.h"

enum { kWrong = SY_INVALID_ARGUMENT };
enum { kDySeed = 11, kXSeed = 12, kGateSeed = 13, kUpSeed = 14 };

// Rows with gaps between them, rows in units of 16, and the number of multiprocessors that calls use.
typedef struct Places {
  void* memory[3];
  sy_expert_rows ranges, masked;
  sy_grouped_gemm_options options, few;
} Places;

static Places make_places(cudaStream_t stream) {
  Places p = {{on_gpu(kFirstRow, sizeof kFirstRow), on_gpu(kNumRows, sizeof kNumRows), on_gpu(kMasked, sizeof kMasked)},
              SY_EXPERT_ROWS_INIT,
              SY_EXPERT_ROWS_INIT,
              SY_GROUPED_GEMM_OPTIONS_INIT,
              SY_GROUPED_GEMM_OPTIONS_INIT};
  p.ranges.first_row = p.memory[0];
  p.ranges.num_rows = p.memory[1];
  p.masked.num_rows_32 = p.memory[2];
  p.masked.rows_per_expert = 16;
  p.options.stream = p.few.stream = stream;
  p.few.num_sms = 2;
  return p;
}

static sy_const_row_view read_rows(sy_dtype type, const void* data, int64_t cols) {
  sy_const_row_view v = bf16_rows(data, kRows, cols);
  v.dtype = type;
  return v;
}

// ---- Gradients of weights ----

enum { kN = 72, kK = 136, kGradients = kExperts * kN * kK };

// Expected value after `times` accumulating calls.
static float weight_gradient(int e, int n, int k, const int64_t* first, const int64_t* counts, int times) {
  int sum = 0;
  for (int64_t row = first[e]; row < first[e] + counts[e]; ++row)
    sum += number(kDySeed, row * kN + n) * number(kXSeed, row * kK + k);
  return (float)(times * sum);
}

static void check_weight_gradients(const void* device, sy_dtype output, const int64_t* first, const int64_t* counts,
                                   int times) {
  static float wide[kGradients];
  static uint16_t narrow[kGradients];
  if (output == SY_DTYPE_F32)
    read_back(wide, device, sizeof wide);
  else
    read_back(narrow, device, sizeof narrow);
  int wrong = 0;
  for (int e = 0; e < kExperts; ++e)
    for (int n = 0; n < kN; ++n)
      for (int k = 0; k < kK; ++k) {
        const int at = (e * kN + n) * kK + k;
        const float made = output == SY_DTYPE_F32 ? wide[at] : float_of(narrow[at]);
        wrong += !(made == weight_gradient(e, n, k, first, counts, times));
      }
  CHECK(wrong == 0);
}

// -1, 0 or 1 as an f16 number.
static void* f16_on_gpu(int seed, int64_t elements) {
  static const uint16_t codes[3] = {0xbc00, 0x0000, 0x3c00};
  static uint16_t host[kRows * kK];
  for (int64_t i = 0; i < elements; ++i) host[i] = codes[number(seed, i) + 1];
  return on_gpu(host, (size_t)elements * sizeof *host);
}

static sy_weight_gradient* make_weight_gradient(sy_dtype type, sy_dtype output, int add) {
  sy_weight_gradient_config config = SY_WEIGHT_GRADIENT_CONFIG_INIT;
  config.num_experts = kExperts;
  config.n = kN;
  config.k = kK;
  config.dtype = type;
  config.out_dtype = output;
  config.add = add;
  sy_weight_gradient* gradient = NULL;
  CHECK_OK(sy_weight_gradient_create(&config, &gradient));
  return gradient;
}

// Gradients first overwrite memory that holds NaNs; then the same values are added twice; finally, other rows overwrite them.
static void weight_gradients(const Places* p, sy_dtype type, sy_dtype output) {
  const int f16 = type == SY_DTYPE_F16;
  void* const memory[] = {f16 ? f16_on_gpu(kDySeed, kRows * kN) : bf16_on_gpu(kDySeed, kRows * kN),
                          f16 ? f16_on_gpu(kXSeed, kRows * kK) : bf16_on_gpu(kXSeed, kRows * kK),
                          filled_on_gpu(0xff, kGradients * sizeof(float))};
  const sy_const_row_view dy = read_rows(type, memory[0], kN), x = read_rows(type, memory[1], kK);
  void* const dw = memory[2];
  sy_weight_gradient* writes = make_weight_gradient(type, output, 0);
  sy_weight_gradient* adds = make_weight_gradient(type, output, 1);
  CHECK_OK(sy_weight_gradient_run(writes, &dy, &x, &p->ranges, dw, &p->options));
  CHECK(cudaStreamSynchronize(p->options.stream) == cudaSuccess);
  check_weight_gradients(dw, output, kFirstRow, kNumRows, 1);
  CHECK_OK(sy_weight_gradient_run(adds, &dy, &x, &p->ranges, dw, &p->options));
  CHECK_OK(sy_weight_gradient_run(adds, &dy, &x, &p->ranges, dw, &p->few));
  CHECK(cudaStreamSynchronize(p->options.stream) == cudaSuccess);
  check_weight_gradients(dw, output, kFirstRow, kNumRows, 3);
  CHECK_OK(sy_weight_gradient_run(writes, &dy, &x, &p->masked, dw, &p->few));
  CHECK(cudaStreamSynchronize(p->options.stream) == cudaSuccess);
  check_weight_gradients(dw, output, kMaskedFirst, kMaskedRows, 1);
  CHECK_OK(sy_weight_gradient_destroy(writes));
  CHECK_OK(sy_weight_gradient_destroy(adds));
  free_all(memory, sizeof memory / sizeof *memory);
}

static void misused_weight_gradient(const Places* p) {
  void* const memory[] = {bf16_on_gpu(kDySeed, kRows * kN), bf16_on_gpu(kXSeed, kRows * kK),
                          filled_on_gpu(0, kGradients * sizeof(float))};
  const sy_const_row_view dy = bf16_rows(memory[0], kRows, kN), x = bf16_rows(memory[1], kRows, kK);
  const sy_const_row_view narrow = bf16_rows(memory[1], kRows, kK - 8), odd = bf16_rows((const char*)memory[0] + 2, kRows, kN);
  const sy_const_row_view f16 = read_rows(SY_DTYPE_F16, memory[1], kK);
  sy_expert_rows neither = SY_EXPERT_ROWS_INIT;
  sy_grouped_gemm_options options = p->options;
  void* const dw = memory[2];
  sy_weight_gradient* gradient = make_weight_gradient(SY_DTYPE_BF16, SY_DTYPE_F32, 0);
  CHECK_FAILS(sy_weight_gradient_run(gradient, NULL, &x, &p->ranges, dw, NULL), kWrong, "dy is NULL");
  CHECK_FAILS(sy_weight_gradient_run(gradient, &dy, NULL, &p->ranges, dw, NULL), kWrong, "x is NULL");
  CHECK_FAILS(sy_weight_gradient_run(gradient, &dy, &x, NULL, dw, NULL), kWrong, "rows is NULL");
  CHECK_FAILS(sy_weight_gradient_run(gradient, &dy, &x, &p->ranges, NULL, NULL), kWrong, "dw is null");
  CHECK_FAILS(sy_weight_gradient_run(gradient, &dy, &x, &p->ranges, (char*)dw + 4, NULL), kWrong, "dw must begin at");
  CHECK_FAILS(sy_weight_gradient_run(gradient, &odd, &x, &p->ranges, dw, NULL), kWrong, "dy must begin at");
  CHECK_FAILS(sy_weight_gradient_run(gradient, &dy, &narrow, &p->ranges, dw, NULL), kWrong, "x has 128 columns");
  CHECK_FAILS(sy_weight_gradient_run(gradient, &dy, &f16, &p->ranges, dw, NULL), kWrong, "x is of f16");
  CHECK_FAILS(sy_weight_gradient_run(gradient, &dy, &x, &neither, dw, NULL), kWrong, "give num_rows or num_rows_32");
  options.num_sms = 100000;
  CHECK_FAILS(sy_weight_gradient_run(gradient, &dy, &x, &p->ranges, dw, &options), kWrong, "num_sms = 100000");
  options.num_sms = 0;
  options.reserved = 1;
  CHECK_FAILS(sy_weight_gradient_run(gradient, &dy, &x, &p->ranges, dw, &options), kWrong, "options->reserved = 1");
  CHECK_OK(sy_weight_gradient_destroy(gradient));
  free_all(memory, sizeof memory / sizeof *memory);
}

// ---- Gradients of SwiGLU ----

enum { kWidth = 72 };

// From -4 to 4.
static int wide_number(int seed, int64_t i) { return 3 * number(seed, i) + number(seed + 50, i); }
static int gate_of(int64_t row, int c) { return wide_number(kGateSeed, row * kWidth + c); }
static int up_of(int64_t row, int c) { return wide_number(kUpSeed, row * kWidth + c); }

static void* h_on_gpu(void) {
  static uint16_t host[kRows * 2 * kWidth];
  for (int64_t row = 0; row < kRows; ++row)
    for (int c = 0; c < kWidth; ++c) {
      host[row * 2 * kWidth + c] = bf16_of((float)gate_of(row, c));
      host[row * 2 * kWidth + kWidth + c] = bf16_of((float)up_of(row, c));
    }
  return on_gpu(host, sizeof host);
}

typedef struct Gradient {
  double gate, up, out;
} Gradient;

static Gradient swiglu_gradient(const sy_swiglu_gradient_config* config, int64_t row, int c) {
  const double limit = config->swiglu_limit, alpha = config->swiglu_alpha;
  const double gate = gate_of(row, c), up = up_of(row, c), da = number(kDySeed, row * kWidth + c);
  const double g = fmin(gate, limit), v = fmax(fmin(up, limit), -limit) + config->swiglu_up_shift;
  const double s = 1 / (1 + exp(-alpha * g));
  const Gradient result = {gate > limit ? 0 : da * v * s * (1 + alpha * g * (1 - s)), fabs(up) > limit ? 0 : da * g * s,
                           g * s * v};
  return result;
}

// `bound` is relative. Rows that belong to no expert keep their content: the byte `untouched` or, if that is 0, the values of
// h.
static void check_swiglu(const sy_swiglu_gradient_config* config, const void* dh_device, const void* a_device, double bound,
                         uint16_t untouched) {
  static uint16_t dh[kRows * 2 * kWidth], a[kRows * kWidth];
  read_back(dh, dh_device, sizeof dh);
  if (a_device) read_back(a, a_device, sizeof a);
  int wrong = 0;
  for (int64_t row = 0; row < kRows; ++row)
    for (int c = 0; c < kWidth; ++c) {
      const uint16_t gate = dh[row * 2 * kWidth + c], up = dh[row * 2 * kWidth + kWidth + c], out = a[row * kWidth + c];
      if (expert_of(row, kFirstRow, kNumRows) < 0) {
        wrong += gate != (untouched ? untouched : bf16_of((float)gate_of(row, c)));
        wrong += up != (untouched ? untouched : bf16_of((float)up_of(row, c)));
        wrong += a_device && out != untouched;
        continue;
      }
      const Gradient expected = swiglu_gradient(config, row, c);
      wrong += !(fabs(float_of(gate) - expected.gate) <= bound * fabs(expected.gate));
      wrong += !(fabs(float_of(up) - expected.up) <= bound * fabs(expected.up));
      wrong += a_device && !(fabs(float_of(out) - expected.out) <= bound * fabs(expected.out));
    }
  CHECK(wrong == 0);
}

// Runs first with separate dh and h and with `a`, then with dh in place of h and without `a`.
static void swiglu_gradients(const Places* p, const sy_swiglu_gradient_config* config, double bound) {
  void* const memory[] = {h_on_gpu(), bf16_on_gpu(kDySeed, kRows * kWidth), filled_on_gpu(0xab, kRows * 2 * kWidth * 2),
                          filled_on_gpu(0xab, kRows * kWidth * 2)};
  const sy_const_row_view h = bf16_rows(memory[0], kRows, 2 * kWidth), da = bf16_rows(memory[1], kRows, kWidth);
  const sy_row_view in_place = bf16_results(memory[0], kRows, 2 * kWidth), dh = bf16_results(memory[2], kRows, 2 * kWidth);
  const sy_row_view a = bf16_results(memory[3], kRows, kWidth), narrow = bf16_results(memory[3], kRows, kWidth - 8);
  sy_swiglu_gradient* gradient = NULL;
  CHECK_OK(sy_swiglu_gradient_create(config, &gradient));
  CHECK_OK(sy_swiglu_gradient_run(gradient, &h, &da, &p->ranges, &dh, &a, &p->options));
  CHECK_OK(sy_swiglu_gradient_run(gradient, &h, &da, &p->ranges, &in_place, NULL, &p->few));
  CHECK(cudaStreamSynchronize(p->options.stream) == cudaSuccess);
  check_swiglu(config, memory[2], memory[3], bound, 0xabab);
  check_swiglu(config, memory[0], NULL, bound, 0);

  CHECK_FAILS(sy_swiglu_gradient_run(gradient, NULL, &da, &p->ranges, &dh, &a, NULL), kWrong, "h is NULL");
  CHECK_FAILS(sy_swiglu_gradient_run(gradient, &h, NULL, &p->ranges, &dh, &a, NULL), kWrong, "da is NULL");
  CHECK_FAILS(sy_swiglu_gradient_run(gradient, &h, &da, NULL, &dh, &a, NULL), kWrong, "rows is NULL");
  CHECK_FAILS(sy_swiglu_gradient_run(gradient, &h, &da, &p->ranges, NULL, &a, NULL), kWrong, "dh is NULL");
  CHECK_FAILS(sy_swiglu_gradient_run(gradient, &h, &da, &p->ranges, &a, &a, NULL), kWrong, "dh has 72 columns");
  CHECK_FAILS(sy_swiglu_gradient_run(gradient, &h, &da, &p->ranges, &dh, &narrow, NULL), kWrong, "a has 64 columns");
  CHECK_OK(sy_swiglu_gradient_destroy(gradient));
  free_all(memory, sizeof memory / sizeof *memory);
}

// With alpha = 0, the sigmoid is a half everywhere, and gradients of integers are halves of integers: each has one correct
// value, and some are clamped by the limit. With the default alpha, the bound allows for rounding to bf16, at most 2^-8 of the
// value, and 2^-16 for the preceding float32 values.
static void all_swiglu_gradients(const Places* p) {
  sy_swiglu_gradient_config config = SY_SWIGLU_GRADIENT_CONFIG_INIT;
  config.num_experts = kExperts;
  config.columns = kWidth;
  swiglu_gradients(p, &config, 0x1.01p-8);
  config.swiglu_limit = 2.0f;
  config.swiglu_alpha = 0.0f;
  config.swiglu_up_shift = 1.0f;
  swiglu_gradients(p, &config, 0.0);
}

// ---- Gradients of routing weights ----

enum { kColumns = 264 };

static void check_routing(const void* device, const int64_t* first, const int64_t* counts) {
  static float made[kRows];
  read_back(made, device, sizeof made);
  int wrong = 0;
  for (int64_t row = 0; row < kRows; ++row) {
    int sum = 0;
    for (int c = 0; c < kColumns; ++c) sum += number(kDySeed, row * kColumns + c) * number(kXSeed, row * kColumns + c);
    uint32_t bits = 0;
    memcpy(&bits, &made[row], sizeof bits);
    wrong += expert_of(row, first, counts) < 0 ? bits != 0xabababab : !(made[row] == (float)sum);
  }
  CHECK(wrong == 0);
}

static void routing_gradients(const Places* p) {
  void* const memory[] = {bf16_on_gpu(kDySeed, kRows * kColumns), bf16_on_gpu(kXSeed, kRows * kColumns),
                          filled_on_gpu(0xab, kRows * sizeof(float)), filled_on_gpu(0xab, kRows * sizeof(float))};
  const sy_const_row_view dy = bf16_rows(memory[0], kRows, kColumns), y = bf16_rows(memory[1], kRows, kColumns);
  sy_routing_gradient_config config = SY_ROUTING_GRADIENT_CONFIG_INIT;
  config.num_experts = kExperts;
  config.columns = kColumns;
  sy_routing_gradient* gradient = NULL;
  CHECK_OK(sy_routing_gradient_create(&config, &gradient));
  CHECK_OK(sy_routing_gradient_run(gradient, &dy, &y, &p->ranges, memory[2], &p->options));
  CHECK_OK(sy_routing_gradient_run(gradient, &dy, &y, &p->masked, memory[3], &p->few));
  CHECK(cudaStreamSynchronize(p->options.stream) == cudaSuccess);
  check_routing(memory[2], kFirstRow, kNumRows);
  check_routing(memory[3], kMaskedFirst, kMaskedRows);

  const sy_const_row_view narrow = bf16_rows(memory[1], kRows, kColumns - 8);
  float* const odd = (void*)((char*)memory[2] + 2);
  CHECK_FAILS(sy_routing_gradient_run(gradient, NULL, &y, &p->ranges, memory[2], NULL), kWrong, "dy is NULL");
  CHECK_FAILS(sy_routing_gradient_run(gradient, &dy, NULL, &p->ranges, memory[2], NULL), kWrong, "y is NULL");
  CHECK_FAILS(sy_routing_gradient_run(gradient, &dy, &y, NULL, memory[2], NULL), kWrong, "rows is NULL");
  CHECK_FAILS(sy_routing_gradient_run(gradient, &dy, &y, &p->ranges, NULL, NULL), kWrong, "dweight is null");
  CHECK_FAILS(sy_routing_gradient_run(gradient, &dy, &y, &p->ranges, odd, NULL), kWrong, "dweight must begin at");
  CHECK_FAILS(sy_routing_gradient_run(gradient, &dy, &narrow, &p->ranges, memory[2], NULL), kWrong, "y has 256 columns");
  CHECK_OK(sy_routing_gradient_destroy(gradient));
  free_all(memory, sizeof memory / sizeof *memory);
}

void run_gradient_tests(cudaStream_t stream) {
  const Places p = make_places(stream);
  weight_gradients(&p, SY_DTYPE_BF16, SY_DTYPE_F32);
  weight_gradients(&p, SY_DTYPE_BF16, SY_DTYPE_BF16);
  weight_gradients(&p, SY_DTYPE_F16, SY_DTYPE_F32);
  misused_weight_gradient(&p);
  all_swiglu_gradients(&p);
  routing_gradients(&p);
  free_all(p.memory, sizeof p.memory / sizeof *p.memory);
}

// SPDX-License-Identifier: Apache-2.0
// Parts of the benchmark mega_moe_fp8: operands and reference results (mega_moe_fp8_data.cu), the peer (mega_moe_fp8_peer.cu).
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <vector>

namespace mega_moe {

constexpr int kHidden = 7168, kIntermediate = 2048, kTopK = 8;
constexpr int kBlock = 128;  ///< elements of a scale: 1 x 128 of a row, 128 x 128 of weights
constexpr int kHiddenBlocks = kHidden / kBlock, kIntermediateBlocks = kIntermediate / kBlock;

/// Distributions of tokens and weights, which affect power and clock rate. normal: both normal, scales for the largest element.
/// bench: those of `switchyard bench --mode layer`: tokens with uniform exponents from -6 to 3, uniform weights, and scales of
/// weight blocks that are the smallest possible ones times 1, 1.25, 1.5 or 1.75.
enum class Values { normal, bench };

/// Prints the text and ends the program immediately: other ranks may be waiting for this one, on the host or in a kernel.
[[noreturn]] void fail(const std::string& what);
inline void must(cudaError_t status, const char* what) {
  if (status != cudaSuccess) fail(std::string(what) + ": " + cudaGetErrorString(status));
}

/// A shape and the values that the peer's host code chooses for it on a GPU with 132 multiprocessors; a template argument.
struct Config {
  int ranks, tokens, experts;
  int pool;          ///< rows of all local experts in the worst case, padded to whole tiles
  int scale_pool;    ///< columns of the transposed scales of the ring's rows
  int ring;          ///< rows of the ring that contains the inputs of the products
  int stages;        ///< of the pipeline in shared memory
  int lag;           ///< down tiles trail up tiles by lag % 1000 units, in groups of lag / 1000
  int publish;       ///< received rows per release fence
  int shared_bytes;  ///< dynamic shared memory

  int local_experts() const { return experts / ranks; }
};
/// Shapes for which the program has a kernel.
std::vector<Config> configs();

/// Byte offsets of the regions of the peer's symmetric buffer.
struct Layout {
  uint64_t x, x_scales, topk_idx, topk_weights;                       ///< inputs, written by the preparation
  uint64_t rows, row_scales, intermediate_rows, intermediate_scales;  ///< inputs of the two products
  uint64_t bytes;                                                     ///< of the whole buffer
};
Layout layout_of(const Config& c);

/// Memory of a rank. Every GPU may access the memory of all ranks.
struct Rank {
  int idx = 0;
  __nv_bfloat16* x = nullptr;   ///< [tokens, hidden]
  int32_t* topk_idx = nullptr;  ///< [tokens, top-k]
  float* topk_weights = nullptr;
  uint8_t* up = nullptr;         ///< e4m3 [local experts, 2 * intermediate, hidden]; rows in the order of `up_row`
  float* up_scales = nullptr;    ///< [local experts, 2 * intermediate / 128, hidden / 128]; gate, then up
  uint8_t* down = nullptr;       ///< e4m3 [local experts, hidden, intermediate]
  float* down_scales = nullptr;  ///< [local experts, hidden / 128, intermediate / 128]
  uint8_t* shared = nullptr;     ///< the symmetric buffer
  __nv_bfloat16* y = nullptr;    ///< [tokens, hidden]
};

/// Row of output n (gate: n < intermediate, up: the rest) in the peer's order: eight rows of gate, the same eight of up, and so
/// on.
__host__ __device__ constexpr int up_row(int n) {
  const int column = n % kIntermediate;
  return column / 8 * 16 + (n < kIntermediate ? 0 : 8) + column % 8;
}

/// Allocates a rank's memory on the current GPU and fills its operands: data from `seed`, uniform routing.
Rank make_rank(const Config& c, int idx, uint64_t seed, Values values);
struct Errors {
  double worst;        ///< largest |y - reference| / |reference| of a sampled token
  double preparation;  ///< the same for its quantized inputs and the original ones
  int64_t bad;         ///< elements of y of all tokens that are not finite
};
/// Compares y of a sample of the rank's tokens with a float32 computation from the same quantized operands. Runs on the current
/// GPU, which reads the weights of other ranks from their memory. No rank may run the peer at this time.
Errors check(const Config& c, const std::vector<Rank>& ranks, int idx, cudaStream_t stream);

/// A two-dimensional tensor map as the peer's host code encodes it.
struct Map {
  const char* name;
  CUtensorMapDataType type;
  const void* base;
  uint64_t inner, outer, stride_bytes;
  uint32_t box_inner, box_outer;
  CUtensorMapSwizzle swizzle;
};
std::vector<Map> maps_of(const Config& c, const Rank& rank);

/// The peer's layer on one rank. The current GPU must be the rank's GPU in all calls.
class Peer {
 public:
  Peer(const Config& c, const std::vector<Rank>& ranks, int idx);
  /// Quantizes the tokens into the symmetric buffer and copies expert ids and weights there: the peer's own kernel.
  void prepare(cudaStream_t stream) const;
  /// Runs the whole layer: one launch on each rank; the kernels wait for each other.
  void run(cudaStream_t stream) const;

 private:
  Config config_;
  Rank rank_;
  Layout layout_;
  size_t kernel_ = 0;
  std::vector<int64_t> shared_;  // addresses of all symmetric buffers
  std::vector<CUtensorMap> maps_;
};

}  // namespace mega_moe

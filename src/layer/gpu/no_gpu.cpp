// SPDX-License-Identifier: Apache-2.0
// Stubs for layers on GPUs in a library built without CUDA.
#include "layer/add_rows.hpp"
#include "layer/gpu/gpu_place.hpp"
#include "layer/quantise_tokens.hpp"

namespace switchyard::detail {
namespace {

[[noreturn]] void no_cuda() { throw Error(ErrorCode::unsupported, "MoeLayer: this library was built without CUDA"); }

}  // namespace

std::unique_ptr<RowAdder> make_gpu_row_adder(const LayerSetup&) { no_cuda(); }
std::unique_ptr<TokenQuantiser> make_gpu_token_quantiser(const LayerSetup&) { no_cuda(); }
GpuPlace gpu_place_of(const Group&) { no_cuda(); }
bool is_captured(void*) { return false; }
void order_after(void*, void*) {}
CurrentGpu::CurrentGpu(int) {}
CurrentGpu::~CurrentGpu() = default;

}  // namespace switchyard::detail

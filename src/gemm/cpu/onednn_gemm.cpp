// SPDX-License-Identifier: Apache-2.0
// Adapter for oneDNN 2.6 (Debian 12) and 3.x (Ubuntu 24.04).
#include "gemm/cpu/onednn_gemm.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <utility>

#include "gemm/aligned_buffer.hpp"
#include "gemm/cpu/row_math.hpp"
#include "oneapi/dnnl/dnnl.hpp"

#if DNNL_CPU_THREADING_RUNTIME == DNNL_RUNTIME_OMP
#define SWITCHYARD_ONEDNN_OPENMP 1
#elif DNNL_CPU_THREADING_RUNTIME == DNNL_RUNTIME_SEQ
#define SWITCHYARD_ONEDNN_OPENMP 0
#else
#error "switchyard: oneDNN must be built with OpenMP (as Debian's and Ubuntu's libdnnl-dev) or without threads"
#endif

namespace switchyard::detail {
namespace {

using dnnl::memory;
using DataType = memory::data_type;

/// Number of rows of B that are widened at a time: about 4 MiB, which fits in the caches. Larger and smaller panels were
/// slower.
int64_t panel_rows(int64_t n, int64_t k) {
  constexpr int64_t kBytes = int64_t{4} << 20, kMultiple = 64;
  return std::min(n, std::max(kMultiple, kBytes / (k * 4) / kMultiple * kMultiple));
}

/// The multiplication method that an object uses.
enum class Path : uint8_t {
  bf16,         ///< operands unconverted
  f32_blocked,  ///< weights are widened once, when packed, into the blocks of a float32 kernel
  f32_panels,   ///< weights stay bf16; every call widens them panel by panel
};

#if SWITCHYARD_ONEDNN_OPENMP
/// Two functions from the OpenMP library that oneDNN itself uses, looked up as the loader does for oneDNN. The lookup at run
/// time rather than at link time keeps a second OpenMP library (another compiler's) out of the process.
struct OpenMp {
  int (*max_threads)() = nullptr;
  void (*set_num_threads)(int) = nullptr;

  OpenMp() {
    Dl_info info{};
    void* onednn = nullptr;
    if (dladdr(reinterpret_cast<const void*>(&dnnl_version), &info) != 0 && info.dli_fname != nullptr) {
      // Null if oneDNN is linked into the program; the global scope then contains OpenMP.
      onednn = dlopen(info.dli_fname, RTLD_NOLOAD | RTLD_LAZY);
    }
    max_threads = reinterpret_cast<int (*)()>(find(onednn, "omp_get_max_threads"));
    set_num_threads = reinterpret_cast<void (*)(int)>(find(onednn, "omp_set_num_threads"));
    if (onednn != nullptr) dlclose(onednn);
    if (max_threads == nullptr || set_num_threads == nullptr) {
      throw Error(ErrorCode::unsupported, "oneDNN says that it uses OpenMP, but no loaded library has omp_set_num_threads");
    }
  }
  static void* find(void* library, const char* name) {
    void* symbol = dlsym(RTLD_DEFAULT, name);
    return symbol != nullptr || library == nullptr ? symbol : dlsym(library, name);
  }
};

/// During its lifetime, oneDNN calls from this thread use no other thread. The OpenMP setting is per thread and is restored by
/// the destructor.
class SerialScope {
 public:
  SerialScope() : library_(library()), saved_(library_.max_threads()) { library_.set_num_threads(1); }
  ~SerialScope() { library_.set_num_threads(saved_); }
  SerialScope(const SerialScope&) = delete;
  SerialScope& operator=(const SerialScope&) = delete;

 private:
  static const OpenMp& library() {
    static const OpenMp functions;
    return functions;
  }
  const OpenMp& library_;
  int saved_;
};
#else
class SerialScope {
 public:
  SerialScope() {}
};
#endif

/// Runs `body` on this thread only and converts oneDNN's exceptions to Error.
template <class Body>
auto guarded(const char* action, Body&& body) {
  try {
    const SerialScope serial;
    return body();
  } catch (const dnnl::error& error) {
    throw Error(ErrorCode::system, std::string("oneDNN could not ") + action + ": " + error.what() + " (status " +
                                       std::to_string(static_cast<int>(error.status)) + ")");
  }
}

/// Shared by all objects, so that ranks in one process share compiled kernels through oneDNN's cache.
const dnnl::engine& cpu_engine() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

memory::desc row_major(int64_t rows, int64_t cols, int64_t stride, DataType type) { return {{rows, cols}, type, {stride, 1}}; }
/// B[n, k] as oneDNN's k x n matrix operand.
memory::desc plain_weights(int64_t n, int64_t k, DataType type) { return {{k, n}, type, {1, k}}; }
memory::desc any_weights(int64_t n, int64_t k, DataType type) { return {{k, n}, type, memory::format_tag::any}; }

/// Returns nullopt if oneDNN has no kernel for these operands.
std::optional<dnnl::matmul::primitive_desc> describe(const memory::desc& a, const memory::desc& b, const memory::desc& c) {
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  try {
#if DNNL_VERSION_MAJOR >= 3
    return dnnl::matmul::primitive_desc(cpu_engine(), a, b, c, attributes);
#else
    return dnnl::matmul::primitive_desc(dnnl::matmul::desc(a, b, c), attributes, cpu_engine());
#endif
  } catch (const dnnl::error& error) {
    if (error.status != dnnl_unimplemented) throw;
    return std::nullopt;
  }
}

bool is_blockwise(const std::optional<dnnl::matmul::primitive_desc>& description) {
  return description && std::strncmp(description->impl_info_str(), "brg", 3) == 0;
}

}  // namespace

struct OnednnGemm::Impl {
  /// One compiled product with its operand descriptors; the operand addresses change from call to call.
  struct Product {
    dnnl::matmul primitive;
    memory a, b, c, scratchpad;
  };

  Impl(int64_t n_in, int64_t k_in, int64_t max_rows, WeightStorage storage)
      : n(n_in), k(k_in), packed(storage == WeightStorage::packed), stream(cpu_engine()) {
    choose(max_rows);
    weights = chosen->weights_desc();
    if (path != Path::bf16) wide_a = AlignedBuffer(static_cast<size_t>(max_rows * k) * sizeof(float), "widened rows");
    if (path == Path::f32_panels) wide_b = AlignedBuffer(static_cast<size_t>(panel * k) * sizeof(float), "widened weights");
    reserve_scratchpad(chosen->scratchpad_desc().get_size());
  }

  /// Chooses path, panel and kernel. max_rows is representative, because the layout of the weights does not depend on m.
  void choose(int64_t max_rows) {
    const auto candidate = [&](DataType t, const memory::desc& b, int64_t cols) {
      return describe(row_major(max_rows, k, k, t), b, row_major(max_rows, cols, n, DataType::f32));
    };
    path = Path::bf16;
    panel = n;
    chosen = candidate(DataType::bf16, packed ? any_weights(n, k, DataType::bf16) : plain_weights(n, k, DataType::bf16), n);
    if (is_blockwise(chosen)) return;
    // With packed weights, block-wise float32 kernels are up to twice as fast as panels. The other kernel (AVX2) is faster with
    // panels, because pre-widened weights double the number of bytes to read.
    path = Path::f32_blocked;
    chosen = packed ? candidate(DataType::f32, any_weights(n, k, DataType::f32), n) : std::nullopt;
    if (is_blockwise(chosen)) return;
    path = Path::f32_panels;
    panel = panel_rows(n, k);
    chosen = candidate(DataType::f32, plain_weights(panel, k, DataType::f32), panel);
    if (!chosen) throw Error(ErrorCode::unsupported, "oneDNN has no float32 matrix product on this machine");
  }

  void reserve_scratchpad(size_t bytes) {
    if (bytes > scratchpad.bytes()) scratchpad = AlignedBuffer(bytes, "oneDNN scratchpad");
  }

  /// The product of m rows with `cols` rows of B; created on first use.
  Product& product(int64_t m, int64_t cols) {
    const auto found = products.find({m, cols});
    if (found != products.end()) return found->second;
    const DataType type = path == Path::bf16 ? DataType::bf16 : DataType::f32;
    const memory::desc b = cols == panel ? weights : plain_weights(cols, k, type);
    const auto description = describe(row_major(m, k, k, type), b, row_major(m, cols, n, DataType::f32));
    if (!description) throw Error(ErrorCode::unsupported, "oneDNN has no product of " + std::to_string(m) + " rows");
    reserve_scratchpad(description->scratchpad_desc().get_size());
    const auto operand = [](const memory::desc& desc) { return memory(desc, cpu_engine(), nullptr); };
    Product made{dnnl::matmul(*description), operand(description->src_desc()), operand(description->weights_desc()),
                 operand(description->dst_desc()), operand(description->scratchpad_desc())};
    return products.emplace(std::pair{m, cols}, std::move(made)).first->second;
  }

  void execute(Product& product, const void* a, const void* b, float* c) {
    product.a.set_data_handle(const_cast<void*>(a));
    product.b.set_data_handle(const_cast<void*>(b));
    product.c.set_data_handle(c);
    product.scratchpad.set_data_handle(scratchpad.as<void>());
    const dnnl_exec_arg_t arguments[] = {{DNNL_ARG_SRC, product.a.get()},
                                         {DNNL_ARG_WEIGHTS, product.b.get()},
                                         {DNNL_ARG_DST, product.c.get()},
                                         {DNNL_ARG_SCRATCHPAD, product.scratchpad.get()}};
    dnnl::error::wrap_c_api(dnnl_primitive_execute(product.primitive.get(), stream.get(), 4, arguments), "execute a product");
    stream.wait();
  }

  void run(const void* b, const uint16_t* a, int64_t m, float* c) {
    if (path == Path::bf16) return execute(product(m, n), a, b, c);
    widen_bf16(a, m * k, wide_a.as<float>());
    if (path == Path::f32_blocked) return execute(product(m, n), wide_a.as<float>(), b, c);
    for (int64_t col = 0; col < n; col += panel) {
      const int64_t cols = std::min(panel, n - col);
      widen_bf16(static_cast<const uint16_t*>(b) + col * k, cols * k, wide_b.as<float>());
      execute(product(m, cols), wide_a.as<float>(), wide_b.as<float>(), c + col);
    }
  }

  size_t packed_bytes() const {
    if (!packed) return 0;
    return path == Path::f32_panels ? static_cast<size_t>(n * k) * sizeof(uint16_t) : weights.get_size();
  }

  void pack(const uint16_t* b, std::byte* to) {
    if (path == Path::f32_panels) {
      std::memcpy(to, b, packed_bytes());
      return;
    }
    memory source(plain_weights(n, k, DataType::bf16), cpu_engine(), const_cast<uint16_t*>(b));
    memory target(weights, cpu_engine(), to);
    dnnl::reorder(source, target).execute(stream, source, target);
    stream.wait();
  }

  const int64_t n, k;
  const bool packed;
  Path path = Path::bf16;
  int64_t panel = 0;  // rows of B of one product; n unless f32_panels
  dnnl::stream stream;
  std::optional<dnnl::matmul::primitive_desc> chosen;  // for max_rows rows and one whole panel
  memory::desc weights;                                // B of one whole panel
  std::map<std::pair<int64_t, int64_t>, Product> products;
  AlignedBuffer wide_a, wide_b, scratchpad;
};

OnednnGemm::OnednnGemm(int64_t n, int64_t k, int64_t max_rows, WeightStorage storage)
    : impl_(guarded("prepare a matrix product", [&] { return std::make_unique<Impl>(n, k, max_rows, storage); })) {}
OnednnGemm::~OnednnGemm() = default;

size_t OnednnGemm::packed_bytes() const { return impl_->packed_bytes(); }
size_t OnednnGemm::scratch_bytes() const { return impl_->wide_a.bytes() + impl_->wide_b.bytes() + impl_->scratchpad.bytes(); }

std::string OnednnGemm::implementation() const {
  return std::string(impl_->path == Path::bf16 ? "bf16 " : "f32 ") + impl_->chosen->impl_info_str();
}

void OnednnGemm::pack(const uint16_t* b, std::byte* packed) {
  guarded("pack weights", [&] { impl_->pack(b, packed); });
}

void OnednnGemm::run(const void* b, const uint16_t* a, int64_t m, float* c) {
  guarded("multiply", [&] { impl_->run(b, a, m, c); });
}

}  // namespace switchyard::detail

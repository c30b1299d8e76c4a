// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string_view>
#include <utility>

#include "base/number_formats.hpp"
#include "routing/check.hpp"
#include "routing/names.hpp"
#include "routing/tensor_file.hpp"
#include "switchyard/routing.hpp"

namespace switchyard {
namespace {

namespace fs = std::filesystem;
using detail::ByteSource;
using detail::ElementType;
using detail::malformed;
using detail::quote_text;
using detail::TensorInfo;
using detail::TensorTable;

constexpr int64_t kMaxRecordedRanks = 65536;
constexpr int kSingleTensor = -1;  ///< rank of names without a rank: one tensor contains all ranks

/// One rank's recording: the start of its rows.
struct RankData {
  int64_t tokens = 0;
  int64_t first = 0;        ///< index of this rank's first element in its tensors
  TensorInfo ids, weights;  ///< `offset` of this rank's first element
};

struct Layer {
  int topk = 0;
  bool has_weights = false;
  std::vector<RankData> ranks;
};

/// The tensors of one (layer, rank) by name.
struct Named {
  const TensorInfo* ids = nullptr;
  const TensorInfo* weights = nullptr;
};

/// layer -> rank -> tensors
using Index = std::map<int, std::map<int, Named>>;

[[noreturn]] void bad_tensor(const TensorInfo& tensor, const std::string& expected, const std::string& found) {
  malformed(tensor.source->name(), tensor.label, expected, found);
}

/// Sorts the tensors by the layer and rank in their names, ignoring other names.
Index index_tensors(const std::string& file, const TensorTable& table) {
  Index index;
  for (const auto& [name, tensor] : table.tensors) {
    const std::optional<detail::TensorName> parsed = detail::parse_tensor_name(name);
    if (!parsed) continue;
    Named& named = index[parsed->layer][parsed->rank];
    const TensorInfo*& slot = parsed->is_weights ? named.weights : named.ids;
    if (slot != nullptr) bad_tensor(tensor, "one tensor of this layer, rank and kind", "two, differing in leading zeros");
    slot = &tensor;
  }
  if (index.empty()) {
    std::string found;
    for (const auto& [name, tensor] : table.tensors) {
      if (found.size() > 200) {
        found += ", ...";
        break;
      }
      found += (found.empty() ? "" : ", ") + quote_text(name);
    }
    malformed(file, "file", "tensors named [layer{l}.][rank{r}.]topk_ids", found.empty() ? "no tensors" : found);
  }
  return index;
}

void check_ids(const TensorInfo& ids, bool single) {
  if (!detail::is_integer(ids.type)) {
    bad_tensor(ids, "integer ids (I8 to I64, U8 to U64; '|i1' to '<i8', '|u1' to '<u8' in .npy)", quote_text(ids.spelled_type));
  }
  const size_t dimensions = ids.shape.size();
  if (dimensions != 2 && !(single && dimensions == 3)) {
    bad_tensor(ids, single ? "shape [T, K] or [R, T, K]" : "shape [T, K]", detail::shape_text(ids.shape));
  }
  if (ids.shape.back() < 1 || ids.shape.back() > kMaxTopk) {
    bad_tensor(ids, "K, the last extent, of 1 to " + std::to_string(kMaxTopk), detail::shape_text(ids.shape));
  }
  if (dimensions == 3 && (ids.shape[0] < 1 || ids.shape[0] > kMaxRecordedRanks)) {
    bad_tensor(ids, "R, the first extent, of 1 to " + std::to_string(kMaxRecordedRanks), detail::shape_text(ids.shape));
  }
  // Serving engines write [tokens, layers, K], which differs from [R, T, K] only in the extents.
  if (dimensions == 3 && ids.shape[1] > 0 && (ids.shape[0] > kMaxRanks || (ids.shape[1] > 1 && ids.shape[0] > ids.shape[1]))) {
    bad_tensor(ids,
               "shape [R, T, K] with R at most T and " + std::to_string(kMaxRanks) +
                   " (is it [tokens, layers, K]? then save each layer ids[:, l] as layer{l}.topk_ids; or each rank as "
                   "rank{r}.topk_ids)",
               detail::shape_text(ids.shape));
  }
}

void check_weights(const TensorInfo& weights, const TensorInfo& ids) {
  if (weights.type != ElementType::f32 && weights.type != ElementType::f16 && weights.type != ElementType::bf16) {
    bad_tensor(weights, "float32, float16 or bfloat16 weights (F32, F16, BF16; '<f4', '<f2' in .npy)",
               quote_text(weights.spelled_type));
  }
  if (weights.shape != ids.shape) {
    bad_tensor(weights, "shape " + detail::shape_text(ids.shape) + " as its ids", detail::shape_text(weights.shape));
  }
}

/// Appends the rank in `named`, or the R ranks in its single tensor.
void append_ranks(const Named& named, bool single, Layer& layer) {
  if (named.ids == nullptr) bad_tensor(*named.weights, "a tensor of topk_ids beside it", "none");
  const TensorInfo& ids = *named.ids;
  check_ids(ids, single);
  if (named.weights != nullptr) check_weights(*named.weights, ids);
  const int64_t ranks = ids.shape.size() == 3 ? ids.shape[0] : 1;
  const int64_t tokens = ids.shape[ids.shape.size() - 2];
  const int topk = static_cast<int>(ids.shape.back());
  if (layer.ranks.empty()) layer.topk = topk;
  if (topk != layer.topk) {
    bad_tensor(ids, "K " + std::to_string(layer.topk) + " as on the layer's other ranks", detail::shape_text(ids.shape));
  }
  for (int64_t r = 0; r < ranks; ++r) {
    RankData data;
    data.tokens = tokens;
    data.first = r * tokens * topk;
    data.ids = ids;
    data.ids.offset += static_cast<uint64_t>(data.first) * detail::element_bytes(ids.type);
    if (named.weights != nullptr) {
      data.weights = *named.weights;
      data.weights.offset += static_cast<uint64_t>(data.first) * detail::element_bytes(named.weights->type);
    }
    layer.ranks.push_back(std::move(data));
  }
}

/// Weights must exist either for all tokens of a layer or for none.
void check_layer(Layer& layer) {
  const auto with = [](const RankData& data) { return data.tokens > 0 && data.weights.source != nullptr; };
  layer.has_weights = std::any_of(layer.ranks.begin(), layer.ranks.end(), with);
  for (const RankData& data : layer.ranks) {
    if (layer.has_weights && data.tokens > 0 && !with(data))
      bad_tensor(data.ids, "weights, as on the layer's other ranks", "none");
  }
}

std::map<int, Layer> build_layers(const std::string& file, const TensorTable& table) {
  std::map<int, Layer> layers;
  for (const auto& [number, ranks] : index_tensors(file, table)) {
    Layer& layer = layers[number];
    int next = ranks.begin()->first;
    if (next == kSingleTensor && ranks.size() > 1) {
      const TensorInfo& tensor =
          ranks.begin()->second.ids != nullptr ? *ranks.begin()->second.ids : *ranks.begin()->second.weights;
      bad_tensor(tensor, "either this tensor or tensors by rank in its layer", "both");
    }
    if (next != kSingleTensor) next = 0;
    for (const auto& [rank, named] : ranks) {
      if (rank != next) {
        malformed(file, "layer " + (number == kNoLayer ? std::string("without number") : std::to_string(number)),
                  "ranks 0, 1, 2, ... without gaps", "rank " + std::to_string(rank) + " but no rank " + std::to_string(next));
      }
      append_ranks(named, rank == kSingleTensor, layer);
      ++next;
    }
    check_layer(layer);
  }
  return layers;
}

int metadata_experts(const std::string& file, const std::map<std::string, std::string>& metadata) {
  const auto entry = metadata.find("num_experts");
  if (entry == metadata.end()) return 0;
  const std::string& text = entry->second;
  int experts = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), experts);
  if (error != std::errc() || end != text.data() + text.size() || experts < 1) {
    malformed(file, "metadata entry num_experts", "an integer of 1 to 2147483647", quote_text(text));
  }
  return experts;
}

/// Reads elements [begin, begin + count) of `tensor` in pieces, passing each piece to consume(bytes, elements).
template <class Consume>
void read_elements(const TensorInfo& tensor, int64_t begin, int64_t count, Consume consume) {
  constexpr int64_t kPiece = 1 << 17;
  const size_t element = detail::element_bytes(tensor.type);
  std::vector<std::byte> piece(static_cast<size_t>(std::min(kPiece, count)) * element);
  while (count > 0) {
    const int64_t now = std::min(kPiece, count);
    const std::span<std::byte> bytes = std::span(piece).first(static_cast<size_t>(now) * element);
    tensor.source->read(tensor.offset + static_cast<uint64_t>(begin) * element, bytes);
    consume(bytes.data(), static_cast<size_t>(now));
    begin += now;
    count -= now;
  }
}

/// Ids outside the range of int32 denote no expert; truncation must not map them to one.
template <class T>
void widen_ids(const std::byte* bytes, size_t n, int32_t* out) {
  for (size_t i = 0; i < n; ++i) {
    T id;
    std::memcpy(&id, bytes + i * sizeof id, sizeof id);
    out[i] = std::in_range<int32_t>(id) ? static_cast<int32_t>(id) : -1;
  }
}

void read_ids(const TensorInfo& tensor, int64_t begin, int64_t count, int32_t* out) {
  read_elements(tensor, begin, count, [&](const std::byte* bytes, size_t n) {
    switch (tensor.type) {
      case ElementType::i8: widen_ids<int8_t>(bytes, n, out); break;
      case ElementType::u8: widen_ids<uint8_t>(bytes, n, out); break;
      case ElementType::i16: widen_ids<int16_t>(bytes, n, out); break;
      case ElementType::u16: widen_ids<uint16_t>(bytes, n, out); break;
      case ElementType::i32: widen_ids<int32_t>(bytes, n, out); break;
      case ElementType::u32: widen_ids<uint32_t>(bytes, n, out); break;
      case ElementType::i64: widen_ids<int64_t>(bytes, n, out); break;
      case ElementType::u64: widen_ids<uint64_t>(bytes, n, out); break;
      case ElementType::f32:
      case ElementType::f16:
      case ElementType::bf16:
      case ElementType::other: break;  // rejected by check_ids
    }
    out += n;
  });
}

/// "[3, 17, 2]" for element `number` of a tensor.
std::string index_text(const TensorInfo& tensor, int64_t number) {
  std::vector<int64_t> index(tensor.shape.size());
  for (size_t d = index.size(); d-- > 0; number /= tensor.shape[d]) index[d] = number % tensor.shape[d];
  return detail::shape_text(index);
}

/// `first` is the index within the tensor of the element at `tensor.offset`. Weights must be finite.
void read_weights(const TensorInfo& tensor, int64_t first, int64_t begin, int64_t count, float* out) {
  const DType type = tensor.type == ElementType::f32 ? DType::f32 : tensor.type == ElementType::f16 ? DType::f16 : DType::bf16;
  int64_t number = first + begin;
  read_elements(tensor, begin, count, [&](const std::byte* bytes, size_t n) {
    for (size_t i = 0; i < n; ++i, ++number) {
      out[i] = detail::load_element(bytes, type, static_cast<int64_t>(i));
      if (!std::isfinite(out[i]))
        bad_tensor(tensor, "finite weights", std::to_string(out[i]) + " at " + index_text(tensor, number));
    }
    out += n;
  });
}

}  // namespace

struct RoutingFile::Impl {
  std::string name;
  std::vector<std::unique_ptr<ByteSource>> sources;  ///< owned here, referenced by the TensorInfos
  std::map<std::string, std::string> metadata;
  int num_experts = 0;
  std::map<int, Layer> layers;

  explicit Impl(std::string file) : name(std::move(file)) {}

  const ByteSource& add(std::unique_ptr<ByteSource> source) {
    sources.push_back(std::move(source));
    return *sources.back();
  }

  void build(TensorTable table) {
    layers = build_layers(name, table);
    metadata = std::move(table.metadata);
    num_experts = metadata_experts(name, metadata);
  }

  /// Builds from a single file of either kind.
  void build_from(const ByteSource& source, bool npy) {
    if (!npy) return build(detail::parse_safetensors(source));
    TensorTable table;
    table.tensors["topk_ids"] = detail::parse_npy(source);
    const std::optional<std::string> sibling = detail::weights_path(source.name());
    std::error_code ignored;
    if (sibling && fs::exists(*sibling, ignored)) {
      table.tensors["topk_weights"] = detail::parse_npy(add(detail::open_file(*sibling)));
    }
    build(std::move(table));
  }

  /// Builds from the `.npy` files in a folder; each file is named after its tensor.
  void build_from_folder() {
    TensorTable table;
    std::error_code error;
    for (fs::directory_iterator entry(name, error), end; !error && entry != end; entry.increment(error)) {
      const fs::path& path = entry->path();
      if (path.extension() != ".npy" || !detail::parse_tensor_name(path.stem().string())) continue;
      table.tensors[path.stem().string()] = detail::parse_npy(add(detail::open_file(path.string())));
    }
    if (error) throw Error(ErrorCode::io, name + ": cannot read the folder: " + error.message());
    if (table.tensors.empty()) malformed(name, "folder", "files named [layer{l}.][rank{r}.]topk_ids.npy", "none");
    build(std::move(table));
  }

  const Layer& layer(const char* function, int number) const {
    const auto at = layers.find(number);
    if (at != layers.end()) return at->second;
    std::string allowed;
    for (const auto& [l, data] : layers) allowed += (allowed.empty() ? "" : ", ") + std::to_string(l);
    detail::refuse(function, "layer", std::to_string(number), allowed + " (" + name + ")");
  }

  const RankData& rank(const char* function, int layer_number, int rank_number) const {
    const Layer& data = layer(function, layer_number);
    detail::check_range(function, "rank", rank_number, 0, std::ssize(data.ranks) - 1);
    return data.ranks[static_cast<size_t>(rank_number)];
  }

  /// Returns E for the caller's `given` value.
  int experts(const char* function, int given) const {
    if (given == 0 && num_experts > 0) return num_experts;
    if (given < 1 || given < num_experts) {
      const std::string lowest = std::to_string(std::max(num_experts, 1)) + " and above";
      detail::refuse(function, "num_experts", std::to_string(given),
                     num_experts > 0
                         ? "0, or " + lowest + " (" + name + " was recorded with " + std::to_string(num_experts) + ")"
                         : lowest + " (" + name + " does not tell it)");
    }
    return given;
  }

  /// Copies `count` tokens, starting at token `begin` of `data`, to `routing`, starting at token `at`.
  static void copy(const RankData& data, int64_t begin, int64_t count, Routing& routing, int64_t at) {
    const int64_t k = routing.topk;
    read_ids(data.ids, begin * k, count * k, routing.topk_ids.data() + at * k);
    if (!routing.topk_weights.empty())
      read_weights(data.weights, data.first, begin * k, count * k, routing.topk_weights.data() + at * k);
  }
};

RoutingFile RoutingFile::open(const std::string& path) {
  auto impl = std::make_shared<Impl>(path);
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) {
    impl->build_from_folder();
  } else {
    const ByteSource& source = impl->add(detail::open_file(path));
    impl->build_from(source, detail::has_npy_magic(source) || fs::path(path).extension() == ".npy");
  }
  return RoutingFile(std::move(impl));
}

RoutingFile RoutingFile::parse(std::span<const std::byte> image, const std::string& name) {
  auto impl = std::make_shared<Impl>(name);
  const ByteSource& source = impl->add(detail::copy_image(image, name));
  if (detail::has_npy_magic(source)) {
    TensorTable table;
    table.tensors["topk_ids"] = detail::parse_npy(source);
    impl->build(std::move(table));
  } else {
    impl->build(detail::parse_safetensors(source));
  }
  return RoutingFile(std::move(impl));
}

std::vector<int> RoutingFile::layers() const {
  std::vector<int> numbers;
  for (const auto& [number, layer] : impl_->layers) numbers.push_back(number);
  return numbers;
}

int RoutingFile::ranks(int layer) const { return static_cast<int>(impl_->layer("RoutingFile::ranks", layer).ranks.size()); }
int RoutingFile::topk(int layer) const { return impl_->layer("RoutingFile::topk", layer).topk; }
bool RoutingFile::has_weights(int layer) const { return impl_->layer("RoutingFile::has_weights", layer).has_weights; }
int64_t RoutingFile::num_tokens(int layer, int rank) const {
  return impl_->rank("RoutingFile::num_tokens", layer, rank).tokens;
}
int RoutingFile::num_experts() const noexcept { return impl_->num_experts; }
const std::map<std::string, std::string>& RoutingFile::metadata() const noexcept { return impl_->metadata; }

Routing RoutingFile::read(int layer, int rank, int num_experts) const {
  constexpr const char* kRead = "RoutingFile::read";
  const RankData& data = impl_->rank(kRead, layer, rank);
  const Layer& from = impl_->layer(kRead, layer);
  const int experts = impl_->experts(kRead, num_experts);
  Routing routing = detail::make_routing(kRead, experts, from.topk, data.tokens, from.has_weights);
  Impl::copy(data, 0, data.tokens, routing, 0);
  return routing;
}

Routing RoutingFile::read_share(int layer, int rank, int64_t tokens, int num_experts) const {
  constexpr const char* kReadShare = "RoutingFile::read_share";
  const Layer& from = impl_->layer(kReadShare, layer);
  detail::check_range(kReadShare, "rank", rank, 0, kMaxRecordedRanks - 1);
  detail::check_tokens(kReadShare, tokens, from.topk);
  const int experts = impl_->experts(kReadShare, num_experts);
  const int recorded = static_cast<int>(from.ranks.size());
  const RankData& data = from.ranks[static_cast<size_t>(rank % recorded)];
  if (tokens > 0 && data.tokens == 0) {
    detail::refuse(kReadShare, "tokens", std::to_string(tokens),
                   "0, because recorded rank " + std::to_string(rank % recorded) + " has no tokens (" + impl_->name + ")");
  }
  Routing routing = detail::make_routing(kReadShare, experts, from.topk, tokens, from.has_weights);
  if (tokens == 0) return routing;
  int64_t begin = (rank / recorded) * (tokens % data.tokens) % data.tokens;
  for (int64_t at = 0; at < tokens;) {
    const int64_t count = std::min(tokens - at, data.tokens - begin);
    Impl::copy(data, begin, count, routing, at);
    at += count;
    begin = 0;
  }
  return routing;
}

}  // namespace switchyard

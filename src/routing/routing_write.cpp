// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>
#include <utility>

#include "base/unique_fd.hpp"
#include "routing/check.hpp"
#include "routing/names.hpp"
#include "switchyard/routing.hpp"

namespace switchyard {
namespace {

constexpr int kLargestNumber = 999'999;  // maximum layer or rank number in a name

/// A file that receives its name when commit() is called and is otherwise removed.
class NewFile {
 public:
  explicit NewFile(const std::string& path) : path_(path), temporary_(path + ".tmp" + std::to_string(::getpid())) {
    fd_.reset(::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
    if (!fd_) fail("create");
  }
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;
  ~NewFile() {
    if (!committed_ && fd_) ::unlink(temporary_.c_str());
  }

  void write(const void* data, size_t bytes) {
    const auto* at = static_cast<const char*>(data);
    while (bytes > 0) {
      const ssize_t done = ::write(fd_.get(), at, bytes);
      if (done < 0 && errno == EINTR) continue;
      if (done < 0) fail("write");
      at += done;
      bytes -= static_cast<size_t>(done);
    }
  }

  void commit() {
    if (std::rename(temporary_.c_str(), path_.c_str()) != 0) fail("rename to");
    committed_ = true;
  }

 private:
  [[noreturn]] void fail(const char* action) const {
    throw Error(ErrorCode::io, path_ + ": cannot " + action + ": " + std::generic_category().message(errno));
  }

  std::string path_, temporary_;
  detail::UniqueFd fd_;
  bool committed_ = false;
};

template <class T>
size_t bytes_of(const std::vector<T>& values) {
  return values.size() * sizeof(T);
}

/// Throws unless all parts fit in one file; returns their common E (0 if there are no parts).
int check_recording(const char* function, std::span<const RecordedRouting> recording) {
  std::set<std::pair<int, int>> seen;
  std::map<int, bool> weighted;  // by layer, from its first rank with tokens
  for (const RecordedRouting& part : recording) {
    check_routing(part.routing);
    detail::check_range(function, "layer", part.layer, kNoLayer, kLargestNumber);
    detail::check_range(function, "rank", part.rank, 0, kLargestNumber);
    const std::string where = "layer " + std::to_string(part.layer) + " rank " + std::to_string(part.rank);
    if (!seen.insert({part.layer, part.rank}).second) detail::refuse(function, "recording", where + " twice", "each once");
    const bool weights = !part.routing.topk_weights.empty();
    if (part.routing.num_tokens > 0 && weighted.emplace(part.layer, weights).first->second != weights) {
      detail::refuse(function, "weights of " + where, weights ? "given" : "empty",
                     "weights on all ranks of a layer or on none");
    }
    if (part.routing.num_experts != recording[0].routing.num_experts) {
      detail::refuse(function, "num_experts of " + where, std::to_string(part.routing.num_experts),
                     std::to_string(recording[0].routing.num_experts) + ", as in the first part");
    }
  }
  return recording.empty() ? 0 : recording[0].routing.num_experts;
}

/// Header of a version 1 `.npy` file, padded to a multiple of 64 bytes.
std::string npy_header(const char* descr, const std::vector<int64_t>& shape) {
  std::string text = std::string("{'descr': '") + descr + "', 'fortran_order': False, 'shape': (";
  for (size_t i = 0; i < shape.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  text += "), }";
  constexpr size_t kPreamble = 10;
  text.append((64 - (kPreamble + text.size() + 1) % 64) % 64, ' ');
  text += '\n';
  return std::string("\x93NUMPY\x01\x00", 8) + static_cast<char>(text.size() & 0xFF) + static_cast<char>(text.size() >> 8) +
         text;
}

}  // namespace

void write_safetensors(const std::string& path, std::span<const RecordedRouting> recording,
                       const std::map<std::string, std::string>& metadata) {
  constexpr const char* kWrite = "write_safetensors";
  const int num_experts = check_recording(kWrite, recording);
  std::vector<const RecordedRouting*> parts;
  for (const RecordedRouting& part : recording) parts.push_back(&part);
  std::sort(parts.begin(), parts.end(), [](const RecordedRouting* a, const RecordedRouting* b) {
    return std::pair(a->layer, a->rank) < std::pair(b->layer, b->rank);
  });

  nlohmann::ordered_json header;
  header["__metadata__"] = nlohmann::ordered_json::object();
  for (const auto& [key, value] : metadata) header["__metadata__"][key] = value;
  if (num_experts > 0) header["__metadata__"]["num_experts"] = std::to_string(num_experts);
  size_t offset = 0;
  const auto add = [&](const RecordedRouting& part, bool weights, size_t bytes) {
    header[detail::format_tensor_name({part.layer, part.rank, weights})] = {
        {"dtype", weights ? "F32" : "I32"},
        {"shape", {part.routing.num_tokens, part.routing.topk}},
        {"data_offsets", {offset, offset + bytes}},
    };
    offset += bytes;
  };
  for (const RecordedRouting* part : parts) {
    add(*part, false, bytes_of(part->routing.topk_ids));
    if (!part->routing.topk_weights.empty()) add(*part, true, bytes_of(part->routing.topk_weights));
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const nlohmann::json::exception&) {
    detail::refuse(kWrite, "metadata", "not UTF-8", "UTF-8 text");
  }
  text.append((8 - text.size() % 8) % 8, ' ');

  NewFile file(path);
  const uint64_t length = text.size();
  file.write(&length, sizeof length);
  file.write(text.data(), text.size());
  for (const RecordedRouting* part : parts) {
    file.write(part->routing.topk_ids.data(), bytes_of(part->routing.topk_ids));
    file.write(part->routing.topk_weights.data(), bytes_of(part->routing.topk_weights));
  }
  file.commit();
}

void write_npy(const std::string& path, std::span<const Routing> ranks) {
  constexpr const char* kWrite = "write_npy";
  if (ranks.empty()) detail::refuse(kWrite, "ranks.size()", "0", "1 and above");
  bool with_weights = false, all_weights = true;
  for (const Routing& routing : ranks) {
    check_routing(routing);
    if (routing.num_tokens != ranks[0].num_tokens || routing.topk != ranks[0].topk ||
        routing.num_experts != ranks[0].num_experts) {
      detail::refuse(kWrite, "ranks", "of different shape",
                     "ranks with equal tokens, topk and num_experts; write_safetensors takes any");
    }
    if (routing.num_tokens > 0) {
      with_weights |= !routing.topk_weights.empty();
      all_weights &= !routing.topk_weights.empty();
    }
  }
  if (with_weights && !all_weights) detail::refuse(kWrite, "weights", "empty on some ranks", "weights on all ranks or on none");
  const std::optional<std::string> weights_path = detail::weights_path(path);
  if (with_weights && !weights_path) {
    detail::refuse(kWrite, "path", "'" + path + "'", "file names with 'topk_ids', so that the weights can be named alike");
  }

  std::vector<int64_t> shape = {ranks[0].num_tokens, ranks[0].topk};
  if (ranks.size() > 1) shape.insert(shape.begin(), std::ssize(ranks));
  NewFile ids(path);
  const std::string ids_header = npy_header("<i4", shape);
  ids.write(ids_header.data(), ids_header.size());
  for (const Routing& routing : ranks) ids.write(routing.topk_ids.data(), bytes_of(routing.topk_ids));
  if (with_weights) {
    NewFile weights(*weights_path);
    const std::string weights_header = npy_header("<f4", shape);
    weights.write(weights_header.data(), weights_header.size());
    for (const Routing& routing : ranks) weights.write(routing.topk_weights.data(), bytes_of(routing.topk_weights));
    weights.commit();
  }
  ids.commit();
}

}  // namespace switchyard

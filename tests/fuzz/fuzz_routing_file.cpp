// SPDX-License-Identifier: Apache-2.0
// Fuzz target of the routing file parsers. For any bytes, parsing must end with a RoutingFile whose data can be read, or with
// Error(io): no other exception, no access outside the image, no disproportionate memory use.
//
// With libFuzzer: compile with clang++ -fsanitize=fuzzer,address ... and run on a folder of files. With -DSWITCHYARD_FUZZ_MAIN:
// fuzz_routing_file [iterations] [seed] [file...] replays the files and then mutated valid files; the same arguments produce
// the same inputs.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "switchyard/routing.hpp"
#include "unit/routing/routing_file_images.hpp"

namespace switchyard {
namespace {

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "fuzz_routing_file: violated: %s\n", what);
  std::abort();
}

/// Reads everything and checks that sizes agree with each other and with the image.
void check_file(const RoutingFile& file, size_t image_bytes) {
  require(!file.layers().empty(), "a parsed file has a layer");
  const int experts = std::max(file.num_experts(), 4);
  for (const int layer : file.layers()) {
    const int ranks = file.ranks(layer), topk = file.topk(layer);
    require(ranks >= 1 && ranks <= 1000000 && topk >= 1 && topk <= kMaxTopk, "ranks and topk are in range");
    for (int rank = 0; rank < ranks; ++rank) {
      const int64_t tokens = file.num_tokens(layer, rank);
      require(tokens >= 0, "tokens are not negative");
      require(tokens == 0 || static_cast<uint64_t>(tokens) <= image_bytes / static_cast<uint64_t>(topk),
              "ids lie in the image");
      const Routing routing = file.read(layer, rank, experts);
      check_routing(routing);
      require(routing.num_tokens == tokens && routing.topk == topk && routing.num_experts == experts,
              "read gives what was announced");
      require(tokens == 0 || routing.topk_weights.empty() != file.has_weights(layer), "weights are there if announced");
    }
    if (file.num_tokens(layer, 0) > 0)
      check_routing(file.read_share(layer, std::min(2 * ranks, 65535) / ranks * ranks, 5, experts));
  }
}

/// True if the image was accepted.
bool run_one(const uint8_t* data, size_t size) {
  try {
    const RoutingFile file = RoutingFile::parse(std::as_bytes(std::span(data, size)), "image");
    check_file(file, size);
    return true;
  } catch (const Error& error) {
    require(error.code() == ErrorCode::io, "refusals are Error(io)");
    require(std::string(error.what()).size() < 2000, "error texts stay short");
    return false;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fuzz_routing_file: %s\n", error.what());
    require(false, "only switchyard::Error is thrown");
    return false;
  }
}

}  // namespace
}  // namespace switchyard

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  switchyard::run_one(data, size);
  return 0;
}

#ifdef SWITCHYARD_FUZZ_MAIN

namespace switchyard {
namespace {

using namespace images;

std::vector<std::string> good_files() {
  const std::string ids(96, '\1');
  return {
      npy(npy_dict("<i4", "(4, 6)"), ids),
      npy(npy_dict("<i8", "(2, 3, 2)"), ids, 2),
      npy(npy_dict("<i4", "(0, 8)"), "", 3),
      safetensors(object({entry("topk_ids", "I32", "[4,6]", 0, 96)}), ids),
      safetensors("{\"__metadata__\":{\"num_experts\":\"256\",\"model\":\"x\"}," +
                      entry("layer3.rank0.topk_ids", "I64", "[3,2]", 0, 48) + "," +
                      entry("layer3.rank1.topk_ids", "I64", "[1,2]", 48, 64) + "," +
                      entry("layer3.rank0.topk_weights", "F32", "[3,2]", 64, 88) + "," +
                      entry("layer3.rank1.topk_weights", "F16", "[1,2]", 88, 92) + "," + entry("other", "U8", "[4]", 92, 96) +
                      "}  ",
                  ids),
      safetensors(
          object({entry("layer0.topk_ids", "I32", "[2,3,2]", 0, 48), entry("layer0.topk_weights", "BF16", "[2,3,2]", 48, 72),
                  entry("layer1.rank0.topk_ids", "I32", "[2,3]", 72, 96)}),
          ids),
  };
}

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : state_(seed) {}

  size_t below(size_t n) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<size_t>((state_ >> 33) % n);
  }

  void mutate(std::string& bytes, const std::vector<std::string>& others) {
    static const std::vector<std::string> kPieces = {"18446744073709551615",
                                                     "9223372036854775807",
                                                     "4611686018427387904",
                                                     "-1",
                                                     "0",
                                                     "65536",
                                                     "1e99",
                                                     "null",
                                                     "{",
                                                     "}",
                                                     "[",
                                                     "]",
                                                     "\"",
                                                     ",",
                                                     ":",
                                                     "'",
                                                     "(",
                                                     ")",
                                                     "True",
                                                     "topk_ids",
                                                     "topk_weights",
                                                     "layer0.",
                                                     "rank1.",
                                                     "\\u0000",
                                                     "\xFF",
                                                     "I64",
                                                     "BF16",
                                                     std::string(8, '\xFF'),
                                                     std::string(8, '\0')};
    const size_t at = below(bytes.size() + 1), length = below(9);
    const std::string& piece = kPieces[below(kPieces.size())];
    const std::string& other = others[below(others.size())];
    switch (below(8)) {
      case 0:
        if (at < bytes.size()) bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(8)));
        break;
      case 1:
        if (at < bytes.size()) bytes[at] = static_cast<char>(below(256));
        break;
      case 2: bytes.erase(at, length); break;
      case 3: bytes.insert(at, piece); break;
      case 4: bytes.replace(at, std::min(piece.size(), bytes.size() - at), piece); break;
      case 5: bytes.insert(at, bytes.substr(at, length)); break;
      case 6: bytes = bytes.substr(0, at) + other.substr(std::min(other.size(), at)); break;
      case 7: change_number(bytes); break;
    }
    if (below(4) == 0) fix_length(bytes);
  }

 private:
  /// Changes one digit: the text stays well formed, but its meaning changes.
  void change_number(std::string& bytes) {
    std::vector<size_t> digits;
    for (size_t i = 8; i < bytes.size(); ++i) {
      if (bytes[i] >= '0' && bytes[i] <= '9') digits.push_back(i);
    }
    if (!digits.empty()) bytes[digits[below(digits.size())]] = static_cast<char>('0' + below(10));
  }

  /// Sets the header length of a safetensors file to match its text.
  static void fix_length(std::string& bytes) {
    const size_t end = bytes.rfind('}');
    if (end == std::string::npos || end < 8 || bytes[0] == '\x93') return;
    bytes.replace(0, 8, little_endian(end + 1 - 8, 8));
  }

  uint64_t state_;
};

int fuzz_main(int argc, char** argv) {
  const uint64_t iterations = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 20000;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  for (int i = 3; i < argc; ++i) {
    std::ifstream stream(argv[i], std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(stream), {}};
    const bool accepted = run_one(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
    std::printf("%s: %s\n", argv[i], accepted ? "accepted" : "refused");
  }
  const std::vector<std::string> seeds = good_files();
  for (const std::string& bytes : seeds) {
    require(run_one(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()), "good files are accepted");
  }
  Mutator mutator(seed);
  uint64_t accepted = 0;
  for (uint64_t i = 0; i < iterations; ++i) {
    std::string bytes = seeds[mutator.below(seeds.size())];
    for (size_t n = 1 + mutator.below(4); n > 0; --n) mutator.mutate(bytes, seeds);
    accepted += run_one(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  }
  std::printf("%llu mutated files, seed %llu: %llu accepted, %llu refused\n", static_cast<unsigned long long>(iterations),
              static_cast<unsigned long long>(seed), static_cast<unsigned long long>(accepted),
              static_cast<unsigned long long>(iterations - accepted));
  // Both outcomes must occur; otherwise, the mutations test nothing.
  return iterations < 1000 || (accepted > 0 && accepted < iterations) ? 0 : 1;
}

}  // namespace
}  // namespace switchyard

int main(int argc, char** argv) { return switchyard::fuzz_main(argc, argv); }

#endif

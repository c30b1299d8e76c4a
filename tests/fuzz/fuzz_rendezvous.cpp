// SPDX-License-Identifier: Apache-2.0
// Feeds arbitrary bytes to every message handler of the rendezvous that a stranger can reach. Runs with libFuzzer or, with
// SWITCHYARD_FUZZ_MAIN, as a standalone program: fuzz_rendezvous [iterations] [seed] runs a reproducible corpus of random,
// valid and damaged streams.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "bootstrap/net/socket.hpp"
#include "bootstrap/net/wire.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {
namespace {

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "fuzz_rendezvous: %s\n", what);
  std::abort();
}

/// An accepted message must equal the output of encode exactly.
template <class Message>
void check_round_trip(ByteSpan payload, const std::optional<Message>& message) {
  if (message) require(std::ranges::equal(encode(*message), payload), "a message does not come back as it was");
}

void check_payload(ByteSpan payload) {
  const Gate gate = {"a token that no input knows", 8, 0b0001};
  const auto hello = decode_hello(payload);
  const auto mesh_hello = decode_mesh_hello(payload);
  check_round_trip(payload, decode_greeting(payload));
  check_round_trip(payload, hello);
  check_round_trip(payload, decode_refusal(payload));
  check_round_trip(payload, decode_welcome(payload));
  check_round_trip(payload, decode_failure(payload));
  check_round_trip(payload, decode_progress(payload));
  check_round_trip(payload, decode_roster(payload));
  check_round_trip(payload, mesh_hello);
  check_round_trip(payload, decode_pulse(payload));
  check_round_trip(payload, decode_word(payload));
  if (hello) require(!judge_hello(*hello, gate, Nonce{}).empty(), "a stranger was admitted");
  if (mesh_hello) require(!judge_mesh_hello(*mesh_hello, gate, Nonce{}, 1).empty(), "a stranger was connected");
}

struct Outcome {
  size_t frames = 0;
  Bytes content;
  std::string error;
  bool operator==(const Outcome&) const = default;
};

Outcome read_stream(ByteSpan stream, size_t chunk) {
  FrameReader reader(kMaxHandshakeBytes);
  Outcome outcome;
  for (size_t at = 0; at < stream.size(); at += chunk) {
    reader.append(stream.subspan(at, std::min(chunk, stream.size() - at)));
    while (const auto frame = reader.take()) {
      require(frame->payload.size() <= kMaxHandshakeBytes, "a frame is larger than allowed");
      check_payload(frame->payload);
      const Bytes again = encode_frame(frame->kind, frame->sequence, frame->payload);
      outcome.content.insert(outcome.content.end(), again.begin(), again.end());
      ++outcome.frames;
    }
  }
  outcome.error = reader.error();
  require(outcome.content.size() <= stream.size() && std::equal(outcome.content.begin(), outcome.content.end(), stream.begin()),
          "the frames are not the stream");
  return outcome;
}

void check_store_text(ByteSpan bytes) {
  const std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  try {
    const Endpoint endpoint = parse_endpoint(text);
    require(!endpoint.name.empty(), "a store without a name was accepted");
    if (endpoint.is_unix()) require(resolve(endpoint, Deadline(Milliseconds{0})).size() == 1, "a Unix store has one address");
  } catch (const Error& error) {
    require(error.code() == ErrorCode::invalid_argument, "a bad store is the caller's argument");
  }
}

void check_all(ByteSpan input) {
  check_payload(input);
  check_store_text(input);
  const size_t chunk = input.empty() ? 1 : 1 + std::to_integer<size_t>(input[0]);
  require(read_stream(input, chunk) == read_stream(input, input.size() + 1), "the result depends on how the stream is cut");
}

}  // namespace
}  // namespace switchyard::detail

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  switchyard::detail::check_all(std::as_bytes(std::span(data, size)));
  return 0;
}

#if defined(SWITCHYARD_FUZZ_MAIN)
namespace switchyard::detail {
namespace {

/// A reproducible stream of numbers (splitmix64).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  size_t below(size_t n) { return static_cast<size_t>(next() % n); }
  Bytes bytes(size_t n) {
    Bytes out(n);
    for (std::byte& b : out) b = static_cast<std::byte>(next());
    return out;
  }
  std::string text(size_t n) {
    std::string out;
    for (size_t i = 0; i < n; ++i) out += static_cast<char>(' ' + below(95));
    return out;
  }

 private:
  uint64_t state_;
};

Bytes valid_payload(Random& random) {
  switch (random.below(10)) {
    case 0: return encode(Greeting{});
    case 1: {
      Hello hello;
      hello.rank = static_cast<int32_t>(random.below(12)) - 2;
      hello.world = 8;
      hello.host = {random.text(random.below(300)), random.text(random.below(40)), random.text(8)};
      hello.mesh_name = random.text(random.below(120));
      hello.proof = prove(hello, "another token", Nonce{});
      return encode(hello);
    }
    case 2: return encode(Failure{static_cast<int32_t>(random.next()), random.next(), random.text(random.below(5000))});
    case 3: return encode(Progress{random.next(), random.next()});
    case 4: {
      Roster roster;
      for (size_t r = random.below(70); r > 0; --r) roster.mesh_names.push_back(random.text(random.below(110)));
      for (size_t r = random.below(70); r > 0; --r)
        roster.reach.push_back({random.text(random.below(70)), static_cast<uint16_t>(random.next()), static_cast<uint8_t>(r)});
      return encode(roster);
    }
    case 5: return encode(Refusal{random.text(random.below(5000)), {}});
    case 6: return encode(Welcome{});
    case 7: return encode(Pulse{random.below(100), std::vector<uint64_t>(random.below(70), random.next())});
    case 8: return encode(random.next());
    default: return encode(MeshHello{static_cast<int32_t>(random.below(9)), static_cast<int32_t>(random.below(9)), {}, {}});
  }
}

Bytes some_input(Random& random) {
  if (random.below(8) == 0) return random.bytes(random.below(300));
  if (random.below(8) == 0) {
    const char* const prefixes[] = {"unix:", "unix:@", "unix:/", "tcp://", "tcp://[", ""};
    const std::string text =
        prefixes[random.below(6)] + random.text(random.below(130)) + (random.below(2) == 0 ? ":29500" : "");
    const auto bytes = std::as_bytes(std::span(text));
    return Bytes(bytes.begin(), bytes.end());
  }
  Bytes input;
  const bool bare = random.below(4) == 0;
  for (size_t count = bare ? 1 : random.below(5); count > 0; --count) {
    const Bytes payload = random.below(5) == 0 ? random.bytes(random.below(100)) : valid_payload(random);
    const Bytes frame = bare ? payload : encode_frame(static_cast<FrameKind>(random.below(15)), random.next(), payload);
    input.insert(input.end(), frame.begin(), frame.end());
  }
  for (size_t damage = random.below(3); damage > 0 && !input.empty(); --damage) {
    const size_t at = random.below(input.size());
    switch (random.below(4)) {
      case 0: input[at] = static_cast<std::byte>(random.next()); break;
      case 1: input[at] ^= static_cast<std::byte>(1 << random.below(8)); break;
      case 2: input.resize(at); break;
      default: input.insert(input.begin() + static_cast<std::ptrdiff_t>(at), static_cast<std::byte>(random.next())); break;
    }
  }
  return input;
}

}  // namespace
}  // namespace switchyard::detail

int main(int argc, char** argv) {
  using namespace switchyard::detail;
  const uint64_t iterations = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 20000;
  Random random(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
  size_t accepted = 0;
  for (uint64_t i = 0; i < iterations; ++i) {
    const Bytes input = some_input(random);
    check_all(input);
    accepted += read_stream(input, input.size() + 1).frames;
  }
  // A corpus that never passes the first check tests nothing.
  require(iterations < 100 || accepted > iterations / 4, "the corpus is too damaged to test the decoders");
  std::printf("fuzz_rendezvous: %llu inputs, %zu frames accepted\n", static_cast<unsigned long long>(iterations), accepted);
  return 0;
}
#endif

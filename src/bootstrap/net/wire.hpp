// SPDX-License-Identifier: Apache-2.0
// Wire format of the rendezvous: frames and the messages inside them. Pure functions over byte spans, without sockets or
// clocks. Parsers accept any input and never allocate more than a small multiple of its size. Format:
// docs/concepts/rendezvous.md.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bootstrap/net/sha256.hpp"

namespace switchyard::detail {

using Bytes = std::vector<std::byte>;
using ByteSpan = std::span<const std::byte>;
using Nonce = std::array<std::byte, 16>;

inline constexpr uint32_t kWireMagic = 0x42595753;  // "SWYB" in memory
inline constexpr uint16_t kWireVersion = 3;
inline constexpr size_t kFrameHeaderBytes = 24;
/// Maximum payload of every handshake message, and of any message before the peer has proved possession of the token.
inline constexpr uint64_t kMaxHandshakeBytes = 16384;
/// Maximum payload between ranks that trust each other.
inline constexpr uint64_t kMaxFrameBytes = uint64_t{1} << 32;

enum class FrameKind : uint16_t {
  greeting = 1,     ///< rank 0 -> newcomer: a nonce to sign
  hello = 2,        ///< newcomer -> rank 0: its identity, signed
  refusal = 3,      ///< rank 0 -> newcomer: not admitted, and the reason
  progress = 4,     ///< rank 0 -> ranks: the ranks that have arrived so far
  roster = 5,       ///< rank 0 -> ranks: all have arrived, and their addresses, signed
  ready = 6,        ///< rank -> rank 0: connected to all other ranks
  go = 7,           ///< rank 0 -> ranks: all ranks are ready
  failure = 8,      ///< rank 0 -> ranks: the group will not form, and the reason
  mesh_hello = 9,   ///< rank -> lower rank, first frame of a mesh connection (TCP: after a greeting), signed
  data = 10,        ///< rank -> rank: contribution to an all_gather
  descriptor = 11,  ///< rank -> rank: contribution to exchange_fds; the descriptor is sent with its first byte
  leave = 12,       ///< rank -> rank: the end of this connection is intended
  welcome = 13,     ///< to a newcomer: admitted, signed; all later frames of this connection are from the sender
  pulse = 14,       ///< rank -> rank on another host: sign of life, and the calls made so far
  aborted = 15,     ///< rank -> rank on another host: an abort word
};

struct Frame {
  FrameKind kind{};
  uint64_t sequence = 0;
  Bytes payload;
};

/// Returns header and payload: {magic u32, version u16, kind u16, sequence u64, payload bytes u64}, little endian.
Bytes encode_frame(FrameKind kind, uint64_t sequence, ByteSpan payload);

/// Splits a byte stream into frames.
class FrameReader {
 public:
  explicit FrameReader(uint64_t max_payload) : max_payload_(max_payload) {}
  void append(ByteSpan bytes);
  /// Returns the next complete frame, if any. None after an error.
  std::optional<Frame> take();
  /// Returns a description of the stream error, or "" if there is none.
  const std::string& error() const noexcept { return error_; }
  void set_max_payload(uint64_t bytes) noexcept { max_payload_ = bytes; }

 private:
  uint64_t max_payload_;
  Bytes buffer_;
  size_t taken_ = 0;  // consumed bytes at the start of buffer_
  std::string error_;
};

/// Identifies the machine of a process for shared memory and Unix sockets.
struct HostIdentity {
  std::string name;        ///< for error messages
  std::string boot;        ///< equal on the same running kernel
  std::string network;     ///< the network namespace
  std::string place = {};  ///< the user-specified host, or ""
  bool operator==(const HostIdentity&) const = default;
  /// Ranks with equal keys are on one host.
  std::string key() const { return place.empty() ? boot + "\n" + network : "=" + place; }
};
/// Returns the reason why a rank on `theirs` cannot share memory with rank 0 on `mine`, or "" if it can.
std::string describe_host_mismatch(int rank, const HostIdentity& mine, const HostIdentity& theirs);
/// Returns the reason why ranks a and b, which specify the same host, cannot share one, or "" if they can.
std::string describe_place_conflict(int a, const HostIdentity& of_a, int b, const HostIdentity& of_b);

struct Greeting {
  Nonce nonce{};
};

struct Hello {
  int32_t rank = 0;
  int32_t world = 0;
  Nonce nonce{};
  HostIdentity host;
  std::string mesh_name;  ///< abstract Unix socket where this rank accepts mesh connections
  uint16_t port = 0;      ///< TCP port for connections of other hosts; 0: none
  Digest proof{};
};

struct Refusal {
  std::string text;
  Digest proof{};  ///< valid only for a newcomer whose hello was read and whose token is the same
};

struct Welcome {
  Digest proof{};
};

struct Failure {
  int32_t rank = -1;     ///< the rank that failed, or -1
  uint64_t missing = 0;  ///< bit r: rank r has not arrived
  std::string text;
};

struct Progress {
  uint64_t arrived = 0;   ///< bit r: rank r is connected
  uint64_t departed = 0;  ///< bit r: rank r was connected, and ended or gave up
};

/// Address at which ranks on other hosts reach a rank.
struct Reach {
  std::string address;  ///< numeric, as seen by rank 0; "": the address at which the reader reached rank 0
  uint16_t port = 0;
  uint8_t host = 0;  ///< host of the rank; hosts are numbered by their lowest ranks
};

struct Roster {
  Nonce session{};
  std::vector<std::string> mesh_names;  ///< by rank
  std::vector<Reach> reach;             ///< by rank; empty: one host
  Digest proof{};
};

struct MeshHello {
  int32_t from = 0;
  int32_t to = 0;
  Nonce session{};
  Digest proof{};
  Nonce nonce{};  ///< TCP: nonce to sign
};

/// A rank's report of its calls.
struct Pulse {
  uint64_t last = 0;            ///< number of its last call
  std::vector<uint64_t> words;  ///< of the calls up to `last` that were not yet announced to the reader
};

Bytes encode(const Greeting& message);
Bytes encode(const Hello& message);
Bytes encode(const Refusal& message);
Bytes encode(const Welcome& message);
Bytes encode(const Failure& message);
Bytes encode(const Progress& message);
Bytes encode(const Roster& message);
Bytes encode(const MeshHello& message);
Bytes encode(const Pulse& message);
/// Encodes an abort word.
Bytes encode(uint64_t word);

/// Return nullopt unless the payload is exactly one message of the kind.
std::optional<Greeting> decode_greeting(ByteSpan payload);
std::optional<Hello> decode_hello(ByteSpan payload);
std::optional<Refusal> decode_refusal(ByteSpan payload);
std::optional<Welcome> decode_welcome(ByteSpan payload);
std::optional<Failure> decode_failure(ByteSpan payload);
std::optional<Progress> decode_progress(ByteSpan payload);
std::optional<Roster> decode_roster(ByteSpan payload);
std::optional<MeshHello> decode_mesh_hello(ByteSpan payload);
std::optional<Pulse> decode_pulse(ByteSpan payload);
std::optional<uint64_t> decode_word(ByteSpan payload);

/// A proof covers every other field of its message and, against replay, a nonce chosen by the verifying side. For refusal,
/// welcome and roster, this is the nonce in the rank's hello; for mesh, the session chosen by rank 0 for this rendezvous and,
/// over TCP, the greeting from the accepting rank.
Digest prove(const Hello& message, std::string_view token, const Nonce& greeting);
Digest prove(const Refusal& message, std::string_view token, const Nonce& hello);
Digest prove(const Welcome& message, std::string_view token, const Nonce& hello);
Digest prove(const Roster& message, std::string_view token, const Nonce& hello);
Digest prove(const MeshHello& message, std::string_view token, const Nonce& greeting = {});

/// Rank 0's state when a hello arrives.
struct Gate {
  std::string_view token;
  int world = 0;
  uint64_t arrived = 0;  ///< bit r: rank r has already arrived
};
/// Returns the reason why the newcomer is not admitted, or "" if it is admitted. Discloses nothing about the job to newcomers
/// without the token.
std::string judge_hello(const Hello& message, const Gate& gate, const Nonce& greeting);
/// Like judge_hello(), for a mesh connection to rank `me`.
std::string judge_mesh_hello(const MeshHello& message, const Gate& gate, const Nonce& session, int me,
                             const Nonce& greeting = {});

}  // namespace switchyard::detail

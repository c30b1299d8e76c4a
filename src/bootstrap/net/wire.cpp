// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/net/wire.hpp"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "switchyard/types.hpp"

namespace switchyard::detail {
namespace {

constexpr size_t kMaxText = 4096;
constexpr size_t kMaxName = 100;
constexpr size_t kMaxHostField = 256;
constexpr size_t kMaxAddress = 64;
constexpr size_t kMaxCalls = 64;

class Writer {
 public:
  template <class T>
  Writer& number(T value) {
    for (size_t i = 0; i < sizeof(T); ++i) bytes_.push_back(static_cast<std::byte>(static_cast<uint64_t>(value) >> (8 * i)));
    return *this;
  }
  Writer& raw(ByteSpan bytes) {
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
    return *this;
  }
  Writer& text(std::string_view text, size_t max) {
    text = text.substr(0, max);
    return number(static_cast<uint16_t>(text.size())).raw(std::as_bytes(std::span(text)));
  }
  Bytes take() { return std::move(bytes_); }

 private:
  Bytes bytes_;
};

/// Reads in order. After the first read beyond the end, every read yields zero and complete() returns false.
class Reader {
 public:
  explicit Reader(ByteSpan bytes) : rest_(bytes) {}
  template <class T>
  Reader& number(T& value) {
    const ByteSpan bytes = next(sizeof(T));
    uint64_t word = 0;
    for (size_t i = 0; i < bytes.size(); ++i) word |= std::to_integer<uint64_t>(bytes[i]) << (8 * i);
    value = static_cast<T>(word);
    return *this;
  }
  template <size_t n>
  Reader& raw(std::array<std::byte, n>& out) {
    const ByteSpan bytes = next(n);
    std::copy(bytes.begin(), bytes.end(), out.begin());
    return *this;
  }
  Reader& text(std::string& out, size_t max) {
    uint16_t length = 0;
    number(length);
    if (length > max) ok_ = false;
    const ByteSpan bytes = next(length);
    out.assign(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    return *this;
  }
  bool ok() const { return ok_; }
  bool complete() const { return ok_ && rest_.empty(); }

 private:
  ByteSpan next(size_t n) {
    if (!ok_ || rest_.size() < n) {
      ok_ = false;
      return {};
    }
    const ByteSpan bytes = rest_.first(n);
    rest_ = rest_.subspan(n);
    return bytes;
  }
  ByteSpan rest_;
  bool ok_ = true;
};

Writer& put_hello_fields(Writer& w, const Hello& m) {
  return w.number(m.rank)
      .number(m.world)
      .raw(m.nonce)
      .text(m.host.name, kMaxHostField)
      .text(m.host.boot, kMaxHostField)
      .text(m.host.network, kMaxHostField)
      .text(m.host.place, kMaxHostField)
      .text(m.mesh_name, kMaxName)
      .number(m.port);
}

Writer& put_roster_fields(Writer& w, const Roster& m) {
  w.raw(m.session).number(static_cast<uint32_t>(m.mesh_names.size()));
  for (const std::string& name : m.mesh_names) w.text(name, kMaxName);
  w.number(static_cast<uint32_t>(m.reach.size()));
  for (const Reach& reach : m.reach) w.text(reach.address, kMaxAddress).number(reach.port).number(reach.host);
  return w;
}

Writer& put_mesh_hello_fields(Writer& w, const MeshHello& m) {
  return w.number(m.from).number(m.to).raw(m.session).raw(m.nonce);
}

/// Begins the signed content with the kind, so that a proof for one kind of message is not valid for another.
Writer signed_part(FrameKind kind) {
  Writer w;
  w.number(kWireMagic).number(kWireVersion).number(static_cast<uint16_t>(kind));
  return w;
}

/// `message` is passed by reference: arguments are evaluated in any order, and it must be fully read before it is copied.
template <class Message>
std::optional<std::decay_t<Message>> if_complete(const Reader& reader, Message&& message) {
  if (!reader.complete()) return std::nullopt;
  return std::forward<Message>(message);
}

bool has_rank(uint64_t ranks, int rank) { return (ranks >> rank & 1) != 0; }

}  // namespace

Bytes encode_frame(FrameKind kind, uint64_t sequence, ByteSpan payload) {
  Writer w;
  w.number(kWireMagic).number(kWireVersion).number(static_cast<uint16_t>(kind)).number(sequence);
  w.number(uint64_t{payload.size()}).raw(payload);
  return w.take();
}

void FrameReader::append(ByteSpan bytes) {
  if (taken_ > 0) {
    buffer_.erase(buffer_.begin(), buffer_.begin() + static_cast<std::ptrdiff_t>(taken_));
    taken_ = 0;
  }
  if (error_.empty()) buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
}

std::optional<Frame> FrameReader::take() {
  const ByteSpan rest = ByteSpan(buffer_).subspan(taken_);
  if (!error_.empty() || rest.size() < kFrameHeaderBytes) return std::nullopt;
  uint32_t magic = 0;
  uint16_t version = 0;
  uint16_t kind = 0;
  uint64_t sequence = 0;
  uint64_t length = 0;
  Reader(rest.first(kFrameHeaderBytes)).number(magic).number(version).number(kind).number(sequence).number(length);
  if (magic != kWireMagic) {
    error_ = "it does not speak this protocol";
  } else if (version != kWireVersion) {
    error_ =
        "it speaks version " + std::to_string(version) + " of the protocol, this side version " + std::to_string(kWireVersion);
  } else if (kind < static_cast<uint16_t>(FrameKind::greeting) || kind > static_cast<uint16_t>(FrameKind::aborted)) {
    error_ = "it sent a frame of unknown kind " + std::to_string(kind);
  } else if (length > max_payload_) {
    error_ =
        "it sent a frame of " + std::to_string(length) + " bytes; at most " + std::to_string(max_payload_) + " are allowed";
  }
  if (!error_.empty() || rest.size() - kFrameHeaderBytes < length) return std::nullopt;
  const ByteSpan payload = rest.subspan(kFrameHeaderBytes, static_cast<size_t>(length));
  taken_ += kFrameHeaderBytes + payload.size();
  return Frame{static_cast<FrameKind>(kind), sequence, Bytes(payload.begin(), payload.end())};
}

std::string describe_host_mismatch(int rank, const HostIdentity& mine, const HostIdentity& theirs) {
  const std::string subject = "rank " + std::to_string(rank);
  if (mine.boot != theirs.boot) {
    return subject + " runs on host '" + theirs.name + "' and rank 0 on host '" + mine.name +
           "'; ranks that meet at a Unix socket must run on one host: let ranks of several meet at a tcp:// store";
  }
  if (mine.network != theirs.network) {
    return subject + " ('" + theirs.name + "') and rank 0 ('" + mine.name +
           "') run in different network namespaces of one host; start their containers with a common one (for example "
           "--network host), or let them meet at a tcp:// store";
  }
  return "";
}

std::string describe_place_conflict(int a, const HostIdentity& of_a, int b, const HostIdentity& of_b) {
  if (of_a.place.empty() || of_a.place != of_b.place || (of_a.boot == of_b.boot && of_a.network == of_b.network)) return "";
  return "ranks " + std::to_string(a) + " and " + std::to_string(b) + " both say that they are on host \"" + of_a.place +
         "\", but run " + (of_a.boot == of_b.boot ? "in different network namespaces of '" : "on different machines, '") +
         of_a.name + (of_a.boot == of_b.boot ? "'" : "' and '" + of_b.name + "'") +
         ": ranks of a host share memory; give each a text of its own (SWITCHYARD_HOST), or none";
}

Bytes encode(const Greeting& m) { return Writer().raw(m.nonce).take(); }

Bytes encode(const Hello& m) {
  Writer w;
  return put_hello_fields(w, m).raw(m.proof).take();
}

Bytes encode(const Refusal& m) { return Writer().text(m.text, kMaxText).raw(m.proof).take(); }
Bytes encode(const Welcome& m) { return Writer().raw(m.proof).take(); }
Bytes encode(const Failure& m) { return Writer().number(m.rank).number(m.missing).text(m.text, kMaxText).take(); }
Bytes encode(const Progress& m) { return Writer().number(m.arrived).number(m.departed).take(); }

Bytes encode(const Roster& m) {
  Writer w;
  return put_roster_fields(w, m).raw(m.proof).take();
}

Bytes encode(const MeshHello& m) {
  Writer w;
  return put_mesh_hello_fields(w, m).raw(m.proof).take();
}

Bytes encode(const Pulse& m) {
  Writer w;
  w.number(m.last).number(static_cast<uint16_t>(m.words.size()));
  for (const uint64_t word : m.words) w.number(word);
  return w.take();
}

Bytes encode(uint64_t word) { return Writer().number(word).take(); }

std::optional<Greeting> decode_greeting(ByteSpan payload) {
  Greeting m;
  return if_complete(Reader(payload).raw(m.nonce), m);
}

std::optional<Hello> decode_hello(ByteSpan payload) {
  Hello m;
  Reader reader(payload);
  reader.number(m.rank).number(m.world).raw(m.nonce);
  reader.text(m.host.name, kMaxHostField).text(m.host.boot, kMaxHostField).text(m.host.network, kMaxHostField);
  reader.text(m.host.place, kMaxHostField).text(m.mesh_name, kMaxName).number(m.port).raw(m.proof);
  return if_complete(reader, std::move(m));
}

std::optional<Refusal> decode_refusal(ByteSpan payload) {
  Refusal m;
  Reader reader(payload);
  reader.text(m.text, kMaxText).raw(m.proof);
  return if_complete(reader, std::move(m));
}

std::optional<Welcome> decode_welcome(ByteSpan payload) {
  Welcome m;
  return if_complete(Reader(payload).raw(m.proof), m);
}

std::optional<Failure> decode_failure(ByteSpan payload) {
  Failure m;
  Reader reader(payload);
  reader.number(m.rank).number(m.missing).text(m.text, kMaxText);
  return if_complete(reader, std::move(m));
}

std::optional<Progress> decode_progress(ByteSpan payload) {
  Progress m;
  return if_complete(Reader(payload).number(m.arrived).number(m.departed), m);
}

std::optional<Roster> decode_roster(ByteSpan payload) {
  Roster m;
  Reader reader(payload);
  uint32_t world = 0;
  reader.raw(m.session).number(world);
  if (world > kMaxRanks) return std::nullopt;
  for (uint32_t r = 0; r < world && reader.ok(); ++r) reader.text(m.mesh_names.emplace_back(), kMaxName);
  uint32_t reachable = 0;
  reader.number(reachable);
  if (reachable > world) return std::nullopt;
  for (uint32_t r = 0; r < reachable && reader.ok(); ++r) {
    Reach& reach = m.reach.emplace_back();
    reader.text(reach.address, kMaxAddress).number(reach.port).number(reach.host);
  }
  reader.raw(m.proof);
  return if_complete(reader, std::move(m));
}

std::optional<MeshHello> decode_mesh_hello(ByteSpan payload) {
  MeshHello m;
  return if_complete(Reader(payload).number(m.from).number(m.to).raw(m.session).raw(m.nonce).raw(m.proof), m);
}

std::optional<Pulse> decode_pulse(ByteSpan payload) {
  Pulse m;
  Reader reader(payload);
  uint16_t words = 0;
  reader.number(m.last).number(words);
  if (words > kMaxCalls || words > m.last) return std::nullopt;
  for (uint16_t i = 0; i < words && reader.ok(); ++i) reader.number(m.words.emplace_back());
  return if_complete(reader, std::move(m));
}

std::optional<uint64_t> decode_word(ByteSpan payload) {
  uint64_t word = 0;
  return if_complete(Reader(payload).number(word), word);
}

Digest prove(const Hello& m, std::string_view token, const Nonce& greeting) {
  Writer w = signed_part(FrameKind::hello);
  return hmac_sha256(token, put_hello_fields(w.raw(greeting), m).take());
}

Digest prove(const Refusal& m, std::string_view token, const Nonce& hello) {
  Writer w = signed_part(FrameKind::refusal);
  return hmac_sha256(token, w.raw(hello).text(m.text, kMaxText).take());
}

Digest prove(const Welcome&, std::string_view token, const Nonce& hello) {
  return hmac_sha256(token, signed_part(FrameKind::welcome).raw(hello).take());
}

Digest prove(const Roster& m, std::string_view token, const Nonce& hello) {
  Writer w = signed_part(FrameKind::roster);
  return hmac_sha256(token, put_roster_fields(w.raw(hello), m).take());
}

Digest prove(const MeshHello& m, std::string_view token, const Nonce& greeting) {
  Writer w = signed_part(FrameKind::mesh_hello);
  return hmac_sha256(token, put_mesh_hello_fields(w.raw(greeting), m).take());
}

std::string judge_hello(const Hello& m, const Gate& gate, const Nonce& greeting) {
  if (!equal_in_constant_time(m.proof, prove(m, gate.token, greeting))) return "its job token is another one";
  if (m.world != gate.world) {
    return "it expects " + std::to_string(m.world) + " ranks and rank 0 expects " + std::to_string(gate.world);
  }
  if (m.rank < 0 || m.rank >= gate.world) {
    return "its rank " + std::to_string(m.rank) + " is outside [0, " + std::to_string(gate.world) + ")";
  }
  if (has_rank(gate.arrived, m.rank)) return "rank " + std::to_string(m.rank) + " is here already";
  if (m.mesh_name.empty()) return "it names no socket for the other ranks";
  return "";
}

std::string judge_mesh_hello(const MeshHello& m, const Gate& gate, const Nonce& session, int me, const Nonce& greeting) {
  if (!equal_in_constant_time(m.proof, prove(m, gate.token, greeting))) return "its job token is another one";
  if (m.session != session) return "it belongs to another rendezvous";
  if (m.to != me || m.from <= me || m.from >= gate.world) return "its ranks do not fit";
  if (has_rank(gate.arrived, m.from)) return "rank " + std::to_string(m.from) + " is connected already";
  return "";
}

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// The byte formats of the rendezvous: pure functions without sockets.
#include "bootstrap/net/wire.hpp"

#include <gtest/gtest.h>

#include <random>

#include "bootstrap/bootstrap.hpp"
#include "bootstrap/net/socket.hpp"
#include "switchyard/status.hpp"

namespace switchyard {
namespace {

using namespace detail;

ByteSpan bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

// ---- SHA-256, with the examples of FIPS 180-4 and RFC 4231 ----

TEST(Sha256, PublishedExamples) {
  EXPECT_EQ(to_hex(sha256({})), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(to_hex(sha256(bytes_of("abc"))), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(to_hex(sha256(bytes_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"))),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(to_hex(sha256(bytes_of(std::string(1000000, 'a')))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, HmacPublishedExamples) {
  EXPECT_EQ(to_hex(hmac_sha256(std::string(20, '\x0b'), bytes_of("Hi There"))),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(to_hex(hmac_sha256("Jefe", bytes_of("what do ya want for nothing?"))),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(to_hex(hmac_sha256(std::string(131, '\xaa'), bytes_of("Test Using Larger Than Block-Size Key - Hash Key First"))),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(Sha256, ComparisonSeesEveryBit) {
  const Digest digest = sha256(bytes_of("x"));
  EXPECT_TRUE(equal_in_constant_time(digest, digest));
  for (size_t bit = 0; bit < 256; ++bit) {
    Digest other = digest;
    other[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    EXPECT_FALSE(equal_in_constant_time(digest, other));
  }
}

TEST(RandomToken, Is128BitsAndNeverTheSame) {
  const std::string token = random_token();
  EXPECT_EQ(token.size(), 32u);
  EXPECT_EQ(token.find_first_not_of("0123456789abcdef"), std::string::npos);
  EXPECT_NE(token, random_token());
}

// ---- frames ----

TEST(Frames, HaveThePublishedLayout) {
  const Bytes frame = encode_frame(FrameKind::ready, 0x1122334455667788, bytes_of("hey"));
  EXPECT_EQ(to_hex(frame),
            "53575942"
            "0300"
            "0600"
            "8877665544332211"
            "0300000000000000"
            "686579");
}

TEST(Frames, SurviveEveryWayOfBeingCut) {
  Bytes stream;
  for (uint64_t i = 0; i < 4; ++i) {
    const Bytes frame = encode_frame(FrameKind::data, i, Bytes(static_cast<size_t>(i * i * 7), static_cast<std::byte>(i)));
    stream.insert(stream.end(), frame.begin(), frame.end());
  }
  for (size_t step = 1; step <= stream.size(); ++step) {
    FrameReader reader(1000);
    uint64_t next = 0;
    for (size_t at = 0; at < stream.size(); at += step) {
      reader.append(ByteSpan(stream).subspan(at, std::min(step, stream.size() - at)));
      while (const auto frame = reader.take()) {
        EXPECT_EQ(frame->sequence, next);
        EXPECT_EQ(frame->payload, Bytes(static_cast<size_t>(next * next * 7), static_cast<std::byte>(next)));
        ++next;
      }
    }
    ASSERT_EQ(next, 4u) << "in steps of " << step;
    ASSERT_EQ(reader.error(), "");
  }
}

TEST(Frames, BadHeadersEndTheStream) {
  const auto error_of = [](size_t position, uint8_t value, size_t payload = 0) {
    Bytes frame = encode_frame(FrameKind::data, 1, Bytes(payload));
    frame[position] = static_cast<std::byte>(value);
    FrameReader reader(100);
    reader.append(frame);
    EXPECT_FALSE(reader.take());
    const std::string error = reader.error();
    reader.append(encode_frame(FrameKind::data, 1, {}));
    EXPECT_FALSE(reader.take()) << "nothing comes after an error";
    return error;
  };
  EXPECT_NE(error_of(0, 0).find("does not speak this protocol"), std::string::npos);
  EXPECT_NE(error_of(4, 9).find("version 9"), std::string::npos);
  EXPECT_NE(error_of(6, 16).find("unknown kind 16"), std::string::npos);
  EXPECT_NE(error_of(6, 0).find("unknown kind 0"), std::string::npos);
  EXPECT_NE(error_of(16, 101).find("101 bytes; at most 100"), std::string::npos);
  EXPECT_NE(error_of(23, 0xff).find("at most 100"), std::string::npos);
}

// ---- messages ----

Hello some_hello() {
  Hello hello;
  hello.rank = 3;
  hello.world = 8;
  hello.nonce.fill(std::byte{5});
  hello.host = {"host", "boot", "net:[1]"};
  hello.mesh_name = "switchyard-0123";
  return hello;
}

TEST(Messages, ComeBackAsTheyWere) {
  const Hello hello = decode_hello(encode(some_hello())).value();
  EXPECT_EQ(hello.rank, 3);
  EXPECT_EQ(hello.world, 8);
  EXPECT_EQ(hello.nonce, some_hello().nonce);
  EXPECT_EQ(hello.host, some_hello().host);
  EXPECT_EQ(hello.mesh_name, "switchyard-0123");

  const Failure failure = decode_failure(encode(Failure{-1, 0xf0f0, "why not"})).value();
  EXPECT_EQ(failure.rank, -1);
  EXPECT_EQ(failure.missing, 0xf0f0u);
  EXPECT_EQ(failure.text, "why not");

  Roster roster;
  roster.session.fill(std::byte{9});
  for (int r = 0; r < 64; ++r) roster.mesh_names.push_back("name" + std::to_string(r));
  EXPECT_EQ(decode_roster(encode(roster)).value().mesh_names, roster.mesh_names);
  EXPECT_LE(encode(roster).size(), kMaxHandshakeBytes);
  roster.mesh_names.push_back("one too many");
  EXPECT_FALSE(decode_roster(encode(roster)));

  const Progress progress = decode_progress(encode(Progress{5, 2})).value();
  EXPECT_EQ(progress.arrived, 5u);
  EXPECT_EQ(progress.departed, 2u);
  EXPECT_EQ(decode_mesh_hello(encode(MeshHello{7, 2, {}, {}})).value().from, 7);
  roster.mesh_names.pop_back();
  roster.reach = {{"10.0.0.1", 4711, 0}, {"fe80::1", 65535, 3}};
  const Roster read = decode_roster(encode(roster)).value();
  ASSERT_EQ(read.reach.size(), 2u);
  EXPECT_EQ(read.reach[1].address, "fe80::1");
  EXPECT_EQ(read.reach[1].port, 65535);
  EXPECT_EQ(read.reach[1].host, 3);
  const Pulse pulse = decode_pulse(encode(Pulse{70, {5, 6, ~uint64_t{0}}})).value();
  EXPECT_EQ(pulse.last, 70u);
  EXPECT_EQ(pulse.words, (std::vector<uint64_t>{5, 6, ~uint64_t{0}}));
  EXPECT_FALSE(decode_pulse(encode(Pulse{2, {1, 2, 3}}))) << "more words than calls";
  EXPECT_FALSE(decode_pulse(encode(Pulse{99, std::vector<uint64_t>(65)}))) << "more than are kept";
  EXPECT_EQ(decode_word(encode(uint64_t{0x8000000000000007})).value(), 0x8000000000000007u);
  EXPECT_EQ(decode_greeting(encode(Greeting{some_hello().nonce})).value().nonce, some_hello().nonce);
}

TEST(Messages, ShorterOrLongerOnesAreRefused) {
  const auto check = [](const Bytes& bytes, const auto& decode) {
    EXPECT_TRUE(decode(bytes));
    for (size_t length = 0; length < bytes.size(); ++length) EXPECT_FALSE(decode(ByteSpan(bytes).first(length))) << length;
    Bytes longer = bytes;
    longer.push_back(std::byte{0});
    EXPECT_FALSE(decode(longer));
  };
  check(encode(Greeting{}), decode_greeting);
  check(encode(some_hello()), decode_hello);
  check(encode(Refusal{"text", {}}), decode_refusal);
  check(encode(Welcome{}), decode_welcome);
  check(encode(Failure{1, 2, "text"}), decode_failure);
  check(encode(Progress{}), decode_progress);
  check(encode(Roster{{}, {"a", "b"}, {}}), decode_roster);
  check(encode(MeshHello{}), decode_mesh_hello);
  check(encode(Pulse{3, {1, 2}}), decode_pulse);
  check(encode(uint64_t{7}), decode_word);
}

TEST(Messages, OversizedTextsAreRefusedOrCut) {
  Hello hello = some_hello();
  hello.mesh_name = std::string(300, 'x');
  EXPECT_EQ(decode_hello(encode(hello)).value().mesh_name.size(), 100u) << "cut by the sender";
  EXPECT_LE(encode(Failure{0, 0, std::string(100000, 'x')}).size(), kMaxHandshakeBytes);
  EXPECT_LE(encode(Refusal{std::string(100000, 'x'), {}}).size(), kMaxHandshakeBytes);
  Bytes bytes = encode(some_hello());
  bytes[24] = bytes[25] = std::byte{0xff};  // the length of the host name
  EXPECT_FALSE(decode_hello(bytes));
}

TEST(Messages, OnlyTheRightProofOpensTheGate) {
  Nonce nonce;
  nonce.fill(std::byte{1});
  const Gate gate = {"token", 8, 0b00000101};
  Hello hello = some_hello();
  const auto judge = [&](Hello changed, std::string_view token) {
    changed.proof = prove(changed, token, nonce);
    return judge_hello(changed, gate, nonce);
  };
  EXPECT_EQ(judge(hello, "token"), "");
  EXPECT_NE(judge(hello, "Token").find("job token"), std::string::npos);
  hello.world = 4;
  EXPECT_NE(judge(hello, "token").find("expects 4 ranks and rank 0 expects 8"), std::string::npos);
  EXPECT_NE(judge(hello, "wrong").find("job token"), std::string::npos) << "a stranger learns nothing about the job";
  hello.world = 8;
  for (const int rank : {-1, 8, 64, 1 << 30}) {
    hello.rank = rank;
    EXPECT_NE(judge(hello, "token").find("outside [0, 8)"), std::string::npos);
  }
  for (const int rank : {0, 2}) {
    hello.rank = rank;
    EXPECT_NE(judge(hello, "token").find("is here already"), std::string::npos);
  }
  hello = some_hello();
  hello.proof = prove(hello, "token", nonce);
  Nonce other = nonce;
  other[0] = std::byte{2};
  EXPECT_NE(judge_hello(hello, gate, other), "") << "a proof is good for one greeting only";
}

TEST(Messages, EveryFieldIsUnderTheProof) {
  Nonce nonce{};
  Hello hello = some_hello();
  hello.proof = prove(hello, "token", nonce);
  const Bytes good = encode(hello);
  const Gate gate = {"token", 8, 1};
  for (size_t i = 0; i < good.size(); ++i) {
    Bytes bad = good;
    bad[i] ^= std::byte{1};
    const auto decoded = decode_hello(bad);
    if (decoded) {
      EXPECT_NE(judge_hello(*decoded, gate, nonce), "") << "byte " << i;
    }
  }
  MeshHello mesh = {3, 1, {}, {}};
  mesh.proof = prove(mesh, "token");
  EXPECT_EQ(judge_mesh_hello(mesh, gate, Nonce{}, 1), "");
  const Bytes good_mesh = encode(mesh);
  for (size_t i = 0; i < good_mesh.size(); ++i) {
    Bytes bad = good_mesh;
    bad[i] ^= std::byte{1};
    EXPECT_NE(judge_mesh_hello(decode_mesh_hello(bad).value(), gate, Nonce{}, 1), "") << "byte " << i;
  }
  Nonce greeting{};
  greeting[7] = std::byte{1};
  EXPECT_NE(judge_mesh_hello(mesh, gate, Nonce{}, 1, greeting), "") << "recorded, and played to another greeting";
  mesh.proof = prove(mesh, "token", greeting);
  EXPECT_EQ(judge_mesh_hello(mesh, gate, Nonce{}, 1, greeting), "");
}

/// A refusal or a welcome is invalid without the token, for another hello, or in place of the other.
TEST(Messages, AnswersToAHelloAreProved) {
  Nonce hello{}, other{};
  other[3] = std::byte{1};
  const Refusal refusal{"no", {}};
  const Digest proof = prove(refusal, "token", hello);
  EXPECT_NE(proof, prove(refusal, "tokem", hello));
  EXPECT_NE(proof, prove(refusal, "token", other));
  EXPECT_NE(proof, prove(Refusal{"yes", {}}, "token", hello));
  const Digest welcome = prove(Welcome{}, "token", hello);
  EXPECT_NE(welcome, prove(Welcome{}, "tokem", hello));
  EXPECT_NE(welcome, prove(Welcome{}, "token", other));
  EXPECT_NE(welcome, prove(Refusal{"", {}}, "token", hello));
}

TEST(Messages, HostsAreCompared) {
  const HostIdentity a = {"alpha", "boot1", "net:[1]"};
  EXPECT_EQ(describe_host_mismatch(1, a, a), "");
  const std::string other = describe_host_mismatch(3, a, {"beta", "boot2", "net:[1]"});
  for (const char* part : {"rank 3", "'beta'", "rank 0", "'alpha'", "one host"})
    EXPECT_NE(other.find(part), std::string::npos) << other;
  EXPECT_NE(describe_host_mismatch(3, a, {"alpha", "boot1", "net:[2]"}).find("network namespaces"), std::string::npos);
  EXPECT_EQ(describe_host_mismatch(0, this_host(), this_host()), "");
}

// ---- stores ----

std::string refusal_of(const std::string& store) {
  try {
    parse_endpoint(store);
  } catch (const Error& error) {
    return error.code() == ErrorCode::invalid_argument ? error.what() : "another code";
  }
  return "";
}

TEST(Endpoint, Forms) {
  EXPECT_EQ(parse_endpoint("unix:/run/x").name, "/run/x");
  EXPECT_EQ(parse_endpoint("unix:///run/x").name, "/run/x");
  EXPECT_EQ(parse_endpoint("unix:@x").kind, Endpoint::Kind::unix_abstract);
  const Endpoint v4 = parse_endpoint("tcp://node-1.example:29500");
  EXPECT_EQ(v4.name, "node-1.example");
  EXPECT_EQ(v4.port, 29500);
  EXPECT_EQ(parse_endpoint("tcp://[::1]:1").name, "::1");
  for (const char* bad : {"", "x", "unix:", "unix:relative", "unix:@", "tcp://", "tcp://host", "tcp://host:", "tcp://:1",
                          "tcp://h:0", "tcp://h:65536", "tcp://h:12x", "tcp://::1:80", "http://h:1"}) {
    EXPECT_NE(refusal_of(bad).find("store = \"" + std::string(bad) + "\""), std::string::npos) << bad;
  }
  EXPECT_NE(refusal_of("unix:/" + std::string(107, 'x')).find("at most 106"), std::string::npos);
  EXPECT_EQ(refusal_of("unix:/" + std::string(105, 'x')), "");
}

TEST(Endpoint, UnknownHostsAreNamed) {
  try {
    resolve(parse_endpoint("tcp://no-such-host.invalid:1"), Deadline(Milliseconds{20000}));
    FAIL();
  } catch (const RendezvousError& error) {
    EXPECT_NE(std::string(error.what()).find("no-such-host.invalid"), std::string::npos);
  }
}

TEST(Judgement, OnePlaceIsOneMachine) {
  const HostIdentity a = {"alpha", "boot1", "net:[1]", "x"};
  EXPECT_EQ(describe_place_conflict(0, a, 1, a), "");
  EXPECT_EQ(describe_place_conflict(0, a, 1, {"beta", "boot2", "net:[1]", "y"}), "");
  EXPECT_EQ(describe_place_conflict(0, {"alpha", "boot1", "net:[1]"}, 1, {"beta", "boot2", "net:[1]"}), "") << "no place given";
  const std::string machines = describe_place_conflict(0, a, 3, {"beta", "boot2", "net:[1]", "x"});
  for (const char* part : {"ranks 0 and 3", "\"x\"", "'alpha'", "'beta'", "SWITCHYARD_HOST"})
    EXPECT_NE(machines.find(part), std::string::npos) << machines;
  EXPECT_NE(describe_place_conflict(0, a, 3, {"alpha", "boot1", "net:[2]", "x"}).find("network namespaces"), std::string::npos);
  EXPECT_EQ(a.key(), (HostIdentity{"beta", "boot2", "net:[2]", "x"}.key())) << "what the user says counts";
  EXPECT_NE((HostIdentity{"n", "boot1", "net:[1]"}.key()), (HostIdentity{"n", "boot1", "net:[2]"}.key()));
}

}  // namespace
}  // namespace switchyard

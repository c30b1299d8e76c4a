// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/net/sha256.hpp"

#include <algorithm>
#include <bit>
#include <vector>

namespace switchyard::detail {
namespace {

constexpr size_t kBlock = 64;
using State = std::array<uint32_t, 8>;

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes (FIPS 180-4, section 4.2.2).
constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01,
    0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
    0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
    0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08,
    0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
    0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

void compress(State& state, const std::byte* block) {
  uint32_t w[64];
  for (size_t i = 0; i < 16; ++i) {
    w[i] = 0;
    for (size_t b = 0; b < 4; ++b) w[i] = w[i] << 8 | std::to_integer<uint32_t>(block[4 * i + b]);
  }
  for (size_t i = 16; i < 64; ++i) {
    const uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ w[i - 15] >> 3;
    const uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ w[i - 2] >> 10;
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (size_t i = 0; i < 64; ++i) {
    const uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRound[i] + w[i];
    const uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + t1;
    d = c;
    c = b;
    b = a;
    a = t1 + t2;
  }
  const uint32_t add[8] = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < 8; ++i) state[i] += add[i];
}

}  // namespace

Digest sha256(std::span<const std::byte> data) {
  State state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  size_t done = 0;
  for (; data.size() - done >= kBlock; done += kBlock) compress(state, data.data() + done);

  // The remaining bytes, a one bit, zeros, and the length in bits, in one or two blocks.
  std::array<std::byte, 2 * kBlock> tail = {};
  const size_t rest = data.size() - done;
  std::copy_n(data.data() + done, rest, tail.begin());
  tail[rest] = std::byte{0x80};
  const size_t length = rest + 9 <= kBlock ? kBlock : 2 * kBlock;
  const uint64_t bits = uint64_t{data.size()} * 8;
  for (size_t i = 0; i < 8; ++i) tail[length - 1 - i] = static_cast<std::byte>(bits >> (8 * i));
  for (size_t i = 0; i < length; i += kBlock) compress(state, tail.data() + i);

  Digest digest;
  for (size_t i = 0; i < digest.size(); ++i) digest[i] = static_cast<std::byte>(state[i / 4] >> (24 - 8 * (i % 4)));
  return digest;
}

Digest hmac_sha256(std::string_view key, std::span<const std::byte> data) {
  std::array<std::byte, kBlock> block = {};
  const auto key_bytes = std::as_bytes(std::span(key));
  if (key_bytes.size() > kBlock) {
    const Digest hashed = sha256(key_bytes);
    std::copy(hashed.begin(), hashed.end(), block.begin());
  } else {
    std::copy(key_bytes.begin(), key_bytes.end(), block.begin());
  }
  std::vector<std::byte> inner;
  for (const std::byte b : block) inner.push_back(b ^ std::byte{0x36});
  inner.insert(inner.end(), data.begin(), data.end());
  const Digest inner_digest = sha256(inner);
  std::vector<std::byte> outer;
  for (const std::byte b : block) outer.push_back(b ^ std::byte{0x5c});
  outer.insert(outer.end(), inner_digest.begin(), inner_digest.end());
  return sha256(outer);
}

bool equal_in_constant_time(const Digest& a, const Digest& b) {
  std::byte difference{0};
  for (size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == std::byte{0};
}

std::string to_hex(std::span<const std::byte> bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::byte b : bytes) {
    text += kDigits[std::to_integer<size_t>(b) >> 4];
    text += kDigits[std::to_integer<size_t>(b) & 15];
  }
  return text;
}

}  // namespace switchyard::detail

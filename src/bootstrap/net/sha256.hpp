// SPDX-License-Identifier: Apache-2.0
// SHA-256 (FIPS 180-4) and HMAC (RFC 2104), used to prove knowledge of the job token. Used to hash a few hundred bytes per
// connection.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace switchyard::detail {

using Digest = std::array<std::byte, 32>;

Digest sha256(std::span<const std::byte> data);
Digest hmac_sha256(std::string_view key, std::span<const std::byte> data);

/// Takes the same time wherever the inputs differ.
bool equal_in_constant_time(const Digest& a, const Digest& b);

/// Lower-case hexadecimal.
std::string to_hex(std::span<const std::byte> bytes);

}  // namespace switchyard::detail

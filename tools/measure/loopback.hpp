// SPDX-License-Identifier: Apache-2.0
// The network of this machine to itself: what two ranks on "two hosts" of a test bed get.
#pragma once

#include <cstddef>

namespace switchyard::measure {

struct NetworkRates {
  size_t chunk_bytes = 0;  ///< what is sent at once
  int pairs = 1;           ///< of threads, in host_gbs
  double gbs = 0;          ///< one pair of threads that send and receive at the same time: bytes of one direction
  double host_gbs = 0;     ///< as many of them as there are workers for: bytes sent by all threads
  double us = 0;           ///< a message of 64 bytes, one way
  double post_us = 0;      ///< what one message costs its sender
};

/// TCP over 127.0.0.1, without delay; chunks go by the library's carrier over sockets, three of them under way. \throws
/// std::runtime_error naming the call that failed
NetworkRates measure_loopback(int workers, double seconds);

}  // namespace switchyard::measure

// SPDX-License-Identifier: Apache-2.0
// The loopback network of this machine, used as the network between two ranks on the "two hosts" of a test bed.
#pragma once

#include <cstddef>

namespace switchyard::measure {

struct NetworkRates {
  size_t chunk_bytes = 0;  ///< size of one chunk
  int pairs = 1;           ///< pairs of threads, in host_gbs
  double gbs = 0;          ///< one pair of threads that send and receive simultaneously: bytes of one direction
  double host_gbs = 0;     ///< as many pairs as the workers allow: bytes sent by all threads
  double us = 0;           ///< a message of 64 bytes, one way
  double post_us = 0;      ///< cost of one message for its sender
};

/// TCP over 127.0.0.1 with TCP_NODELAY. The library's socket carrier transfers chunks, three of them in flight. \throws
/// std::runtime_error naming the failed call
NetworkRates measure_loopback(int workers, double seconds);

}  // namespace switchyard::measure

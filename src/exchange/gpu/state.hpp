// SPDX-License-Identifier: Apache-2.0
// State of the calls of all modes in GPU memory, and reports from their kernels to the host. Shared by host and device code.
#pragma once

#include <cstdint>

namespace switchyard::detail {

/// State of an object whose calls need only an epoch; see begin_block.
struct EpochState {
  uint64_t epoch;    ///< of the last call whose blocks have all begun
  uint64_t readers;  ///< blocks that have read the epoch; 0 between launches
};

/// Words of a rank that a call reads when it begins, for objects that can be halted by another rank's fault.
struct RankWords {
  uint64_t heard = 0;                   ///< number of faults known to the host when it enqueued the call
  const uint64_t* heard_now = nullptr;  ///< captured calls: address from which the kernel reads `heard` when it runs
  uint64_t* fault_numbers = nullptr;    ///< number of faults of this rank so far
};

/// GPU memory with the counts of the ids in an object's calls that are neither -1 nor an expert.
struct InvalidIdCounts {
  uint64_t total;    ///< so far
  uint64_t of_call;  ///< of the current plan; 0 between launches
};

/// A fault that ends one call on all ranks and leaves the object usable. Stored in host memory; the host clears `ready`.
struct SoftFault {
  uint64_t ready;
  int32_t code;  ///< ErrorCode
  int32_t rank;
  uint64_t epoch;
  int64_t needed, capacity;  ///< rows, for capacity_exceeded; both 0 if unknown
  uint64_t left_out;         ///< Operation of the call that did nothing because the call `epoch` had moved nothing, or none
  uint64_t number;           ///< number among the faults that halt an object, from 1; else 0
};

}  // namespace switchyard::detail

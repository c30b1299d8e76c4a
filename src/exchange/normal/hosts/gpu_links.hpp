// SPDX-License-Identifier: Apache-2.0
// One rank's exchange with other hosts on a GPU: NCCL rounds, the ranks for which it is the proxy, and the phases of its calls.
//
// Kernels are enqueued on the call's stream, and rounds that transfer rows on a separate stream, so that one round can be in
// flight while the rows of another are packed, forwarded or summed. The host waits for the counts of a dispatch, which
// determine how many tokens cross, and for the placements of every call. All ranks therefore learn the outcome of a call at
// once, and both ends of a round know its size in bytes.
#pragma once

#include <memory>
#include <vector>

#include "bootstrap/host_map.hpp"
#include "exchange/hosts/rounds.hpp"
#include "exchange/gpu/rank.hpp"
#include "arch/gpu_order.hpp"
#include "exchange/hosts/schedule.hpp"
#include "exchange/normal/hosts/launch.hpp"
#include "exchange/normal/hosts/sizes.hpp"

namespace switchyard::detail {

/// The part of a handle, in GPU memory, for groups that span several hosts. Has room for NormalConfig::max_tokens.
struct GpuHostTables {
  struct OfPeer {
    // The peer is this rank's proxy.
    int32_t* leaving = nullptr;
    ReturnCounts returned;
    // This rank is the peer's proxy.
    CrossedTables crossed;
    // Valid once the dispatch has reached its rows.
    int64_t leaving_count = 0, crossed_count = 0;
    int64_t tokens = 0;  ///< of the peer
  };
  int64_t tokens = 0;  ///< of this rank
  std::vector<OfPeer> peers;
  DeviceMemory memory;
  Point used;  ///< the last call with the handle
};

class GpuHostLinks {
 public:
  /// Collective, inside Group::Impl::collectively() with the GPU current.
  GpuHostLinks(Group::Impl& group, CudaRank& gpu, int topk, int64_t max_tokens, bool expert_major,
               const ControlLayout& control);
  ~GpuHostLinks();
  GpuHostLinks(const GpuHostLinks&) = delete;
  GpuHostLinks& operator=(const GpuHostLinks&) = delete;

  /// Returns tables for a fresh dispatch. They are reused once the last holder has released them.
  std::shared_ptr<GpuHostTables> take_tables();

  /// Exchanges the counts of a fresh dispatch before its plan; enqueues announcements, a round and the proxies' part.
  void exchange_counts(const PlanParams& plan, const GpuHostTables& tables, gpu::Stream stream);
  /// Reads the counts of crossing tokens. Call after the plan, once `stream` has been waited for. `header`: of the plan.
  void read_counts(GpuHostTables& tables, const TablesHeader& header) const;

  /// The rails and rounds of a combine.
  struct Summing {
    std::vector<CombineRail> rails;
    std::vector<std::vector<RoundCut>> out, in;  ///< [peers] cuts
    ReturnedTokens own;
    int64_t rounds = 1;
  };
  /// Call before exchange_placements(). `weighted`: proxies multiply by the weights sent by the dispatch.
  Summing prepare(const CudaCombineParams& params, const GpuHostTables& tables, bool weighted) const;
  /// Exchanges placements and waits for them; for a combine, also cuts its rounds. Faults are recorded for
  /// Group::Impl::check_alive.
  PlacementVerdict exchange_placements(OfferParams offer, Summing* combine, gpu::Stream stream);
  /// Enqueues the end of a call that moves nothing.
  void end_call(const CallContext& call, ObjectState* state, gpu::Stream stream) const;

  /// Call after all placements agree. `weights`: whether rows cross with weights; `counts`: the [W] counts rows of the
  /// dispatch. \returns bytes sent to other hosts
  uint64_t move(const CudaDispatchParams& params, const GpuHostTables& tables, bool weights, const std::byte* counts,
                const LaunchShape& launch, gpu::Stream stream);
  /// \returns bytes received from other hosts
  uint64_t sum(const CudaCombineParams& params, Summing& over, const LaunchShape& launch, gpu::Stream stream);

 private:
  struct Peer {
    int rank = -1, host = -1;
    bool peer_is_my_proxy = false, is_proxy_of_peer = false;
    DeviceMemory slot_out, slot_in;
    size_t out_bytes = 0, in_bytes = 0;
  };
  int places_on(int host) const;
  void carve(GpuHostTables& tables) const;
  /// Returns kRoundSlots slots of `bytes` bytes, or fewer if there are fewer rounds.
  std::byte* make_slots(DeviceMemory& memory, size_t& has, int64_t rounds, int64_t bytes) const;
  RoundCut* cuts(size_t peer, bool out) const;
  std::byte* message(size_t peer, bool out) const;
  std::vector<PeerTransfer> message_transfers(int64_t bytes) const;
  void post(std::span<const PeerTransfer> transfers, gpu::Stream stream, const CallContext& call);
  /// Enqueues a round on the side stream, after the work enqueued on `stream`. \returns its end, for await()
  Point post_on_side_stream(std::span<const PeerTransfer> transfers, gpu::Stream stream, const CallContext& call);
  static void await(const Point& round, gpu::Stream stream);
  static void clear_moved(const CallContext& call, const LaunchShape& launch, gpu::Stream stream);
  DispatchRail prepare_rail(size_t i, const CudaDispatchParams& params, const GpuHostTables::OfPeer& of, bool weights,
                            const std::byte* counts);
  /// Copies the cuts, and whether peers take weights, to the host, and waits for the copies.
  void read_cuts(Summing& combine);
  /// Allocates the slots of a combine and copies its tables to the GPU. The host waits for that copy.
  ReturningHosts set_up_rounds(const CudaCombineParams& params, Summing& over, const LaunchShape& launch);

  Group::Impl& group_;
  CudaRank& gpu_;
  const HostMap map_;
  const int rank_, own_host_, topk_;
  const int64_t max_tokens_;
  const bool expert_major_;
  const ControlLayout control_;
  std::vector<Peer> peers_;
  int64_t message_bytes_ = 0;
  DeviceMemory memory_;  ///< messages, counts, verdict, takes_weights, host_of, rows of hosts, cuts
  size_t counts_at_ = 0, verdict_at_ = 0, takes_at_ = 0, host_of_at_ = 0, rows_at_ = 0, cuts_at_ = 0;
  DeviceMemory scratch_;
  size_t scratch_bytes_ = 0;
  /// Tables that are not in use. Handles may outlive it.
  struct Idle;
  std::shared_ptr<Idle> idle_;
  std::shared_ptr<GpuRounds> rounds_;
};

}  // namespace switchyard::detail

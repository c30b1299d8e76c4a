// SPDX-License-Identifier: Apache-2.0
// Handles from another group on GPUs: rejected if only some ranks pass one, usable if all ranks do.
#include <tuple>

#include "gpu/harness/object_rig.hpp"

namespace harness {
namespace {

constexpr int kWorld = 3, kOther = 1;

/// How a handle is transferred from one group to the other: as bytes, or directly while both groups are alive.
enum class PassedAs { as_bytes, alive };

struct Foreign {
  PassedAs passed_as;
  bool cached;  ///< used by a cached dispatch, or by combine
  bool on_all;
};

/// Dispatches `c` on a rank of the first group and returns the handle.
Handle dispatched_by(Group& group, const NormalConfig& config, std::unique_ptr<NormalExchange>& exchange, Station& me,
                     const Case& c, const Inputs& in) {
  exchange = std::make_unique<NormalExchange>(group, config);
  me.meet();
  Handle handle = exchange->dispatch(in.x, in.ids, in.weights, me.dispatch_options(c, me.stream())).handle;
  me.meet();
  (void)handle.rows();  // copies the number to the host while no rank waits
  me.meet();
  return handle;
}

/// A rank's calls in both groups.
void give_foreign(Station& me, Group& first, const NormalConfig& config, const Case& c, const Foreign& f) {
  RankData data(c, me.rank(), 0), again(c, me.rank(), 1);
  const Inputs in = me.upload(c, data), more = me.upload(c, again);
  const DispatchOptions options = me.dispatch_options(c, me.stream());
  const CombineOptions combine = me.combine_options(c, me.stream());
  std::unique_ptr<NormalExchange> theirs;
  const Handle live = dispatched_by(first, config, theirs, me, c, in);
  const Handle foreign = f.passed_as == PassedAs::alive ? live : Handle::deserialize(live.serialize());
  NormalExchange exchange(me.group, config);
  me.meet();
  const Dispatched d = exchange.dispatch(in.x, in.ids, in.weights, options);
  me.meet();
  (void)d.handle.rows();
  me.meet();
  const Handle& handle = f.on_all || me.rank() == kOther ? foreign : d.handle;
  Dispatched e;
  Outcome o = outcome_of([&] {
    if (f.cached) e = exchange.dispatch(more.x, handle, options);
    if (!f.cached) exchange.combine(d.x, handle, in.out, combine);
  });
  me.meet();
  if (o.code == ErrorCode::ok) o = outcome_of([&] { me.group.check(); });
  me.gather();
  if (f.on_all) {
    me.f.equal(static_cast<int>(ErrorCode::ok), static_cast<int>(o.code), "code, " + shown(o));
    if (f.cached) exchange.combine(e.x, handle, more.out, combine);
    me.meet();
    me.check_combined(f.cached ? again : data, f.cached ? more : in);
  } else {
    me.f.check(o.code == ErrorCode::mismatch, shown(o));
  }
  me.f.check(cudaDeviceSynchronize() == cudaSuccess && cudaGetLastError() == cudaSuccess, "the context failed");
  me.gather();
}

class HandlesOfAnotherGroup : public testing::TestWithParam<std::tuple<Layout, PassedAs>> {};

TEST_P(HandlesOfAnotherGroup, OnSomeRanksAreAMismatchAndOnAllAreUsable) {
  const auto& [layout, passed_as] = GetParam();
  const auto c = make_case(gpu_scenario("foreign handles", kWorld, layout, 12));
  const NormalConfig config = config_with_large_pool(*c, 2);
  isolated([&] {
    for (const bool cached : {true, false}) {
      for (const bool on_all : {true, false}) {
        GroupOptions options;
        options.backend = kBackend;
        options.heap_bytes = heap_for(config, kWorld);
        options.timeout = 20s;
        std::vector<Group> first = Group::in_process(kWorld, options);
        on_gpus(kWorld, heap_for(config, kWorld), 20s, [&](Station& me) {
          me.f.set_context(std::string(cached ? "cached dispatch" : "combine") + (on_all ? ", all ranks" : ", one rank"));
          give_foreign(me, first[static_cast<size_t>(me.rank())], config, *c, {passed_as, cached, on_all});
        });
      }
    }
    on_gpus(kWorld, heap_for(config, kWorld), [&](Station& me) {
      me.f.set_context("a new group afterwards");
      NormalExchange exchange(me.group, config);
      me.round(exchange, *c);
    });
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, HandlesOfAnotherGroup,
                         testing::Combine(testing::Values(Layout::rank_major, Layout::expert_major),
                                          testing::Values(PassedAs::as_bytes, PassedAs::alive)),
                         [](const auto& p) {
                           return std::string(std::get<0>(p.param) == Layout::rank_major ? "rank_major" : "expert_major") +
                                  (std::get<1>(p.param) == PassedAs::alive ? "_alive" : "_as_bytes");
                         });

}  // namespace
}  // namespace harness

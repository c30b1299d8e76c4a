// SPDX-License-Identifier: Apache-2.0
// Registration of caller memory, sleep and wake.
#include <string>

#include "bootstrap/deadline.hpp"
#include "exchange/group/impl.hpp"
#include "heap/collective_step.hpp"

namespace switchyard {

using namespace detail;

namespace {

/// For ranks that are threads of one process: every address is valid for all of them.
std::vector<std::byte*> share_addresses(Bootstrap& bootstrap, void* memory, size_t bytes, Milliseconds budget) {
  const Deadline deadline(budget);
  run_step(bootstrap, deadline, "register_memory", [&] {
    if (!bootstrap.same_process())
      throw Error(ErrorCode::unsupported,
                  "ranks are processes, which cannot see each other's ordinary memory: write expert outputs to a RowBuffer or "
                  "to Dispatched::x, or let combine copy them");
    if (!memory && bytes > 0)
      throw Error(ErrorCode::invalid_argument,
                  "memory = null with " + std::to_string(bytes) + " bytes: null is for 0 bytes only");
  });
  return bootstrap.gather(static_cast<std::byte*>(memory), deadline.remaining());
}

/// Collective; returns the lowest slot that is free on all ranks.
int free_slot(Group::Impl& group) {
  const uint64_t mine = group.registered_slots();
  std::vector<uint64_t> all(static_cast<size_t>(group.bootstrap->world()));
  group.all_gather(&mine, sizeof mine, all.data(), "register_memory", Operation::register_memory);
  uint64_t taken = 0;
  for (const uint64_t slots : all) taken |= slots;
  for (int slot = 0; slot < Group::kMaxRegistered; ++slot)
    if (((taken >> slot) & 1u) == 0) return slot;
  throw AgreedError(ErrorCode::unsupported, "register_memory: all " + std::to_string(Group::kMaxRegistered) +
                                                " registrations of the group are in use; destroy one on all ranks first");
}

}  // namespace

const Registration* Group::Impl::registration_of(const void* p, size_t bytes) const {
  if (bytes == 0) return nullptr;
  const auto begin = reinterpret_cast<uintptr_t>(p);
  for (const auto& slot : registrations) {
    const std::shared_ptr<Registration> r = slot.lock();
    if (!r || bytes > r->bytes) continue;
    const auto first = reinterpret_cast<uintptr_t>(r->data);
    if (begin >= first && begin - first <= r->bytes - bytes) return r.get();
  }
  return nullptr;
}

uint64_t Group::Impl::registered_slots() const {
  uint64_t slots = 0;
  for (size_t s = 0; s < registrations.size(); ++s)
    if (!registrations[s].expired()) slots |= uint64_t{1} << s;
  return slots;
}

void Group::Impl::check_usable(const char* context) {
  check_alive(context);
  if (heap->asleep())
    throw AgreedError(
        ErrorCode::invalid_argument,
        std::string(context) + ": the group sleeps and its heap has no memory; call Group::wake() on all ranks first");
}

RegisteredMemory Group::register_memory(void* memory, size_t bytes) {
  Impl& g = *impl_;
  const auto world = static_cast<size_t>(size()), me = static_cast<size_t>(rank());
  std::shared_ptr<Registration> r;
  g.check_alive("register_memory");
  g.require_one_host("register_memory", "write expert outputs to a RowBuffer or to Dispatched::x");
  g.collectively("register_memory", [&] {
    const Milliseconds deadline = g.deadline_of(Operation::register_memory);
    r = std::make_shared<Registration>();
    r->data = static_cast<std::byte*>(memory);
    r->bytes = bytes;
    r->slot = free_slot(g);
    const std::vector<std::byte*> at = g.device ? g.device->reach(*g.bootstrap, r->slot, memory, bytes, deadline, r->mapping)
                                                : share_addresses(*g.bootstrap, memory, bytes, deadline);
    std::vector<uint64_t> mine(world), all(world * world);
    for (size_t s = 0; s < world; ++s)
      mine[s] = reinterpret_cast<uint64_t>(at[s]) - reinterpret_cast<uint64_t>(g.heap->view().base[s]);
    g.bootstrap->all_gather(mine.data(), world * sizeof(uint64_t), all.data(), deadline);
    for (size_t reader = 0; reader < world; ++reader) r->host_distances.push_back(all[reader * world + me]);
    run_step(*g.bootstrap, Deadline(deadline), "register_memory", [&] {
      r->distances = g.device ? g.device->upload_distances(r->slot, r->host_distances) : r->host_distances.data();
    });
  });
  g.registrations[static_cast<size_t>(r->slot)] = r;
  return RegisteredMemory(std::move(r));
}

void Group::used_by(const void* memory, void* stream) {
  if (impl_->device) impl_->device->used_by("memory", memory, stream);
}

void Group::sleep() {
  Impl& g = *impl_;
  g.check_alive("sleep");
  if (g.heap->asleep()) throw Error(ErrorCode::invalid_argument, "sleep: the group sleeps already");
  g.enter(Operation::sleep);
  g.collectively("sleep", [&] {
    const Milliseconds limit = g.deadline_of(Operation::sleep);
    if (g.device) run_step(*g.bootstrap, Deadline(limit), "sleep", [&] { g.device->await_ended(limit); });
    g.heap->sleep(*g.bootstrap, g.heap->kept(), limit);
  });
}

void Group::wake() {
  Impl& g = *impl_;
  g.check_alive("wake");
  if (!g.heap->asleep()) throw Error(ErrorCode::invalid_argument, "wake: the group does not sleep");
  g.enter(Operation::wake);
  g.collectively("wake", [&] { g.heap->wake(*g.bootstrap, g.deadline_of(Operation::wake)); });
}

bool Group::asleep() const { return impl_->heap->asleep(); }

}  // namespace switchyard

// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <vector>

#include "soak/place.hpp"

namespace soak {

int count_gpus() { return 0; }
int num_sms_for(int, int) { return 0; }

struct Place::Impl {
  struct Free {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{64}); }
  };
  std::vector<std::unique_ptr<std::byte, Free>> buffers;
};

namespace {
struct Calls final : Place::Graph {
  explicit Calls(std::function<void()> given) : calls(std::move(given)) {}
  void launch(void*) override { calls(); }
  std::function<void()> calls;
};
}  // namespace

Place::Place(int, int) : impl_(std::make_unique<Impl>()) {}
Place::~Place() = default;

std::byte* Place::allocate(size_t bytes) {
  auto* const p = static_cast<std::byte*>(::operator new[](bytes, std::align_val_t{64}));
  impl_->buffers.emplace_back(p);
  std::memset(p, 0, bytes);
  return p;
}

void Place::check_capture(void*, const char*) const {}
void* Place::stream(int) const { return nullptr; }
void Place::order(void*, void*) {}
bool Place::done(void*) const { return true; }
void Place::finish(void*) {}

template <class Job>
void Place::run(const Job& job, void*) {
  for (int64_t i = 0, n = job.size(); i < n; ++i) job(i);
}
template void Place::run(const harness::MakeInputs&, void*);
template void Place::run(const MakeRows&, void*);
template void Place::run(const RankMajorExperts&, void*);
template void Place::run(const ExpertMajorExperts&, void*);
template void Place::run(const MaskedExperts&, void*);
template void Place::run(const JudgeLayer&, void*);
template void Place::run(const SetNumber&, void*);
template void Place::run(const ClearVerdict&, void*);
template void Place::run(const FillNumbers&, void*);
template void Place::run(const JudgeNumbers&, void*);

std::unique_ptr<Place::Graph> Place::capture(void*, const std::function<void()>& enqueue) {
  return std::make_unique<Calls>(enqueue);
}
std::unique_ptr<AllReduce> Place::make_all_reduce(const Gather&) { return nullptr; }
void Place::copy_out(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }

}  // namespace soak

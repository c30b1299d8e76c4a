// SPDX-License-Identifier: Apache-2.0
#include "arch/cpu/pending_queue.hpp"

#include "arch/cpu/row_ops.hpp"

namespace switchyard::detail {

void PendingQueue::add_copy(void* dst, const void* src, size_t bytes) {
  ops_.push_back({Kind::copy, dst, src, bytes, {}, 0, 0});
}

void PendingQueue::add_multicast(void* const* dsts, int n, const void* src, size_t bytes) {
  for (int i = 0; i < n; ++i) add_copy(dsts[i], src, bytes);
}

void PendingQueue::add_zero(void* dst, size_t bytes) { ops_.push_back({Kind::zero, dst, nullptr, bytes, {}, 0, 0}); }

void PendingQueue::add_reduce(const ReduceSpec& spec) {
  ops_.push_back({Kind::reduce, nullptr, nullptr, 0, spec, pointers_.size(), weights_.size()});
  pointers_.insert(pointers_.end(), spec.rows, spec.rows + spec.n);
  if (spec.weights != nullptr) weights_.insert(weights_.end(), spec.weights, spec.weights + spec.n);
}

void PendingQueue::perform() {
  bool streamed = false;
  for (auto op = ops_.rbegin(); op != ops_.rend(); ++op) {
    switch (op->kind) {
      case Kind::copy: streamed |= copy_row(op->dst, op->src, op->bytes); break;
      case Kind::zero: streamed |= zero_row(op->dst, op->bytes); break;
      case Kind::reduce: {
        ReduceSpec spec = op->reduce;
        spec.rows = pointers_.data() + op->rows_at;
        if (spec.weights != nullptr) spec.weights = weights_.data() + op->weights_at;
        streamed |= reduce_rows(spec);
        break;
      }
    }
  }
  if (streamed) flush_streams();
  discard();
}

void PendingQueue::discard() noexcept {
  ops_.clear();
  pointers_.clear();
  weights_.clear();
}

}  // namespace switchyard::detail

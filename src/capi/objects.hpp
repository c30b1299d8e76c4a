// SPDX-License-Identifier: Apache-2.0
// Objects behind the opaque pointers in the C ABI. Each object shares ownership of the objects on which it depends, so that the
// C side may destroy them in any order. Members are in construction order: the share comes first and is destroyed last.
#pragma once

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "capi/errors.hpp"
#include "switchyard/c/graph_memory.h"
#include "switchyard/normal.hpp"
#include "switchyard/trace.hpp"

namespace switchyard::detail {

/// An object of an exchange mode, with the group that it requires.
template <class T>
struct Grouped {
  template <class... Config>
  explicit Grouped(std::shared_ptr<Group> g, const Config&... config) : group(std::move(g)), object(*group, config...) {}
  std::shared_ptr<Group> group;
  T object;
};
using ExchangeState = Grouped<NormalExchange>;

/// Returns NULL for an empty array, regardless of the address that its container returns.
template <class Array>
auto data_or_null(const Array& array) -> decltype(array.data()) {
  return array.empty() ? nullptr : array.data();
}

}  // namespace switchyard::detail

// NOLINTBEGIN(readability-identifier-naming): names of the C ABI
struct sy_group {
  std::shared_ptr<switchyard::Group> group;
  /// Trace to which the group records; lives as long as the group and everything created from it.
  std::shared_ptr<switchyard::Trace>* recorded;
};

struct sy_exchange {
  std::shared_ptr<switchyard::detail::ExchangeState> state;
};

struct sy_handle {
  std::atomic<uint64_t> owners{1};
  switchyard::Handle handle;
  int64_t tokens = 0;  ///< T as known on the host, because querying the handle may wait for a GPU
};

struct sy_dispatched {
  std::shared_ptr<switchyard::detail::ExchangeState> state;
  switchyard::Dispatched dispatched;
  sy_handle* handle = nullptr;  ///< one of its owners
  ~sy_dispatched() { sy_handle_release(handle); }
};

struct sy_rows {
  std::shared_ptr<switchyard::detail::ExchangeState> state;
  switchyard::RowBuffer rows;
};

struct sy_graph_memory {
  std::shared_ptr<switchyard::detail::ExchangeState> state;
  switchyard::GraphMemory memory;
};

struct sy_registered {
  switchyard::RegisteredMemory memory;
};

struct sy_storage {
  virtual ~sy_storage() = default;
};
// NOLINTEND(readability-identifier-naming)

namespace switchyard::detail {

inline Group& group_of(const sy_group& group) { return *group.group; }
/// The group of an object that holds a Grouped as `state`.
template <class Object>
inline Group& group_of(const Object& object) {
  return *object.state->group;
}

/// Runs the body of a collective call on `object`. If it is NULL, the peers cannot be notified.
template <class Object, class Body>
sy_code collective_on(Object* object, const char* name, Body&& body) noexcept {
  if (!object) return guarded([&] { require(nullptr, name); });
  return collective(group_of(*object), std::forward<Body>(body));
}

/// Collective. Creates the object `*out`, called `name` in errors: `make()` returns its state.
template <class Object, class Make>
sy_code create(sy_group* group, const char* name, Object** out, Make&& make) noexcept {
  if (out) *out = nullptr;
  return collective_on(group, "group", [&] {
    require(out, name);
    auto made = std::make_unique<Object>();
    made->state = make();
    *out = made.release();
  });
}

template <class T>
struct Stored final : sy_storage {
  explicit Stored(T v) : value(std::move(v)) {}
  const T value;
};

template <class T>
std::unique_ptr<Stored<T>> store(T value) {
  return std::make_unique<Stored<T>>(std::move(value));
}

/// Fills the caller's struct; the tables are owned by its storage.
void write_ledger(sy_ledger* to, LedgerTables tables);

}  // namespace switchyard::detail

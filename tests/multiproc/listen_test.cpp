// SPDX-License-Identifier: Apache-2.0
// Listening at one socket file from several processes: exactly one succeeds.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <atomic>
#include <cstring>
#include <latch>
#include <optional>
#include <thread>
#include <vector>

#include "bootstrap/net/socket.hpp"
#include "launch/on_threads.hpp"
#include "multiproc/meeting.hpp"
#include "switchyard/status.hpp"

namespace switchyard {
namespace {

using namespace detail;
using namespace test;

/// A Unix socket that is bound to `path`; it does not listen.
UniqueFd bind_only(const std::string& path) {
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof address.sun_path - 1);
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) throw std::runtime_error("bind");
  return fd;
}

UniqueFd lock_folder_of(const Place& place) {
  const std::string folder = place.path().substr(0, place.path().rfind('/'));
  UniqueFd fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) throw std::runtime_error("flock");
  return fd;
}

std::string failure_of(const Place& place, Milliseconds time) {
  try {
    listen_at(parse_endpoint(place.store()), Deadline(time));
  } catch (const RendezvousError& error) {
    return error.what();
  }
  return "";
}

/// Threads start to listen together at a stale socket file of a killed process. Each opens the folder separately, as separate
/// processes would.
TEST(Listen, OneOfManyReplacesAStaleFile) {
  constexpr int kThreads = 6;
  const Place place("path");
  const Endpoint endpoint = parse_endpoint(place.store());
  for (int round = 0; round < 300; ++round) {
    bind_only(place.path());
    std::latch start(kThreads);
    std::vector<std::optional<Listener>> listeners(kThreads);
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t)
      threads.emplace_back([&, t] {
        start.arrive_and_wait();
        try {
          listeners[static_cast<size_t>(t)] = listen_at(endpoint, Deadline(Milliseconds{1}));
        } catch (const RendezvousError&) {  // another thread listens
        }
      });
    for (std::thread& thread : threads) thread.join();
    int count = 0;
    for (const auto& listener : listeners) count += listener.has_value() ? 1 : 0;
    ASSERT_EQ(count, 1) << "round " << round;
    struct stat info;
    ASSERT_EQ(::stat(place.path().c_str(), &info), 0) << "round " << round;
    listeners.clear();
    ASSERT_NE(::stat(place.path().c_str(), &info), 0) << "the file is still there";
  }
}

/// The holder of the lock is between bind() and listen().
TEST(Listen, ASocketFileThatIsBeingCreatedIsNotStale) {
  const Place place("path");
  UniqueFd lock = lock_folder_of(place);
  UniqueFd creator = bind_only(place.path());
  struct stat before, after;
  ASSERT_EQ(::stat(place.path().c_str(), &before), 0);
  const std::string why = failure_of(place, Milliseconds{100});
  EXPECT_NE(why.find("another process has locked its folder (flock) for 100 ms"), std::string::npos) << why;
  ASSERT_EQ(::stat(place.path().c_str(), &after), 0);
  EXPECT_EQ(before.st_ino, after.st_ino) << "another process replaced the file";

  ASSERT_EQ(::listen(creator.get(), 1), 0);
  lock.reset();
  const std::string served = failure_of(place, Milliseconds{100});
  EXPECT_NE(served.find("another process still listens there"), std::string::npos) << served;
  creator.reset();
  EXPECT_TRUE(listen_at(parse_endpoint(place.store()), Deadline(kLong)));
}

/// Threads listen in turns. Each attempt may find the file of a listener that removes it at this moment.
TEST(Listen, AListenerThatEndsMakesRoomForTheNext) {
  constexpr size_t kThreads = 4;
  const Place place("path");
  const Endpoint endpoint = parse_endpoint(place.store());
  std::vector<std::string> errors(kThreads);
  launch::on_threads(kThreads, [&](size_t t) {
    try {
      for (int turn = 0; turn < 2000; ++turn)
        listen_at(endpoint, Deadline(kLong), [](Milliseconds) { std::this_thread::yield(); });
    } catch (const RendezvousError& error) {
      errors[t] = error.what();
    }
  });
  EXPECT_EQ(errors, std::vector<std::string>(kThreads));
}

/// A listener holds the lock only while it creates its file.
TEST(Listen, TheLockEndsWithTheCall) {
  const Place place("path");
  const Listener listener = listen_at(parse_endpoint(place.store()), Deadline(kLong));
  EXPECT_TRUE(listener);
  EXPECT_NO_THROW(lock_folder_of(place));
}

}  // namespace
}  // namespace switchyard

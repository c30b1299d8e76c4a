// SPDX-License-Identifier: Apache-2.0
// Rendezvous addresses and result reports for tests.
#pragma once

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bootstrap/bootstrap.hpp"
#include "bootstrap/net/socket.hpp"
#include "multiproc/fork_ranks.hpp"
#include "switchyard/status.hpp"

namespace switchyard::test {

using detail::Bootstrap;
using detail::JoinSpec;

inline constexpr Milliseconds kLong{60000};
inline constexpr Milliseconds kShort{300};

/// A new rendezvous address. Paths are in a folder that is removed together with this object.
class Place {
 public:
  explicit Place(const std::string& kind) {
    if (kind == "path") {
      char folder[] = "/tmp/switchyard-test-XXXXXX";
      if (::mkdtemp(folder) == nullptr) throw std::runtime_error("mkdtemp failed");
      folder_ = folder;
      store_ = "unix:" + folder_ + "/store";
    } else if (kind == "abstract") {
      store_ = "unix:@switchyard-test-" + detail::random_token();
    } else {
      store_ = "tcp://" + kind + ":" + std::to_string(reserve_port());
    }
  }
  ~Place() {
    if (folder_.empty()) return;
    ::unlink((folder_ + "/store").c_str());
    ::rmdir(folder_.c_str());
  }
  const std::string& store() const { return store_; }
  std::string path() const { return folder_ + "/store"; }

 private:
  /// Binds a port without listening there, so that no other place gets it. With SO_REUSEADDR, a rank 0 can listen there.
  int reserve_port() {
    port_.reset(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    const int on = 1;
    if (::bind(port_.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
        ::setsockopt(port_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0)
      throw std::runtime_error("cannot reserve a port");
    ::getsockname(port_.get(), reinterpret_cast<sockaddr*>(&address), &length);
    return ntohs(address.sin_port);
  }
  std::string folder_;
  std::string store_;
  detail::UniqueFd port_;
};

inline void expect_ok(const std::vector<RankEnd>& ends) {
  for (const RankEnd& end : ends) EXPECT_TRUE(end.ok()) << end;
}

/// Exchanges three rounds of data that depends only on rank, round and column.
inline void exchange_rounds(Bootstrap& link, size_t bytes) {
  for (int round = 0; round < 3; ++round) {
    const auto value = [&](int r, size_t i) {
      return static_cast<unsigned char>(r * 31 + round * 7 + static_cast<int>(i % 251));
    };
    std::vector<unsigned char> mine(bytes);
    for (size_t i = 0; i < bytes; ++i) mine[i] = value(link.rank(), i);
    std::vector<unsigned char> all(bytes * static_cast<size_t>(link.world()));
    link.all_gather(mine.data(), bytes, all.data(), kLong);
    for (int r = 0; r < link.world(); ++r) {
      for (size_t i = 0; i < bytes; ++i) {
        if (all[static_cast<size_t>(r) * bytes + i] != value(r, i))
          throw std::runtime_error("wrong byte from rank " + std::to_string(r));
      }
    }
  }
}

/// Runs connect_processes and reports the result: "joined", or the error.
inline void say_outcome(ChildRank& me, const JoinSpec& spec, Milliseconds deadline) {
  try {
    const auto link = detail::connect_processes(spec, deadline);
    exchange_rounds(*link, 10);
    me.say("joined");
  } catch (const RendezvousError& error) {
    std::string missing;
    for (const int r : error.missing_ranks()) missing += std::to_string(r) + " ";
    me.say("missing " + missing);
    me.say(error.what());
  } catch (const PeerFailed& error) {
    me.say("failed " + std::to_string(error.rank()));
    me.say(error.what());
  }
}

/// Runs a scenario whose deadline must pass after its ranks have reached some point: with a short deadline first and, while
/// `too_soon` finds that a rank was not there yet, with longer ones, because a loaded machine may hold any rank up. Returns the
/// ends of the last run.
inline std::vector<RankEnd> with_enough_time(const std::function<std::vector<RankEnd>(Milliseconds deadline)>& scenario,
                                             const std::function<bool(const std::vector<RankEnd>&)>& too_soon) {
  std::vector<RankEnd> ends;
  for (const int ms : {1000, 5000, 25000}) {
    ends = scenario(Milliseconds{ms});
    if (!too_soon(ends)) break;
  }
  return ends;
}

inline bool said(const RankEnd& end, const std::string& part) {
  for (const std::string& line : end.said) {
    if (line.find(part) != std::string::npos) return true;
  }
  return false;
}
inline std::string all_said(const RankEnd& end) {
  std::string text;
  for (const std::string& line : end.said) text += line + "\n";
  return text;
}

/// The deadline of a rank other than rank 0 has passed before anyone answered it.
inline bool got_no_answer(const RankEnd& end) {
  return said(end, ": none)") || said(end, ": Connection refused)") || said(end, ": No such file or directory)");
}

/// Opens a raw connection to a store that may not be listening yet.
inline detail::UniqueFd knock(const std::string& store) {
  for (;;) {
    int error = 0;
    detail::UniqueFd fd =
        detail::start_connect(detail::resolve(detail::parse_endpoint(store), detail::Deadline(kLong))[0], error);
    while (error == EINPROGRESS) error = detail::connect_result(fd.get());
    if (error == 0) return fd;
    ::usleep(10000);
  }
}

}  // namespace switchyard::test

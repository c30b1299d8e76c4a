// SPDX-License-Identifier: Apache-2.0
// Two hosts in separate network namespaces, with a bridge between them that can drop all packets. Requires ip(8) and a Linux
// system on which the user can create namespaces; otherwise, problem() contains the reason. Use only in separate programs,
// because they move into a namespace.
#pragma once

#include <fcntl.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <stdexcept>
#include <string>

#include "base/unique_fd.hpp"

namespace switchyard::test {

inline detail::UniqueFd current_network() { return detail::UniqueFd(::open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC)); }

/// Becomes root in a new user namespace or, if that is impossible, keeps the current user, who must then be root.
inline bool may_make_networks() {
  const std::string user = std::to_string(::geteuid()), group = std::to_string(::getegid());
  if (::unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0) return ::unshare(CLONE_NEWNET) == 0;
  std::ofstream("/proc/self/setgroups") << "deny";
  std::ofstream("/proc/self/uid_map") << "0 " << user << " 1";
  std::ofstream("/proc/self/gid_map") << "0 " << group << " 1";
  return true;
}

/// A bridge in this process's network, and a network for each of two hosts, which has a link to the bridge (10.77.0.1 and
/// 10.77.0.2).
class Networks {
 public:
  /// The reason why the networks could not be created, or "".
  const std::string& problem() const { return problem_; }
  void enter(int host) const {
    if (::setns(hosts_[host].get(), CLONE_NEWNET) != 0) throw std::runtime_error("setns");
  }
  /// Drops all packets between the hosts, or restores the connection.
  void cut() const { run("ip link set port1 down"); }
  void mend() const { run("ip link set port1 up"); }

  /// Until unblock(), only this port is reachable by TCP between the hosts. Returns false if ip(8) does not support this.
  bool block_all_but(int port) const {
    // TCP is specified by number, because its name is defined in /etc/protocols, which minimal systems lack.
    const std::string only = std::to_string(port), tcp = "ip rule add ipproto 6 ";
    bool done = true;
    for (int h = 0; h < 2; ++h)
      done = done && run(tcp + "sport " + only + " lookup main pref 100 && " + tcp + "dport " + only +
                             " lookup main pref 100 && " + tcp + "to 10.77.0.0/24 unreachable pref 101",
                         h);
    if (!done) unblock();
    return done;
  }
  void unblock() const {
    for (int h = 0; h < 2; ++h) run("{ while ip rule del pref 100; do :; done; ip rule del pref 101; }", h);
  }

  static const Networks& get() {
    static const Networks networks;
    return networks;
  }

 private:
  Networks() {
    if (!may_make_networks()) {
      problem_ = "this user may not make network namespaces";
      return;
    }
    const detail::UniqueFd here = current_network();
    for (detail::UniqueFd& host : hosts_) {
      if (::unshare(CLONE_NEWNET) != 0) problem_ = "unshare(CLONE_NEWNET) failed";
      host = current_network();
    }
    if (::setns(here.get(), CLONE_NEWNET) != 0) problem_ = "setns failed";
    if (!run("ip link add bridge type bridge && ip link set bridge up")) problem_ = "ip(8) cannot make a bridge";
    for (int h = 0; h < 2 && problem_.empty(); ++h) {
      const std::string number = std::to_string(h), pid = std::to_string(::getpid());
      const std::string there = "ip link set lo up && ip link add eth0 type veth peer name port" + number + " netns " + pid +
                                " && ip addr add 10.77.0." + std::to_string(h + 1) + "/24 dev eth0 && ip link set eth0 up";
      if (!run(there, h) || !run("ip link set port" + number + " master bridge && ip link set port" + number + " up"))
        problem_ = "ip(8) cannot make a link";
    }
  }

  /// Runs a command in this process's network, or in that of a host.
  bool run(const std::string& command, int host = -1) const {
    const pid_t pid = ::fork();
    if (pid == 0) {
      if (host >= 0) enter(host);
      ::execl("/bin/sh", "sh", "-c", (command + " >/dev/null 2>&1").c_str(), nullptr);
      ::_exit(127);
    }
    int status = 0;
    ::waitpid(pid, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }

  detail::UniqueFd hosts_[2];
  std::string problem_;
};

}  // namespace switchyard::test

// SPDX-License-Identifier: Apache-2.0
// join_spec_from_environment. The table of variables is in docs/concepts/rendezvous.md.
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <optional>

#include "bootstrap/bootstrap.hpp"
#include "bootstrap/net/sha256.hpp"
#include "bootstrap/net/socket.hpp"
#include "switchyard/status.hpp"
#include "switchyard/types.hpp"

namespace switchyard::detail {
namespace {

using GetEnv = std::function<const char*(const char*)>;

struct Variable {
  std::string name;
  std::string value;
};

class Environment {
 public:
  explicit Environment(const GetEnv& getenv_fn) : getenv_(getenv_fn) {}

  /// Returns the first of `names` that is set; an empty value counts as unset.
  std::optional<Variable> find(std::initializer_list<const char*> names) const {
    for (const char* name : names) {
      if (const char* value = getenv_(name); value != nullptr && value[0] != '\0') return Variable{name, value};
    }
    return std::nullopt;
  }
  std::string text(const char* name) const {
    const auto variable = find({name});
    return variable ? variable->value : "";
  }

 private:
  const GetEnv& getenv_;
};

[[noreturn]] void fail(const std::string& text, ErrorCode code = ErrorCode::invalid_argument) { throw Error(code, text); }

int parse_int(const Variable& variable, int low, int high) {
  const std::string& text = variable.value;
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < low || number > high) {
    fail(variable.name + " = \"" + text + "\": must be an integer from " + std::to_string(low) + " to " + std::to_string(high));
  }
  return number;
}

/// Values set by a launcher.
struct Launcher {
  std::string name;
  Variable rank;
  Variable world;
  std::string job;                 ///< different for every job of this user on this host; empty if unknown
  std::string job_variable;        ///< the variable that would define `job`
  std::optional<Variable> spread;  ///< a value other than `expected_spread` shows that the ranks run on several hosts
  std::string expected_spread;
  std::string first_host = {};  ///< probable host of rank 0, or ""
  int port = 0;                 ///< port on that host that is probably free; 0: any

  bool on_several_hosts() const { return spread && spread->value != expected_spread; }
};

std::optional<Launcher> find_torchrun(const Environment& env) {
  const auto rank = env.find({"RANK"});
  const auto world = env.find({"WORLD_SIZE"});
  const auto host = env.find({"MASTER_ADDR"});
  const auto port = env.find({"MASTER_PORT"});
  if (!rank || !world || !host || !port) return std::nullopt;
  const int torch_port = parse_int(*port, 1, 65535);
  const std::string job =
      host->value + "\n" + port->value + "\n" + env.text("TORCHELASTIC_RUN_ID") + "\n" + env.text("TORCHELASTIC_RESTART_COUNT");
  // torchrun's own store uses this port itself.
  const int neighbour_port = torch_port < 65535 ? torch_port + 1 : torch_port - 1;
  return Launcher{"torchrun",   *rank,       *world,        job, "MASTER_ADDR", env.find({"LOCAL_WORLD_SIZE"}),
                  world->value, host->value, neighbour_port};
}

std::optional<Launcher> find_open_mpi(const Environment& env) {
  const auto rank = env.find({"OMPI_COMM_WORLD_RANK"});
  const auto world = env.find({"OMPI_COMM_WORLD_SIZE"});
  if (!rank || !world) return std::nullopt;
  std::string job = env.text("PMIX_NAMESPACE");
  if (job.empty()) job = env.text("OMPI_MCA_ess_base_jobid");
  if (job.empty()) {  // "<job>.<process>;tcp://..."
    const std::string uri = env.text("OMPI_MCA_orte_hnp_uri");
    job = uri.substr(0, uri.find(';'));
  }
  return Launcher{"Open MPI", *rank, *world, job, "PMIX_NAMESPACE", env.find({"OMPI_COMM_WORLD_LOCAL_SIZE"}), world->value};
}

/// Returns "node07" for "node[07-09,12],login1"; "" for anything more complex.
std::string first_node(const std::string& list) {
  const size_t open = list.find('['), comma = list.find(',');
  if (open == std::string::npos || comma < open) return list.substr(0, comma);
  const size_t close = list.find(']', open), end = list.find_first_of("-,]", open);
  if (close == std::string::npos || end == open + 1) return "";
  const std::string rest = list.substr(close + 1, list.find(',', close) - close - 1);
  return rest.find('[') != std::string::npos ? "" : list.substr(0, open) + list.substr(open + 1, end - open - 1) + rest;
}

std::optional<Launcher> find_slurm(const Environment& env) {
  const auto rank = env.find({"SLURM_PROCID"});
  const auto world = env.find({"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"});
  const auto step = env.find({"SLURM_STEP_ID", "SLURM_STEPID"});
  if (!rank || !world || !step) return std::nullopt;  // no step: a batch script, not a task of srun
  const auto job = env.find({"SLURM_JOB_ID", "SLURM_JOBID"});
  const auto nodes = env.find({"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"});
  return Launcher{"Slurm",
                  *rank,
                  *world,
                  job ? job->value + "." + step->value : "",
                  "SLURM_JOB_ID",
                  env.find({"SLURM_STEP_NUM_NODES", "SLURM_NNODES"}),
                  "1",
                  nodes ? first_node(nodes->value) : ""};
}

std::optional<Launcher> find_launcher(const Environment& env) {
  if (auto launcher = find_torchrun(env)) return launcher;
  if (auto launcher = find_open_mpi(env)) return launcher;
  return find_slurm(env);
}

/// Derives a name or secret that all ranks of the job compute without communication. It differs between users and between
/// launchers.
std::string derive(const char* purpose, const Launcher& launcher) {
  const std::string text =
      std::string(purpose) + "\n" + std::to_string(::geteuid()) + "\n" + launcher.name + "\n" + launcher.job;
  return to_hex(sha256(std::as_bytes(std::span(text)))).substr(0, 32);
}

void require_job(const Launcher& launcher, const char* wanted) {
  if (!launcher.job.empty()) return;
  fail(launcher.name + " started this process, but " + launcher.job_variable + " is not set, so that " + wanted +
       " cannot be derived from it: set " + wanted);
}

/// Derives a store where no other user can impersonate rank 0: in a private folder of this user if one exists or can be
/// created, else an abstract name. All ranks derive the same store.
void derive_place(const Launcher& launcher, JoinSpec& spec) {
  const std::string user = std::to_string(::geteuid()), name = derive("store", launcher);
  if (const std::string folder = "/run/user/" + user; is_private_folder(folder)) {
    spec.store = "unix:" + folder + "/switchyard-" + name;
    return;
  }
  const std::string folder = "/tmp/switchyard-" + user;
  struct stat info;
  const bool can_be_made = ::lstat(folder.c_str(), &info) != 0 && errno == ENOENT && ::access("/tmp", W_OK | X_OK) == 0;
  if (can_be_made || is_private_folder(folder)) {
    spec.store = "unix:" + folder + "/" + name;
    spec.private_folder = folder;
    return;
  }
  spec.store = "unix:@switchyard-" + name;
}

/// Ranks on several hosts meet on the probable host of rank 0; if rank 0 runs elsewhere, it reports that it cannot listen
/// there.
void derive_tcp_store(const Launcher& launcher, JoinSpec& spec) {
  if (launcher.first_host.empty())
    fail(launcher.spread->name + " = \"" + launcher.spread->value + "\" (expected \"" + launcher.expected_spread +
             "\"): " + launcher.name +
             " started ranks on several hosts and does not say where rank 0 is: set SWITCHYARD_STORE to "
             "tcp://host:port, with an address of rank 0's host and a free port there, and SWITCHYARD_JOB_TOKEN, on all ranks",
         ErrorCode::unsupported);
  constexpr unsigned kFirstPort = 20000, kPorts = 10000;  // below the range of ephemeral ports
  const unsigned port =
      launcher.port != 0
          ? static_cast<unsigned>(launcher.port)
          : kFirstPort + static_cast<unsigned>(std::stoul(derive("port", launcher).substr(0, 6), nullptr, 16)) % kPorts;
  const bool v6 = launcher.first_host.find(':') != std::string::npos;
  spec.store = "tcp://" + (v6 ? "[" + launcher.first_host + "]" : launcher.first_host) + ":" + std::to_string(port);
  parse_endpoint(spec.store, "the store that " + launcher.name + "'s variables name");
}

void derive_store(const Launcher& launcher, JoinSpec& spec) {
  require_job(launcher, "SWITCHYARD_STORE");
  if (launcher.on_several_hosts())
    derive_tcp_store(launcher, spec);
  else
    derive_place(launcher, spec);
}

/// A token derived from the names and numbers of a job could be guessed by any process that can reach a TCP store.
void require_chosen_token(const JoinSpec& spec, const Launcher& launcher) {
  if (parse_endpoint(spec.store).is_unix()) return;
  fail("SWITCHYARD_JOB_TOKEN is not set, and the ranks meet at " + spec.store +
       ", which others may reach: set it to some text, the "
       "same on all ranks and known to no one else (what follows from " +
       launcher.name + "'s variables can be guessed)");
}

[[noreturn]] void fail_nothing_found(const Environment& env) {
  std::string text = "this process was started as no rank of a group. Looked for:";
  const auto list = [&](const char* title, std::initializer_list<const char*> names) {
    text += std::string(" ") + title + " (";
    bool first = true;
    for (const char* name : names) {
      const auto variable = env.find({name});
      text += (first ? "" : ", ") + std::string(name) + (variable ? " = \"" + variable->value + "\"" : " not set");
      first = false;
    }
    text += ");";
  };
  list("own variables", {"SWITCHYARD_RANK", "SWITCHYARD_WORLD_SIZE"});
  list("torchrun", {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"});
  list("Open MPI", {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"});
  list("Slurm", {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID"});
  fail(text +
       " set SWITCHYARD_RANK, SWITCHYARD_WORLD_SIZE, SWITCHYARD_STORE and SWITCHYARD_JOB_TOKEN, or use one of these launchers");
}

}  // namespace

bool is_private_folder(const std::string& folder) {
  struct stat info;
  return ::lstat(folder.c_str(), &info) == 0 && S_ISDIR(info.st_mode) && info.st_uid == ::geteuid() &&
         (info.st_mode & (S_IRWXG | S_IRWXO)) == 0;
}

JoinSpec join_spec_from_environment(const std::function<const char*(const char*)>& getenv_fn) {
  const Environment env(getenv_fn);
  auto rank = env.find({"SWITCHYARD_RANK"});
  auto world = env.find({"SWITCHYARD_WORLD_SIZE"});
  const auto store = env.find({"SWITCHYARD_STORE"});
  const auto token = env.find({"SWITCHYARD_JOB_TOKEN"});
  const auto launcher = rank && world && store && token ? std::nullopt : find_launcher(env);
  if (!launcher && !rank && !world) fail_nothing_found(env);
  if (!rank && launcher) rank = launcher->rank;
  if (!world && launcher) world = launcher->world;
  if (!rank) fail("SWITCHYARD_WORLD_SIZE is set but SWITCHYARD_RANK is not: set both");
  if (!world) fail("SWITCHYARD_RANK is set but SWITCHYARD_WORLD_SIZE is not: set both");

  JoinSpec spec;
  spec.world = parse_int(*world, 1, kMaxRanks);
  spec.rank = parse_int(*rank, 0, spec.world - 1);
  if (store) {
    parse_endpoint(store->value, store->name);
    spec.store = store->value;
  } else if (spec.world > 1) {
    if (!launcher)
      fail("SWITCHYARD_STORE is not set: it must be unix:/path, unix:@name or tcp://host:port, the same on all ranks");
    derive_store(*launcher, spec);
  }
  if (token) {
    spec.token = token->value;
  } else if (spec.world > 1) {
    if (!launcher)
      fail("SWITCHYARD_JOB_TOKEN is not set: it must be some text, the same on all ranks and known to no one else");
    require_chosen_token(spec, *launcher);
    require_job(*launcher, "SWITCHYARD_JOB_TOKEN");
    spec.token = derive("token", *launcher);
  }
  return spec;
}

}  // namespace switchyard::detail

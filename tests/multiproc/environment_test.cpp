// SPDX-License-Identifier: Apache-2.0
// The group configuration that a process reads from its environment.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>

#include "bootstrap/bootstrap.hpp"
#include "bootstrap/net/socket.hpp"
#include "switchyard/status.hpp"

namespace switchyard {
namespace {

using namespace detail;

// ---- environment ----
using Variables = std::map<std::string, std::string>;

JoinSpec spec_of(const Variables& variables) {
  return join_spec_from_environment([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

std::string error_of(const Variables& variables, ErrorCode code = ErrorCode::invalid_argument) {
  try {
    spec_of(variables);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  return "no error";
}

Variables with(Variables variables, const Variables& more) {
  for (const auto& [name, value] : more) variables[name] = value;
  return variables;
}

const Variables kOwn = {{"SWITCHYARD_RANK", "2"},
                        {"SWITCHYARD_WORLD_SIZE", "4"},
                        {"SWITCHYARD_STORE", "tcp://h:1"},
                        {"SWITCHYARD_JOB_TOKEN", "secret"}};
const Variables kTorchrun = {{"RANK", "1"},
                             {"WORLD_SIZE", "8"},
                             {"LOCAL_WORLD_SIZE", "8"},
                             {"MASTER_ADDR", "node"},
                             {"MASTER_PORT", "29500"},
                             {"TORCHELASTIC_RUN_ID", "run"},
                             {"LOCAL_RANK", "1"},
                             {"TORCHELASTIC_RESTART_COUNT", "0"}};
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "0"},
                            {"OMPI_COMM_WORLD_SIZE", "2"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                            {"PMIX_NAMESPACE", "1487077377"},
                            {"OMPI_MCA_orte_hnp_uri", "1487077376.0;tcp://192.0.2.2:46427"}};
const Variables kSlurm = {
    {"SLURM_PROCID", "3"}, {"SLURM_NTASKS", "4"}, {"SLURM_JOB_ID", "77"}, {"SLURM_STEP_ID", "0"}, {"SLURM_NNODES", "1"}};

TEST(Environment, OwnVariables) {
  const JoinSpec spec = spec_of(kOwn);
  EXPECT_EQ(spec.rank, 2);
  EXPECT_EQ(spec.world, 4);
  EXPECT_EQ(spec.store, "tcp://h:1");
  EXPECT_EQ(spec.token, "secret");
  EXPECT_EQ(spec_of({{"SWITCHYARD_RANK", "0"}, {"SWITCHYARD_WORLD_SIZE", "1"}}).world, 1) << "one rank meets nobody";
}

TEST(Environment, LaunchersGiveRankWorldStoreAndToken) {
  for (const auto& [variables, rank, world] :
       {std::tuple(kTorchrun, 1, 8), std::tuple(kOpenMpi, 0, 2), std::tuple(kSlurm, 3, 4)}) {
    const JoinSpec spec = spec_of(variables);
    EXPECT_EQ(spec.rank, rank);
    EXPECT_EQ(spec.world, world);
    // The store is in a folder that other users cannot enter, because any user could claim an abstract socket name.
    const Endpoint place = parse_endpoint(spec.store);
    ASSERT_EQ(place.kind, Endpoint::Kind::unix_path) << spec.store;
    EXPECT_NE(place.name.find("switchyard-"), std::string::npos) << spec.store;
    const std::string folder = place.name.substr(0, place.name.rfind('/'));
    EXPECT_TRUE(is_private_folder(folder) || folder == spec.private_folder) << spec.store;
    EXPECT_EQ(spec.token.size(), 32u);
    EXPECT_EQ(spec.store.find(spec.token), std::string::npos) << "the store's name gives the token away";
  }
}

TEST(Environment, APrivateFolderIsOnesOwnAndClosed) {
  char name[] = "/tmp/switchyard-test-XXXXXX";
  ASSERT_NE(::mkdtemp(name), nullptr);  // mode 0700
  const std::string folder = name, link = folder + "/link", file = folder + "/file";
  EXPECT_TRUE(is_private_folder(folder));
  ASSERT_EQ(::symlink(name, link.c_str()), 0);
  EXPECT_FALSE(is_private_folder(link)) << "whoever made the link can turn it elsewhere";
  ASSERT_EQ(::chmod(name, 0750), 0);
  EXPECT_FALSE(is_private_folder(folder));
  ASSERT_EQ(::chmod(name, 0701), 0);
  EXPECT_FALSE(is_private_folder(folder));
  EXPECT_FALSE(is_private_folder(file)) << "not there";
  ::unlink(link.c_str());
  ::rmdir(name);
}

TEST(Environment, RanksOfOneJobMeetAndJobsDoNot) {
  const auto where = [](const Variables& variables) { return spec_of(variables).store + spec_of(variables).token; };
  EXPECT_EQ(where(kTorchrun), where(with(kTorchrun, {{"RANK", "5"}, {"LOCAL_RANK", "5"}})));
  EXPECT_EQ(where(kOpenMpi), where(with(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "1"}})));
  EXPECT_EQ(where(kSlurm), where(with(kSlurm, {{"SLURM_PROCID", "0"}})));
  const std::string torchrun = where(kTorchrun);
  for (const char* name : {"MASTER_ADDR", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}) {
    EXPECT_NE(torchrun, where(with(kTorchrun, {{name, "7"}}))) << name;
  }
  EXPECT_NE(torchrun, where(with(kTorchrun, {{"MASTER_PORT", "29501"}})));
  EXPECT_NE(where(kOpenMpi), where(with(kOpenMpi, {{"PMIX_NAMESPACE", "2"}})));
  EXPECT_NE(where(kSlurm), where(with(kSlurm, {{"SLURM_JOB_ID", "78"}})));
  EXPECT_NE(where(kSlurm), where(with(kSlurm, {{"SLURM_STEP_ID", "1"}})));
  EXPECT_EQ(where(with(kOpenMpi, {{"PMIX_NAMESPACE", ""}})),
            where(with(kOpenMpi, {{"PMIX_NAMESPACE", ""}, {"OMPI_MCA_orte_hnp_uri", "1487077376.0;tcp://other"}})));
}

TEST(Environment, PrecedenceAndOverrides) {
  const Variables all = with(with(with(kSlurm, kOpenMpi), kTorchrun), kOwn);
  EXPECT_EQ(spec_of(all).rank, 2);
  EXPECT_EQ(spec_of(with(with(kSlurm, kOpenMpi), kTorchrun)).rank, 1);
  EXPECT_EQ(spec_of(with(kSlurm, kOpenMpi)).world, 2);
  const JoinSpec moved = spec_of(with(kTorchrun, {{"SWITCHYARD_STORE", "unix:/x"}, {"SWITCHYARD_JOB_TOKEN", "mine"}}));
  EXPECT_EQ(moved.rank, 1);
  EXPECT_EQ(moved.store, "unix:/x");
  EXPECT_EQ(moved.token, "mine");
  EXPECT_EQ(spec_of(with(kSlurm, {{"SLURM_STEP_NUM_TASKS", "6"}})).world, 6) << "the step, not the job";
  EXPECT_EQ(spec_of(with(kOwn, {{"RANK", "garbage"}})).rank, 2) << "variables that are not needed are not read";
}

TEST(Environment, NothingSetListsWhatWasLookedFor) {
  const std::string text = error_of({{"WORLD_SIZE", "4"}});
  for (const char* part : {"SWITCHYARD_RANK not set", "RANK not set", "WORLD_SIZE = \"4\"", "OMPI_COMM_WORLD_RANK",
                           "SLURM_PROCID", "SWITCHYARD_STORE", "SWITCHYARD_JOB_TOKEN"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
  }
  EXPECT_NE(error_of({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_JOB_ID", "1"}}).find("SLURM_STEP_ID not set"),
            std::string::npos)
      << "a batch script is not a rank";
}

TEST(Environment, MalformedValuesAreNamed) {
  const auto expect = [](const Variables& variables, const std::string& part, ErrorCode code = ErrorCode::invalid_argument) {
    const std::string text = error_of(variables, code);
    EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
  };
  expect(with(kOwn, {{"SWITCHYARD_RANK", "4"}}), "SWITCHYARD_RANK = \"4\": must be an integer from 0 to 3");
  expect(with(kOwn, {{"SWITCHYARD_RANK", "-1"}}), "SWITCHYARD_RANK = \"-1\"");
  expect(with(kOwn, {{"SWITCHYARD_RANK", "1 "}}), "SWITCHYARD_RANK = \"1 \"");
  expect(with(kOwn, {{"SWITCHYARD_WORLD_SIZE", "65"}}), "SWITCHYARD_WORLD_SIZE = \"65\": must be an integer from 1 to 64");
  expect(with(kOwn, {{"SWITCHYARD_WORLD_SIZE", "99999999999999"}}), "SWITCHYARD_WORLD_SIZE");
  expect(with(kOwn, {{"SWITCHYARD_STORE", "ftp://x"}}), "SWITCHYARD_STORE = \"ftp://x\"");
  expect(with(kOwn, {{"SWITCHYARD_STORE", ""}}), "SWITCHYARD_STORE is not set");
  expect(with(kOwn, {{"SWITCHYARD_JOB_TOKEN", ""}}), "SWITCHYARD_JOB_TOKEN is not set");
  expect(with(kOwn, {{"SWITCHYARD_RANK", ""}}), "SWITCHYARD_RANK is not");
  expect(with(kOwn, {{"SWITCHYARD_WORLD_SIZE", ""}}), "SWITCHYARD_WORLD_SIZE is not");
  expect(with(kTorchrun, {{"RANK", "x"}}), "RANK = \"x\"");
  expect(with(kTorchrun, {{"MASTER_PORT", "x"}}), "MASTER_PORT = \"x\"");
  expect(with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}}), "OMPI_COMM_WORLD_LOCAL_SIZE", ErrorCode::unsupported);
  expect(with(kOpenMpi, {{"PMIX_NAMESPACE", ""}, {"OMPI_MCA_orte_hnp_uri", ""}}), "PMIX_NAMESPACE is not set");
  expect(with(kSlurm, {{"SLURM_STEP_NUM_NODES", "2"}}), "SLURM_STEP_NUM_NODES = \"2\"", ErrorCode::unsupported);
  expect(with(kSlurm, {{"SLURM_NNODES", "2"}, {"SLURM_JOB_NODELIST", "a[1-2]b[1-2]"}}), "SWITCHYARD_STORE",
         ErrorCode::unsupported);
  // A guessable string is not accepted as a token if other users can connect.
  expect(with(kTorchrun, {{"LOCAL_WORLD_SIZE", "4"}}),
         "SWITCHYARD_JOB_TOKEN is not set, and the ranks meet at tcp://node:29501");
  expect(with(kOpenMpi, {{"SWITCHYARD_STORE", "tcp://h:1"}}),
         "SWITCHYARD_JOB_TOKEN is not set, and the ranks meet at tcp://h:1");
}

TEST(Environment, RanksOfSeveralHostsMeetWhereTheLauncherSaysThatRankZeroIs) {
  const auto store = [](const Variables& variables) {
    const JoinSpec spec = spec_of(with(variables, {{"SWITCHYARD_JOB_TOKEN", "chosen"}}));
    EXPECT_EQ(spec.token, "chosen");
    return spec.store;
  };
  EXPECT_EQ(store(with(kTorchrun, {{"LOCAL_WORLD_SIZE", "4"}})), "tcp://node:29501");
  EXPECT_EQ(store(with(kTorchrun, {{"LOCAL_WORLD_SIZE", "4"}, {"MASTER_PORT", "65535"}})), "tcp://node:65534");
  EXPECT_EQ(store(with(kTorchrun, {{"LOCAL_WORLD_SIZE", "4"}, {"MASTER_ADDR", "fd00::7"}})), "tcp://[fd00::7]:29501");
  const std::pair<const char*, const char*> lists[] = {
      {"n1", "n1"}, {"n1,n2", "n1"}, {"n[07-09,12],login1", "n07"}, {"n[3,5]", "n3"}, {"gpu[1-2]-ib,x", "gpu1-ib"}};
  for (const auto& [list, first] : lists) {
    const Variables slurm = with(kSlurm, {{"SLURM_NNODES", "2"}, {"SLURM_JOB_NODELIST", list}});
    const Endpoint place = parse_endpoint(store(slurm));
    EXPECT_EQ(place.kind, Endpoint::Kind::tcp);
    EXPECT_EQ(place.name, first) << list;
    EXPECT_GE(place.port, 20000);
    EXPECT_LT(place.port, 30000);
    EXPECT_EQ(store(slurm), store(with(slurm, {{"SLURM_PROCID", "1"}})));
    EXPECT_NE(store(slurm), store(with(slurm, {{"SLURM_JOB_ID", "78"}})));
  }
  EXPECT_EQ(
      parse_endpoint(store(with(kSlurm, {{"SLURM_NNODES", "2"}, {"SLURM_JOB_NODELIST", "a,b"}, {"SLURM_STEP_NODELIST", "b"}})))
          .name,
      "b")
      << "the step, not the job";
}

}  // namespace
}  // namespace switchyard

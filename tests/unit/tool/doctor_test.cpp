// SPDX-License-Identifier: Apache-2.0
// doctor's findings about GPUs on fabricated machines, and the separate process in which doctor queries the driver.
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "switchyard/normal.hpp"
#include "tools/cli/style.hpp"
#include "tools/doctor/doctor.hpp"
#include "tools/run/in_child.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

TEST(Apart, AnswersErrorsAndDeathsComeBack) {
  EXPECT_EQ(run_in_child([] { return json{{"pid", getpid()}}; }).at("pid").get<pid_t>() == getpid(), false);
  EXPECT_EQ(run_in_child([] { return json(std::string(100000, 'x')); }).get<std::string>().size(), 100000u);
  const auto text_of = [](const std::function<json()>& body) -> std::string {
    try {
      run_in_child(body);
      return "";
    } catch (const std::runtime_error& e) {
      return e.what();
    }
  };
  EXPECT_EQ(text_of([]() -> json { throw std::runtime_error("no driver"); }), "no driver");
  EXPECT_NE(text_of([]() -> json {
              raise(SIGKILL);
              return 0;
            }).find("signal 9"),
            std::string::npos);
  EXPECT_EQ(text_of([]() -> json { _exit(0); }), "the process ended without an answer");
}

/// `n` Hopper GPUs, all connected by NVLink.
GpuProbe hoppers(size_t n) {
  GpuProbe p;
  p.driver = true;
  p.cuda_version = 13000;
  p.driver_version = "580.65.06";
  p.gpus.assign(n, Gpu{"NVIDIA H200", 9, 0, 132, uint64_t{141} << 30, true, true, true, 4});
  p.peer_access.assign(n, std::vector<bool>(n, true));
  p.native_atomics = p.peer_access;
  p.link_rank.assign(n, std::vector<int>(n, 0));
  return p;
}

const Finding& named(const std::vector<Finding>& found, const std::string& name) {
  for (const Finding& f : found)
    if (f.name == name) return f;
  throw std::runtime_error("no finding " + name);
}

std::string tuning_text(const char* text, Verdict verdict) {
  const auto path = std::filesystem::temp_directory_path() / ("sy_doctor_" + std::to_string(getpid()));
  std::ofstream(path) << text;
  setenv("SWITCHYARD_TUNING", path.c_str(), 1);
  const Finding f = tuning_finding({"cpu", "NVIDIA H200"});
  unsetenv("SWITCHYARD_TUNING");
  std::filesystem::remove(path);
  EXPECT_EQ(f.verdict, verdict) << f.value;
  EXPECT_EQ(f.reason.empty(), verdict == Verdict::ok);
  EXPECT_EQ(f.action.empty(), verdict == Verdict::ok);
  const size_t name = f.value.find(path.string());
  EXPECT_NE(name, std::string::npos) << f.value;
  return f.value.substr(name + path.string().size());
}

TEST(Doctor, TuningInForce) {
  unsetenv("SWITCHYARD_TUNING");
  const Finding built_in = tuning_finding({"cpu"});
  EXPECT_EQ(built_in.verdict, Verdict::ok);
  EXPECT_EQ(built_in.value.rfind("built-in values: ", 0), 0u) << built_in.value;
  const std::string shape = " mode=flat ranks=1 hidden=1 tokens=1\n";
  const std::string two = "switchyard-tuning 1\ndevice=\"NVIDIA H200\"" + shape + "device=tpu" + shape;
  EXPECT_EQ(tuning_text(two.c_str(), Verdict::ok).rfind(": 1 of 2 entries for cpu, NVIDIA H200; then built-in values: ", 0),
            0u);
  const std::string any = "switchyard-tuning 1\ndevice=cuda" + shape;
  EXPECT_EQ(tuning_text(any.c_str(), Verdict::ok).rfind(": 1 of 1 entries for cpu, NVIDIA H200; then", 0), 0u);
  const std::string both = any + "device=\"NVIDIA H200\"" + shape;  // then entries for any GPU are not counted
  EXPECT_EQ(tuning_text(both.c_str(), Verdict::ok).rfind(": 1 of 2 entries for cpu, NVIDIA H200; then", 0), 0u);
  EXPECT_EQ(tuning_text("switchyard-tuning 1", Verdict::limited).rfind(": nothing for cpu, NVIDIA H200; then built-in", 0), 0u);
  EXPECT_EQ(tuning_text("switchyard-tuning 1\nbad", Verdict::no), ", line 2: 'bad' given: must be KEY=VALUE");
  const std::vector<Finding> broken{{"Tuning", "tuning", Verdict::no, "", "", ""}};
  for (const Finding& f : judge_backends(broken)) EXPECT_NE(f.verdict, Verdict::ok) << f.name;
}

TEST(Doctor, HealthyGpus) {
  const auto found = gpu_findings(hoppers(4), "");
  for (const Finding& f : found) EXPECT_TRUE(f.verdict == Verdict::ok || f.verdict == Verdict::note) << f.name;
  EXPECT_EQ(named(found, "links of GPU 1").value, "NVLink to 0 2 3");
  EXPECT_NE(named(found, "symmetric heap").value.find("vmm"), std::string::npos);
  EXPECT_EQ(judge_cuda(found, true).verdict, Verdict::ok);
  EXPECT_EQ(judge_cuda(found, true).value, "ready on 4 GPUs");
  EXPECT_EQ(judge_cuda(found, false).verdict, Verdict::note);
  EXPECT_NE(judge_cuda(found, false).reason.find("4 GPUs present"), std::string::npos);
}

TEST(Doctor, ExpertsOfGpus) {
  EXPECT_EQ(experts_finding({"", ""}).verdict, Verdict::ok);
  const Finding f = experts_finding({"", "no tensor maps", "", "wrong"});
  EXPECT_EQ(f.verdict, Verdict::limited);
  EXPECT_EQ(f.value, "GPU 1: no tensor maps; GPU 3: wrong");
  auto found = gpu_findings(hoppers(4), "");
  found.push_back(f);
  EXPECT_EQ(judge_cuda(found, true).reason, "see above: grouped GEMM");
}

TEST(Doctor, LinksAreJudgedPairByPair) {
  GpuProbe p = hoppers(3);
  p.native_atomics[0][2] = p.native_atomics[2][0] = false;
  auto found = gpu_findings(p, "");
  EXPECT_EQ(named(found, "links of GPU 0").value, "NVLink to 1, PCIe to 2");
  EXPECT_EQ(named(found, "native peer atomics").verdict, Verdict::limited);
  EXPECT_EQ(judge_cuda(found, true).verdict, Verdict::limited);
  p.peer_access[0][2] = false;
  found = gpu_findings(p, "");
  EXPECT_EQ(named(found, "peer access").value, "not 0>2");
  EXPECT_EQ(named(found, "links of GPU 0").value, "NVLink to 1, no access to 2");
  p.peer_access.assign(3, std::vector<bool>(3, false));
  found = gpu_findings(p, "");
  EXPECT_EQ(named(found, "peer access").verdict, Verdict::no);
  EXPECT_EQ(judge_cuda(found, true).value, "ready, with all ranks on one GPU");
}

TEST(Doctor, NvlinksOfEachGpu) {
  GpuProbe p = hoppers(3);
  EXPECT_EQ(named(gpu_findings(p, ""), "active NVLinks").value, "unknown (no NVML)");
  for (Gpu& gpu : p.gpus) gpu.nvlinks = 18;
  EXPECT_EQ(named(gpu_findings(p, ""), "active NVLinks").value, "18 on every GPU");
  EXPECT_EQ(named(gpu_findings(p, ""), "active NVLinks").verdict, Verdict::note);
  p.gpus[1].nvlinks = 17;
  const auto found = gpu_findings(p, "");
  EXPECT_EQ(named(found, "active NVLinks").value, "18 on GPU 0, 17 on GPU 1, 18 on GPU 2");
  EXPECT_EQ(named(found, "active NVLinks").verdict, Verdict::limited);
  EXPECT_EQ(judge_cuda(found, true).reason, "see above: active NVLinks");
}

TEST(Doctor, DescriptorsThatDoNotPassSayWhich) {
  EXPECT_EQ(descriptor_finding({"", ""}).verdict, Verdict::ok);
  const Finding f = descriptor_finding({"", "cuMemMap of 2 MiB: CUDA_ERROR_X"});
  EXPECT_EQ(f.verdict, Verdict::no);
  EXPECT_EQ(f.value, "GPU 1: cuMemMap of 2 MiB: CUDA_ERROR_X");
  EXPECT_FALSE(f.action.empty());
  EXPECT_EQ(judge_cuda({{"GPU", "GPU 0", Verdict::ok, "", "", ""}, f}, true).value, "not usable");
}

TEST(Doctor, GlobalTimer) {
  EXPECT_EQ(timer_finding({32, 32}).value, "ticks every 32 ns");
  EXPECT_EQ(timer_finding({32, 32}).verdict, Verdict::ok);
  const Finding coarse = timer_finding({32, 1'048'576});
  EXPECT_EQ(coarse.value, "ticks every 32 ns on GPU 0, 1048576 ns on GPU 1");
  EXPECT_EQ(coarse.verdict, Verdict::limited);
  EXPECT_FALSE(coarse.reason.empty());
  EXPECT_EQ(timer_finding({0}).verdict, Verdict::limited);  // the timer does not advance
}

TEST(Doctor, MemoryOfNormalMode) {
  NormalConfig config;
  config.hidden = 7168;
  config.num_experts = 256;
  config.topk = 8;
  config.max_tokens = 4096;
  for (const Backend backend : {Backend::cpu, Backend::cuda}) {
    const auto need = static_cast<uint64_t>(NormalExchange::memory_required(config, 4, backend).total());
    const uint64_t enough = backend == Backend::cuda ? need : 4 * need;  // a GPU has one rank, the host's memory serves all
    const Finding f = memory_finding(backend, 4, enough);
    EXPECT_NE(f.value.find(binary_size(static_cast<double>(need)) + " per rank"), std::string::npos) << f.value;
    EXPECT_NE(f.value.find("4 ranks"), std::string::npos) << f.value;
    EXPECT_TRUE(f.reason.empty()) << f.reason;
    EXPECT_FALSE(memory_finding(backend, 4, enough - 1).reason.empty());
    EXPECT_EQ(f.verdict, Verdict::note);
  }
}

TEST(Doctor, HeapFollowsDriverAndChoice) {
  GpuProbe p = hoppers(2);
  EXPECT_EQ(named(gpu_findings(p, "ipc"), "symmetric heap").verdict, Verdict::limited);
  EXPECT_EQ(named(gpu_findings(p, "fast"), "symmetric heap").verdict, Verdict::no);
  p.gpus[1].file_descriptors = false;
  EXPECT_EQ(named(gpu_findings(p, ""), "symmetric heap").verdict, Verdict::limited);
  EXPECT_EQ(named(gpu_findings(p, "vmm"), "symmetric heap").verdict, Verdict::no);
  p.gpus[0].host_register = false;
  EXPECT_EQ(named(gpu_findings(p, ""), "registered host memory").verdict, Verdict::no);
  EXPECT_EQ(judge_cuda(gpu_findings(p, ""), true).value, "not usable");
}

TEST(Doctor, AnUnknownKindOfHeapIsWrongWithoutGpusToo) {
  for (const size_t gpus : {size_t{0}, size_t{2}}) {
    GpuProbe p = hoppers(gpus);
    p.driver = gpus > 0;
    const auto found = gpu_findings(p, "foo");
    EXPECT_EQ(named(found, "symmetric heap").verdict, Verdict::no);
    EXPECT_EQ(named(found, "symmetric heap").value, "SWITCHYARD_CUDA_HEAP=foo");
  }
}

/// Returns doctor's finding about the rank that these variables assign to a process.
Finding rank_with(const std::vector<std::pair<const char*, const char*>>& variables) {
  for (const auto& [name, value] : variables) setenv(name, value, 1);
  const Finding f = named(check_environment(), "rank of a group");
  for (const auto& [name, value] : variables) unsetenv(name);
  return f;
}

TEST(Doctor, JudgesLauncherVariables) {
  EXPECT_EQ(rank_with({}).verdict, Verdict::note);
  const Finding good = rank_with({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "here"}, {"MASTER_PORT", "29500"}});
  EXPECT_EQ(good.verdict, Verdict::ok);
  EXPECT_EQ(good.value.rfind("rank 1 of 2, meeting at unix:", 0), 0u) << good.value;
  const Finding own = rank_with({{"SWITCHYARD_RANK", "0"}, {"SWITCHYARD_WORLD_SIZE", "1"}});
  EXPECT_EQ(own.verdict, Verdict::ok);
  EXPECT_EQ(own.value, "rank 0 of 1");
  const std::pair<std::vector<std::pair<const char*, const char*>>, const char*> bad[] = {
      {{{"RANK", "1"}}, "RANK = \"1\", WORLD_SIZE not set"},
      {{{"OMPI_COMM_WORLD_RANK", "2"}}, "OMPI_COMM_WORLD_SIZE not set"},
      {{{"SWITCHYARD_RANK", "3"}}, "SWITCHYARD_WORLD_SIZE is not: set both"},
      {{{"RANK", "x"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "5"}}, "RANK = \"x\": must be an integer"},
  };
  for (const auto& [variables, why] : bad) {
    const Finding f = rank_with(variables);
    EXPECT_EQ(f.verdict, Verdict::limited) << why;
    EXPECT_NE(f.reason.find(why), std::string::npos) << f.reason;
    EXPECT_FALSE(f.action.empty());
  }
}

TEST(Doctor, ShowsNoTokenAndWhetherThereIsOne) {
  for (const char* token : {"secret", ""}) {
    setenv("SWITCHYARD_JOB_TOKEN", token, 1);
    EXPECT_EQ(named(check_environment(), "SWITCHYARD_JOB_TOKEN").value, *token != '\0' ? "(set, not shown)" : "");
    unsetenv("SWITCHYARD_JOB_TOKEN");
  }
}

TEST(Doctor, UnknownVariablesOfItsOwnAreProbablySlips) {
  const auto of = [](const char* name) {
    setenv(name, "x", 1);
    const Finding f = named(check_environment(), name);
    unsetenv(name);
    return f;
  };
  EXPECT_EQ(of("SWITCHYARD_TUNNING").verdict, Verdict::limited);
  EXPECT_EQ(of("SWITCHYARD_TUNNING").action, "did you mean SWITCHYARD_TUNING?");
  EXPECT_EQ(of("SWITCHYARD_QQQ").verdict, Verdict::limited);
  EXPECT_NE(of("SWITCHYARD_QQQ").action.find("SWITCHYARD_JOB_TOKEN"), std::string::npos);
  EXPECT_EQ(of("SWITCHYARD_VLM").action, "did you mean SWITCHYARD_VLLM?");
  for (const char* known : {"SWITCHYARD_STORE", "SWITCHYARD_DATA_DIR", "SWITCHYARD_HOST", "SWITCHYARD_VLLM",
                            "SWITCHYARD_DEEP_EP", "SWITCHYARD_WERROR", "SWITCHYARD_TEST_DEADLINE_S"})
    EXPECT_EQ(of(known).verdict, Verdict::note) << known;
}

TEST(Doctor, WithoutGpusItSaysWhyAndWhatToDo) {
  GpuProbe none;
  none.problem = "libcuda.so.1 was not found";
  for (const bool in_build : {true, false}) {
    const auto found = gpu_findings(none, "");
    ASSERT_EQ(found.size(), 1u);
    EXPECT_EQ(found[0].verdict, Verdict::note);
    EXPECT_NE(found[0].value.find("libcuda.so.1"), std::string::npos);
    EXPECT_FALSE(found[0].action.empty());
    const Finding cuda = judge_cuda(found, in_build);
    EXPECT_EQ(cuda.verdict, Verdict::note);
    EXPECT_FALSE(cuda.reason.empty());
  }
  GpuProbe other = hoppers(1);
  other.gpus[0].compute_major = 8;
  EXPECT_EQ(named(gpu_findings(other, ""), "GPU 0").verdict, Verdict::limited);
  GpuProbe old = hoppers(1);
  old.cuda_version = 12040;
  EXPECT_EQ(named(gpu_findings(old, ""), "driver").verdict, Verdict::limited);
}

}  // namespace
}  // namespace switchyard::tool

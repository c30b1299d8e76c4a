// SPDX-License-Identifier: Apache-2.0
// Well-formed routing files: every readable form, the output of the writers, and the recording in data/.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "switchyard/routing.hpp"
#include "unit/routing/routing_file_images.hpp"

namespace switchyard {
namespace {

namespace fs = std::filesystem;
using images::bytes_of;
using images::entry;
using images::metadata;
using images::npy;
using images::npy_dict;
using images::object;
using images::safetensors;
using images::span_of;
using Ids = std::vector<int32_t>;
using Floats = std::vector<float>;

/// A temporary folder that is removed when the test ends.
class RoutingFiles : public testing::Test {
 protected:
  void SetUp() override {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = fs::temp_directory_path() / ("switchyard_" + std::string(test->name()) + "_" + std::to_string(::getpid()));
    fs::create_directory(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string put(const std::string& name, const std::string& content) const {
    std::ofstream(path(name), std::ios::binary) << content;
    return path(name);
  }
  static std::string content(const std::string& file) {
    std::ifstream stream(file, std::ios::binary);
    return {std::istreambuf_iterator<char>(stream), {}};
  }
  std::set<std::string> names() const {
    std::set<std::string> found;
    for (const auto& e : fs::directory_iterator(folder_)) found.insert(e.path().filename().string());
    return found;
  }

  fs::path folder_;
};

Routing random_routing(int rank, int64_t tokens, int experts = 64, int topk = 4) {
  GeneratorSpec spec;
  spec.num_experts = experts;
  spec.topk = topk;
  spec.world = 8;
  spec.drop_fraction = 0.1;
  return generate(spec, rank, tokens);
}

void expect_equal(const Routing& a, const Routing& b) {
  EXPECT_EQ(a.num_experts, b.num_experts);
  EXPECT_EQ(a.topk, b.topk);
  EXPECT_EQ(a.num_tokens, b.num_tokens);
  EXPECT_EQ(a.topk_ids, b.topk_ids);
  EXPECT_EQ(a.topk_weights, b.topk_weights);
}

TEST_F(RoutingFiles, SafetensorsRoundTrip) {
  std::vector<RecordedRouting> recording;
  for (const int layer : {60, 3}) {
    for (int rank = 2; rank >= 0; --rank)
      recording.push_back({layer, rank, random_routing(rank, 100 * rank, 64, layer == 3 ? 4 : 7)});
  }
  for (RecordedRouting& part : recording) {
    if (part.layer == 60) part.routing.topk_weights.clear();
  }
  const std::string file = path("a.safetensors");
  write_safetensors(file, recording, {{"model", "Größe \"x\"\n"}, {"num_experts", "overwritten"}});
  EXPECT_EQ(names(), (std::set<std::string>{"a.safetensors"}));
  EXPECT_EQ(content(file).size() % 8, 0u);

  const RoutingFile read = RoutingFile::open(file);
  EXPECT_EQ(read.layers(), (std::vector<int>{3, 60}));
  EXPECT_EQ(read.num_experts(), 64);
  EXPECT_EQ(read.metadata(), (std::map<std::string, std::string>{{"model", "Größe \"x\"\n"}, {"num_experts", "64"}}));
  for (const RecordedRouting& part : recording) {
    EXPECT_EQ(read.ranks(part.layer), 3);
    EXPECT_EQ(read.topk(part.layer), part.layer == 3 ? 4 : 7);
    EXPECT_EQ(read.has_weights(part.layer), part.layer == 3);
    EXPECT_EQ(read.num_tokens(part.layer, part.rank), 100 * part.rank);
    expect_equal(read.read(part.layer, part.rank), part.routing);
    expect_equal(read.read(part.layer, part.rank, 64), part.routing);
  }
  const std::string bytes = content(file);
  expect_equal(RoutingFile::parse(span_of(bytes), "image").read(3, 2), recording[3].routing);
}

TEST_F(RoutingFiles, WrittenSafetensorsFollowTheFormat) {
  // The file is read with only a JSON library and arithmetic, which is all that another reader of the format would rely on.
  Routing routing = random_routing(0, 5);
  write_safetensors(path("a.safetensors"), std::vector<RecordedRouting>{{kNoLayer, 0, routing}});
  const std::string bytes = content(path("a.safetensors"));
  uint64_t length;
  std::memcpy(&length, bytes.data(), 8);
  const auto header = nlohmann::json::parse(bytes.substr(8, length));
  const auto& ids = header.at("rank0.topk_ids");
  const auto& weights = header.at("rank0.topk_weights");
  EXPECT_EQ(ids.at("dtype"), "I32");
  EXPECT_EQ(weights.at("dtype"), "F32");
  EXPECT_EQ(ids.at("shape"), (std::vector<int>{5, 4}));
  EXPECT_EQ(ids.at("data_offsets"), (std::vector<int>{0, 80}));
  EXPECT_EQ(weights.at("data_offsets"), (std::vector<int>{80, 160}));
  EXPECT_EQ(bytes.size(), 8 + length + 160);
  EXPECT_EQ(bytes.substr(8 + length), bytes_of(routing.topk_ids) + bytes_of(routing.topk_weights));
}

TEST_F(RoutingFiles, NpyRoundTrip) {
  const Routing routing = random_routing(0, 33);
  write_npy(path("my.topk_ids.npy"), std::vector<Routing>{routing});
  EXPECT_EQ(names(), (std::set<std::string>{"my.topk_ids.npy", "my.topk_weights.npy"}));
  const RoutingFile one = RoutingFile::open(path("my.topk_ids.npy"));
  EXPECT_EQ(one.layers(), (std::vector<int>{kNoLayer}));
  EXPECT_EQ(one.ranks(kNoLayer), 1);
  EXPECT_EQ(one.num_experts(), 0);
  expect_equal(one.read(kNoLayer, 0, 64), routing);

  const std::vector<Routing> ranks = {random_routing(0, 20), random_routing(1, 20), random_routing(2, 20)};
  write_npy(path("topk_ids.npy"), ranks);
  const RoutingFile three = RoutingFile::open(path("topk_ids.npy"));
  ASSERT_EQ(three.ranks(kNoLayer), 3);
  for (int r = 0; r < 3; ++r) expect_equal(three.read(kNoLayer, r, 64), ranks[static_cast<size_t>(r)]);

  Routing plain = routing;
  plain.topk_weights.clear();
  write_npy(path("plain.npy"), std::vector<Routing>{plain});
  expect_equal(RoutingFile::open(path("plain.npy")).read(kNoLayer, 0, 64), plain);
  // The first bytes are those that numpy 2 writes.
  EXPECT_EQ(content(path("plain.npy")).substr(0, 128),
            npy("{'descr': '<i4', 'fortran_order': False, 'shape': (33, 4), }" + std::string(57, ' ') + "\n", ""));
}

TEST_F(RoutingFiles, FolderOfNpy) {
  const auto file = [&](const std::string& name, const std::string& descr, const std::string& data) {
    put(name + ".npy", npy(npy_dict(descr, "(2, 3)"), data));
  };
  file("layer3.rank0.topk_ids", "<i8", bytes_of(std::vector<int64_t>{0, 1, 2, 3, 4, 5}));
  file("layer3.rank1.topk_ids", "<i4", bytes_of(Ids{9, 8, 7, 6, 5, -1}));
  file("layer3.rank0.topk_weights", "<f4", bytes_of(Floats{1, 2, 3, 4, 5, 6}));
  file("layer3.rank1.topk_weights", "<f2", bytes_of(std::vector<uint16_t>{0x3C00, 0x4000, 0x3800, 0xC000, 0, 0x0001}));
  file("something_else", "<i4", "not even an array");
  put("notes.txt", "ignored");
  const RoutingFile read = RoutingFile::open(folder_.string());
  EXPECT_EQ(read.layers(), (std::vector<int>{3}));
  expect_equal(read.read(3, 0, 10), {10, 3, 2, {0, 1, 2, 3, 4, 5}, {1, 2, 3, 4, 5, 6}});
  expect_equal(read.read(3, 1, 10), {10, 3, 2, {9, 8, 7, 6, 5, -1}, {1, 2, 0.5f, -2, 0, 0x1p-24f}});
}

Routing parse_one(const std::string& image, int experts, int rank = 0) {
  const RoutingFile file = RoutingFile::parse(span_of(image), "image");
  return file.read(file.layers().front(), rank, experts);
}

TEST(RoutingImages, AllTypesAndNames) {
  const std::string ids =
      bytes_of(std::vector<int64_t>{5, -1, int64_t{1} << 32, (int64_t{1} << 32) + 5, -(int64_t{1} << 40), 256});
  const std::string bf16 = bytes_of(std::vector<uint16_t>{0x3F80, 0x4000, 0x3F00, 0xC000, 0x0001, 0x7F7F});
  const Routing routing =
      parse_one(safetensors(object({entry("topk_weights", "BF16", "[3,2]", 48, 60), entry("topk_ids", "I64", "[3,2]", 0, 48)}),
                            ids + bf16),
                300);
  EXPECT_EQ(routing.topk_ids, (Ids{5, -1, -1, -1, -1, 256}));
  EXPECT_EQ(routing.topk_weights, (Floats{1, 2, 0.5f, -2, 0x1p-133f, 0x1.FEp127f}));

  // A layer has one tensor for several ranks. The file also has other tensors of known and unknown types, and blanks and
  // escapes in its header.
  const std::string three = bytes_of(Ids{0, 1, 2, 3, 4, 5}), other = std::string(5, 'x');
  const std::string header = " { \"__metadata__\" : {\"num_experts\":\"6\", \"a\\u00e9\":\"b\"} ,\n" +
                             entry("layer12.topk_ids", "I32", "[3, 1, 2]", 5, 29) + "," + entry("foo", "U8", "[2]", 0, 2) +
                             "," + entry("bar", "F4_NEW", "[7]", 2, 5) + "}   ";
  const std::string image = safetensors(header, other + three);
  const RoutingFile file = RoutingFile::parse(span_of(image), "image");
  EXPECT_EQ(file.layers(), (std::vector<int>{12}));
  EXPECT_EQ(file.ranks(12), 3);
  EXPECT_EQ(file.metadata().at("a\xC3\xA9"), "b");
  expect_equal(file.read(12, 1), {6, 2, 1, {2, 3}, {}});
  expect_equal(file.read(12, 2, 9), {9, 2, 1, {4, 5}, {}});
}

/// Expects ids of one type to be read correctly from both kinds of files. A value that does not fit into an int32 is not an
/// expert.
template <class T>
void expect_ids(const std::string& dtype, const std::string& descr, const std::vector<T>& given, const Ids& expected) {
  const std::string data = bytes_of(given), count = std::to_string(given.size());
  const size_t bytes = data.size();
  const std::string header = object({entry("topk_ids", dtype, "[" + count + ",1]", 0, bytes)});
  EXPECT_EQ(parse_one(safetensors(header, data), 1 << 30).topk_ids, expected) << dtype;
  EXPECT_EQ(parse_one(npy(npy_dict(descr, "(" + count + ", 1)"), data), 1 << 30).topk_ids, expected) << descr;
  // Reads the second rank; offsets are counted in elements of this size.
  EXPECT_EQ(parse_one(npy(npy_dict(descr, "(" + count + ", 1, 1)"), data), 1 << 30, 1).topk_ids, Ids{expected[1]}) << descr;
}

/// Forms accepted by the format's own library: unknown fields in entries, null metadata, and tensors with any number of
/// dimensions.
TEST(RoutingImages, WhatTheReferenceLibraryLoads) {
  const std::string ids =
      "\"topk_ids\":{\"dtype\":\"I32\",\"note\":{\"a\":[1,{\"b\":null}],\"c\":\"d\"},\"shape\":[2,1],"
      "\"more\":[[],1.5,-1,true],\"data_offsets\":[0,8],\"none\":null}";
  const std::string other = "\"other\":{\"dtype\":\"I32\",\"shape\":[1,1,1,1,1,1,1,1,1,2],\"data_offsets\":[8,16]}";
  const std::string image =
      safetensors("{\"__metadata__\":null," + ids + "," + other + "}", bytes_of(std::vector<int32_t>{5, 3, 7, 7}));
  const RoutingFile file = RoutingFile::parse(span_of(image), "file");
  EXPECT_TRUE(file.metadata().empty());
  EXPECT_EQ(file.read(kNoLayer, 0, 9).topk_ids, (std::vector<int32_t>{5, 3}));
}

TEST(RoutingImages, IdsOfAllIntegerTypes) {
  expect_ids<int8_t>("I8", "|i1", {0, 127, -1, -128}, {0, 127, -1, -128});
  expect_ids<uint8_t>("U8", "|u1", {0, 127, 128, 255}, {0, 127, 128, 255});
  expect_ids<int16_t>("I16", "<i2", {0, 32767, -1, -32768}, {0, 32767, -1, -32768});
  expect_ids<uint16_t>("U16", "<u2", {0, 32768, 65535}, {0, 32768, 65535});
  expect_ids<int32_t>("I32", "<i4", {0, 7, -1, INT32_MIN, INT32_MAX}, {0, 7, -1, INT32_MIN, INT32_MAX});
  expect_ids<uint32_t>("U32", "<u4", {0, 7, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF}, {0, 7, INT32_MAX, -1, -1});
  expect_ids<int64_t>("I64", "<i8", {0, 7, -1, (int64_t{1} << 32) + 5, INT64_MIN, INT64_MAX}, {0, 7, -1, -1, -1, -1});
  expect_ids<uint64_t>("U64", "<u8", {0, 7, (uint64_t{1} << 32) + 5, UINT64_MAX, uint64_t{1} << 63}, {0, 7, -1, -1, -1});
}

TEST(RoutingImages, NpyVersionsAndSpellings) {
  const std::string data = bytes_of(Ids{1, 2, 3, 4});
  const Routing expected{8, 2, 2, {1, 2, 3, 4}, {}};
  for (const int major : {1, 2, 3}) expect_equal(parse_one(npy(npy_dict("<i4", "(2, 2)"), data, major), 8), expected);
  for (const char* header :
       {"{\"shape\":(2,2),\"descr\":\"<i4\",\"fortran_order\":False}", "{'descr':'<i4','fortran_order':False,'shape':(2L,2L)}",
        " { 'fortran_order' : False , 'shape' : ( 2 , 2 , ) , 'descr' : '<i4' , } \n"}) {
    expect_equal(parse_one(npy(header, data), 8), expected);
  }
  expect_equal(parse_one(npy(npy_dict("<i4", "(2, 1, 2)"), data), 8, 1), {8, 2, 1, {3, 4}, {}});
}

TEST(RoutingImages, NoTokens) {
  expect_equal(parse_one(npy(npy_dict("<i4", "(0, 8)"), ""), 8), {8, 8, 0, {}, {}});
  expect_equal(parse_one(safetensors(object({entry("rank0.topk_ids", "I64", "[0,8]", 0, 0)}), ""), 8), {8, 8, 0, {}, {}});
  // A rank without tokens needs no weights, even if other ranks have weights.
  const std::string image =
      safetensors(object({entry("rank0.topk_ids", "I32", "[0,1]", 0, 0), entry("rank1.topk_ids", "I32", "[1,1]", 0, 4),
                          entry("rank1.topk_weights", "F32", "[1,1]", 4, 8)}),
                  bytes_of(Ids{3}) + bytes_of(Floats{0.5f}));
  const RoutingFile file = RoutingFile::parse(span_of(image), "image");
  EXPECT_TRUE(file.has_weights(kNoLayer));
  expect_equal(file.read(kNoLayer, 0, 8), {8, 1, 0, {}, {}});
  expect_equal(file.read(kNoLayer, 1, 8), {8, 1, 1, {3}, {0.5f}});
}

TEST(RoutingImages, LargeTensorsAreReadInPieces) {
  std::vector<int64_t> ids(300000);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i * 7919 % 1000);
  const Routing routing = parse_one(npy(npy_dict("<i8", "(100000, 3)"), bytes_of(ids)), 1000);
  ASSERT_EQ(routing.topk_ids.size(), ids.size());
  EXPECT_TRUE(std::equal(ids.begin(), ids.end(), routing.topk_ids.begin()));
}

TEST(RoutingImages, SharesForOtherGroupSizes) {
  // Two ranks with 5 and 3 tokens and K = 1; the ids are 0..4 and 10..12, and the weights are id / 2.
  const Floats w = {0, 0.5f, 1, 1.5f, 2, 5, 5.5f, 6};
  const std::string image =
      safetensors(object({metadata("num_experts", "16"), entry("rank0.topk_ids", "I32", "[5,1]", 0, 20),
                          entry("rank0.topk_weights", "F32", "[5,1]", 32, 52), entry("rank1.topk_ids", "I32", "[3,1]", 20, 32),
                          entry("rank1.topk_weights", "F32", "[3,1]", 52, 64)}),
                  bytes_of(Ids{0, 1, 2, 3, 4, 10, 11, 12}) + bytes_of(w));
  const RoutingFile file = RoutingFile::parse(span_of(image), "image");
  EXPECT_EQ(file.read_share(kNoLayer, 0, 2).topk_ids, (Ids{0, 1}));
  EXPECT_EQ(file.read_share(kNoLayer, 1, 2).topk_ids, (Ids{10, 11}));
  EXPECT_EQ(file.read_share(kNoLayer, 2, 2).topk_ids, (Ids{2, 3}));
  EXPECT_EQ(file.read_share(kNoLayer, 3, 2).topk_ids, (Ids{12, 10}));
  EXPECT_EQ(file.read_share(kNoLayer, 4, 2).topk_ids, (Ids{4, 0}));
  EXPECT_EQ(file.read_share(kNoLayer, 5, 7).topk_ids, (Ids{12, 10, 11, 12, 10, 11, 12}));
  EXPECT_EQ(file.read_share(kNoLayer, 4, 12).topk_ids, (Ids{4, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0}));
  for (int rank = 0; rank < 8; ++rank) {
    const Routing share = file.read_share(kNoLayer, rank, 12);
    for (size_t i = 0; i < 12; ++i) ASSERT_EQ(share.topk_weights[i], static_cast<float>(share.topk_ids[i]) / 2);
  }
  EXPECT_EQ(file.read_share(kNoLayer, 7, 0).num_tokens, 0);
  EXPECT_EQ(file.read_share(kNoLayer, 65535, 3).topk_ids.size(), 3u);
}

template <class Function>
void expect_error(ErrorCode code, const std::string& text, Function function) {
  try {
    function();
    ADD_FAILURE() << "no error; expected: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code);
    EXPECT_EQ(std::string(error.what()), text);
  }
}

template <class Function>
void expect_refused_call(const std::string& text, Function function) {
  expect_error(ErrorCode::invalid_argument, text, function);
}

TEST(RoutingImages, RefusesWrongArguments) {
  const std::string image = safetensors(object({metadata("num_experts", "16"), entry("layer4.topk_ids", "I32", "[2,0,3]", 0, 0),
                                                entry("layer9.topk_ids", "I32", "[1,3]", 0, 12)}),
                                        bytes_of(Ids{1, 2, 3}));
  const RoutingFile file = RoutingFile::parse(span_of(image), "image");
  expect_refused_call("RoutingFile::ranks: layer is 3; allowed: 4, 9 (image)", [&] { file.ranks(3); });
  expect_refused_call("RoutingFile::read: rank is 2; allowed: 0 to 1", [&] { file.read(4, 2); });
  expect_refused_call("RoutingFile::read: rank is -1; allowed: 0 to 1", [&] { file.read(4, -1); });
  expect_refused_call("RoutingFile::read: num_experts is 15; allowed: 0, or 16 and above (image was recorded with 16)",
                      [&] { file.read(9, 0, 15); });
  expect_refused_call("RoutingFile::read_share: tokens is 1; allowed: 0, because recorded rank 1 has no tokens (image)",
                      [&] { file.read_share(4, 3, 1); });
  expect_refused_call("RoutingFile::read_share: tokens is -1; allowed: 0 to 46912496118442",
                      [&] { file.read_share(9, 0, -1); });
  expect_refused_call("RoutingFile::read_share: rank is 65536; allowed: 0 to 65535", [&] { file.read_share(9, 65536, 1); });
  const std::string plain = npy(npy_dict("<i4", "(1, 1)"), "abcd");
  const std::string unknown = "; allowed: 1 and above (image does not tell it)";
  expect_refused_call("RoutingFile::read: num_experts is 0" + unknown, [&] { parse_one(plain, 0); });
  expect_refused_call("RoutingFile::read: num_experts is -4" + unknown, [&] { parse_one(plain, -4); });
}

TEST_F(RoutingFiles, SafetensorsWriterRefusesWrongArguments) {
  const Routing good = random_routing(0, 2), fewer_experts = random_routing(1, 2, 32);
  Routing plain = good, broken = good;
  plain.topk_weights.clear();
  broken.topk_ids.pop_back();
  const auto refused = [&](const std::string& text, const std::vector<RecordedRouting>& parts, const std::string& value = "") {
    expect_refused_call(text, [&] { write_safetensors(path("x.safetensors"), parts, {{"key", value}}); });
  };
  refused("write_safetensors: recording is layer 1 rank 0 twice; allowed: each once", {{1, 0, good}, {1, 0, good}});
  refused("write_safetensors: num_experts of layer 1 rank 1 is 32; allowed: 64, as in the first part",
          {{1, 0, good}, {1, 1, fewer_experts}});
  refused("write_safetensors: weights of layer 1 rank 1 is empty; allowed: weights on all ranks of a layer or on none",
          {{1, 0, good}, {1, 1, plain}});
  refused("write_safetensors: layer is -2; allowed: -1 to 999999", {{-2, 0, good}});
  refused("write_safetensors: rank is 1000000; allowed: 0 to 999999", {{1, 1000000, good}});
  refused("routing: topk_ids.size() is 7; allowed: 8, tokens * topk", {{1, 0, broken}});
  refused("write_safetensors: metadata is not UTF-8; allowed: UTF-8 text", {{1, 0, good}}, "\xFF");
  const std::string lost = path("no/such/folder");
  expect_error(ErrorCode::io, lost + ": cannot create: No such file or directory", [&] {
    write_safetensors(lost, std::vector<RecordedRouting>{{1, 0, good}});
  });
  EXPECT_TRUE(names().empty());
}

TEST_F(RoutingFiles, NpyWriterRefusesWrongArguments) {
  const Routing good = random_routing(0, 2), longer = random_routing(1, 3);
  Routing plain = good;
  plain.topk_weights.clear();
  const auto refused = [&](const std::string& text, const std::string& name, const std::vector<Routing>& ranks) {
    expect_refused_call(text, [&] { write_npy(path(name), ranks); });
  };
  refused("write_npy: ranks.size() is 0; allowed: 1 and above", "a.npy", {});
  refused(
      "write_npy: path is '" + path("a.npy") + "'; allowed: file names with 'topk_ids', so that the weights can be named alike",
      "a.npy", {good});
  refused("write_npy: weights is empty on some ranks; allowed: weights on all ranks or on none", "topk_ids.npy", {good, plain});
  refused(
      "write_npy: ranks is of different shape; allowed: ranks with equal tokens, topk and num_experts; write_safetensors takes "
      "any",
      "topk_ids.npy", {good, longer});
  const std::string folder = path("topk_ids.npy");
  fs::create_directory(folder);
  expect_error(ErrorCode::io, folder + ": cannot rename to: Is a directory",
               [&] { write_npy(folder, std::vector<Routing>{plain}); });
  EXPECT_EQ(names(), (std::set<std::string>{"topk_ids.npy"}));  // no partially written file
}

// The demo's default routing. data/routing/README.md lists these figures.
TEST(RecordedLayer, HasTheDocumentedStatistics) {
  const RoutingFile file = RoutingFile::open(SWITCHYARD_SOURCE_DIR "/data/routing/moe_lm_e256_k8_layer3.safetensors");
  ASSERT_EQ(file.layers(), (std::vector<int>{3}));
  ASSERT_EQ(file.ranks(3), 8);
  EXPECT_EQ(file.num_experts(), 256);
  EXPECT_EQ(file.topk(3), 8);
  EXPECT_TRUE(file.has_weights(3));
  std::vector<int64_t> load(256);
  std::vector<std::vector<int64_t>> traffic(8, std::vector<int64_t>(8));
  double ranks8 = 0, ranks4 = 0;
  for (int r = 0; r < 8; ++r) {
    const Routing routing = file.read(3, r);
    ASSERT_EQ(routing.num_tokens, 4096);
    check_routing(routing);
    ranks8 += mean_ranks_per_token(routing, 8) / 8;
    ranks4 += mean_ranks_per_token(routing, 4) / 8;
    for (size_t t = 0; t < 4096; ++t) {
      std::set<int32_t> ids, groups;
      double sum = 0;
      for (size_t i = 8 * t; i < 8 * t + 8; ++i) {
        ASSERT_TRUE(routing.topk_ids[i] >= 0 && routing.topk_ids[i] < 256);
        ++load[static_cast<size_t>(routing.topk_ids[i])];
        ++traffic[static_cast<size_t>(r)][static_cast<size_t>(routing.topk_ids[i] / 32)];
        ids.insert(routing.topk_ids[i]);
        groups.insert(routing.topk_ids[i] / 32);
        sum += routing.topk_weights[i];
      }
      ASSERT_EQ(ids.size(), 8u);
      ASSERT_LE(groups.size(), 4u);
      ASSERT_NEAR(sum, 2.5, 1e-5);
    }
  }
  const double mean = 8.0 * 8 * 4096 / 256;
  EXPECT_NEAR(static_cast<double>(*std::max_element(load.begin(), load.end())) / mean, 4.758, 0.001);
  EXPECT_NEAR(static_cast<double>(*std::min_element(load.begin(), load.end())) / mean, 0.059, 0.001);
  EXPECT_NEAR(ranks8, 3.945, 0.001);
  EXPECT_NEAR(ranks4, 3.137, 0.001);
  int64_t min = 1 << 30, max = 0;
  for (size_t r = 0; r < 8; ++r) {
    for (size_t d = 0; d < 8; ++d) {
      if (d == r) continue;
      min = std::min(min, traffic[r][d]);
      max = std::max(max, traffic[r][d]);
    }
  }
  EXPECT_EQ(min, 1172);
  EXPECT_EQ(max, 6747);
}

}  // namespace
}  // namespace switchyard

// SPDX-License-Identifier: Apache-2.0
// Malformed routing files: each kind of damage, and the error text, which names the file, the tensor, and the expected and
// found values.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "switchyard/routing.hpp"
#include "unit/routing/routing_file_images.hpp"

namespace switchyard {
namespace {

namespace fs = std::filesystem;
using images::entry;
using images::little_endian;
using images::metadata;
using images::npy;
using images::npy_dict;
using images::object;
using images::safetensors;
using images::span_of;

void expect_malformed(const std::string& image, const std::string& text) {
  try {
    RoutingFile::parse(span_of(image), "file");
    ADD_FAILURE() << "no error; expected: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::io);
    EXPECT_EQ(std::string(error.what()), "file: " + text);
  }
}

/// A safetensors file with the given header and `bytes` bytes of data.
std::string with_header(const std::string& header, size_t bytes) { return safetensors(header, std::string(bytes, '\0')); }

/// The same, with a header that has a single entry, `rank0.topk_ids`, with the given value.
std::string with_ids(const std::string& value, size_t bytes = 8) {
  return with_header("{\"rank0.topk_ids\":" + value + "}", bytes);
}

std::string ids_entry(const std::string& dtype, const std::string& shape, size_t bytes) {
  return object({entry("rank0.topk_ids", dtype, shape, 0, bytes)});
}

TEST(MalformedSafetensors, Size) {
  expect_malformed("", "file: expected a safetensors or .npy file of at least 10 bytes, found 0 bytes");
  expect_malformed("123456789", "file: expected a safetensors or .npy file of at least 10 bytes, found 9 bytes");
  const std::string in_first_8 = "header: expected a safetensors header length of 2 to 2 in the first 8 bytes, found ";
  expect_malformed(little_endian(3, 8) + "{}", in_first_8 + "3");
  expect_malformed(little_endian(1, 8) + "{}", in_first_8 + "1");
  expect_malformed(little_endian(~uint64_t{0}, 8) + "{}", in_first_8 + "18446744073709551615");
  expect_malformed(little_endian(~uint64_t{0} - 7, 8) + "{}", in_first_8 + "18446744073709551608");
}

TEST(MalformedSafetensors, Json) {
  const auto at = [](const std::string& header, const std::string& text) { expect_malformed(with_header(header, 0), text); };
  at("[]", "header: expected a JSON object, found an array");
  at("12", "header: expected a JSON object, found 12");
  at("-1", "header: expected a JSON object, found -1");
  at("null", "header: expected a JSON object, found null");
  at("\"x\"", "header: expected a JSON object, found 'x'");
  at("{}", "file: expected tensors named [layer{l}.][rank{r}.]topk_ids, found no tensors");
  at("{\"a\":3}", "tensor 'a': expected an object, found 3");
  at("{\"a\":{\"b\":3}}", "tensor 'a': expected an entry dtype, found none");
  at("{\"__metadata__\":[]}", "header entry __metadata__: expected an object, found an array");
  at("{\"__metadata__\":{\"a\":3}}", "header entry __metadata__: expected a text as value of 'a', found 3");
  at("{\"__metadata__\":{\"a\":{}}}", "header entry __metadata__: expected a text as value of 'a', found an object");
  at("{\"__metadata__\":{\"a\":\"\",\"a\":\"\"}}", "header entry __metadata__: expected different names, found 'a' twice");
  at("{\"__metadata__\":{},\"__metadata__\":{}}", "header entry __metadata__: expected one such entry, found two");
  try {
    const std::string image = with_header("{\"a\":}", 0);
    RoutingFile::parse(span_of(image), "file");
    ADD_FAILURE();
  } catch (const Error& error) {  // the rest is text of the JSON library
    EXPECT_EQ(std::string(error.what()).substr(0, 52), "file: header: expected JSON, found an error at byte ");
    EXPECT_NE(std::string(error.what()).find("unexpected '}'"), std::string::npos) << error.what();
  }
  for (const std::string& broken :
       {std::string("{\"a"), std::string("{} x"), std::string("{\"\xFF\":1}"), std::string("{\0}", 3)}) {
    const std::string image = with_header(broken, 0);
    EXPECT_THROW(RoutingFile::parse(span_of(image), "file"), Error) << broken;
  }
  // Deep nesting causes neither recursion nor allocation.
  at("{\"a\":" + std::string(100000, '[') + std::string(100000, ']') + "}", "tensor 'a': expected an object, found an array");
}

TEST(MalformedSafetensors, Entries) {
  const std::string name = "tensor 'rank0.topk_ids': expected ";
  const std::string offsets = ",\"data_offsets\":[0,8]}";
  expect_malformed(with_ids("{\"dtype\":\"I32\",\"shape\":[2,1]}"), name + "an entry data_offsets, found none");
  expect_malformed(with_ids("{\"dtype\":\"I32\"" + offsets), name + "an entry shape, found none");
  expect_malformed(with_ids("{\"shape\":[2,1]" + offsets), name + "an entry dtype, found none");
  expect_malformed(with_ids("{\"dtype\":\"I32\",\"dtype\":\"I32\"}"), name + "one entry dtype, found two");
  expect_malformed(with_ids("{\"dtype\":3}"), name + "a text as dtype, found 3");
  expect_malformed(with_ids("{\"dtype\":[\"I32\"]}"), name + "a text as dtype, found an array");
  expect_malformed(with_ids("{\"shape\":\"2,1\"}"), name + "non-negative integers as shape, found '2,1'");
  expect_malformed(with_ids("{\"shape\":[2,-1]}"), name + "non-negative integers as shape, found -1");
  expect_malformed(with_ids("{\"shape\":[2,1.5]}"), name + "non-negative integers as shape, found '1.5'");
  expect_malformed(with_ids("{\"shape\":[2,[1]]}"), name + "non-negative integers as shape, found an array");
  expect_malformed(with_ids("{\"shape\":[18446744073709551615]}"),
                   name + "non-negative integers as shape, found 18446744073709551615");
  expect_malformed(with_ids("{\"shape\":[99999999999999999999]}"),
                   name + "non-negative integers as shape, found '99999999999999999999'");
  expect_malformed(with_header(ids_entry("I32", "[2,1,1,1,1,1,1,1,1]", 8), 8),
                   name + "shape [T, K], found [2, 1, 1, 1, 1, 1, 1, 1, 1]");
  expect_malformed(with_ids("{\"data_offsets\":7}"), name + "non-negative integers as data_offsets, found 7");
  expect_malformed(with_ids("{\"dtype\":\"I32\",\"shape\":[2,1],\"data_offsets\":[8]}"),
                   name + "data_offsets [begin, end], found [8]");
  expect_malformed(with_ids("{\"dtype\":\"I32\",\"shape\":[2,1],\"data_offsets\":[8,0]}"),
                   name + "data_offsets [begin, end], found [8, 0]");
  const std::string one = entry("rank0.topk_ids", "I32", "[1,1]", 0, 4);
  expect_malformed(with_header(object({one, one}), 4), name + "one tensor of this name, found two");
}

TEST(MalformedSafetensors, DataSizes) {
  const std::string name = "tensor 'rank0.topk_ids': expected ";
  expect_malformed(with_header(ids_entry("I32", "[2,1]", 8), 7),
                   name + "data_offsets within the file's 7 bytes of data, found [0, 8]");
  expect_malformed(with_ids("{\"dtype\":\"I32\",\"shape\":[2,1],\"data_offsets\":[0,9223372036854775807]}"),
                   name + "data_offsets within the file's 8 bytes of data, found [0, 9223372036854775807]");
  expect_malformed(with_header(ids_entry("I32", "[2,2]", 8), 8), name + "16 bytes for I32 [2, 2], found 8 by its data_offsets");
  expect_malformed(with_header(ids_entry("I64", "[2,2]", 16), 16),
                   name + "32 bytes for I64 [2, 2], found 16 by its data_offsets");
  expect_malformed(with_header(ids_entry("I32", "[4611686018427387904,4]", 8), 8),
                   name + "more than 2^63 bytes for I32 [4611686018427387904, 4], found 8 by its data_offsets");
  // 2^62 * 4 elements of 4 bytes is 2^66 = 0 modulo 2^64: this must not be accepted as an empty tensor.
  expect_malformed(with_header(ids_entry("I32", "[4611686018427387904,4]", 0), 0),
                   name + "more than 2^63 bytes for I32 [4611686018427387904, 4], found 0 by its data_offsets");
  const std::string second = "tensor 'rank1.topk_ids': expected ";
  const auto two = [](size_t begin, size_t end) {
    return object({entry("rank0.topk_ids", "I32", "[2,1]", 0, 8), entry("rank1.topk_ids", "I32", "[2,1]", begin, end)});
  };
  expect_malformed(with_header(two(12, 20), 20),
                   second + "data from byte 8, after its predecessor, without gap or overlap, found byte 12");
  expect_malformed(with_header(two(4, 12), 12),
                   second + "data from byte 8, after its predecessor, without gap or overlap, found byte 4");
  expect_malformed(with_header(two(8, 16), 17), "file: expected 16 bytes of data, as the tensors need, found 17");
  // Other tensors are also checked: no part of a damaged file is trusted.
  expect_malformed(with_header(object({entry("other", "F64", "[3]", 0, 16)}), 16),
                   "tensor 'other': expected 24 bytes for F64 [3], found 16 by its data_offsets");
}

TEST(MalformedSafetensors, IdsAndWeights) {
  const std::string name = "tensor 'rank0.topk_ids': expected ";
  const std::string types = "integer ids (I8 to I64, U8 to U64; '|i1' to '<i8', '|u1' to '<u8' in .npy), found ";
  expect_malformed(with_header(ids_entry("F64", "[1,2]", 16), 16), name + types + "'F64'");
  expect_malformed(with_header(ids_entry("BOOL", "[1,2]", 2), 2), name + types + "'BOOL'");
  expect_malformed(with_header(ids_entry("I4", "[1,2]", 1), 1), name + types + "'I4'");
  expect_malformed(with_header(ids_entry("I32", "[2]", 8), 8), name + "shape [T, K], found [2]");
  expect_malformed(with_header(ids_entry("I32", "[]", 4), 4), name + "shape [T, K], found []");
  expect_malformed(with_header(ids_entry("I32", "[1,1,2]", 8), 8), name + "shape [T, K], found [1, 1, 2]");
  expect_malformed(with_header(ids_entry("I32", "[1,33]", 132), 132), name + "K, the last extent, of 1 to 32, found [1, 33]");
  expect_malformed(with_header(ids_entry("I32", "[9223372036854775807,0]", 0), 0),
                   name + "K, the last extent, of 1 to 32, found [9223372036854775807, 0]");
  expect_malformed(with_header(object({entry("topk_ids", "I32", "[1,1,1,2]", 0, 8)}), 8),
                   "tensor 'topk_ids': expected shape [T, K] or [R, T, K], found [1, 1, 1, 2]");
  expect_malformed(with_header(object({entry("topk_ids", "I32", "[0,4,2]", 0, 0)}), 0),
                   "tensor 'topk_ids': expected R, the first extent, of 1 to 65536, found [0, 4, 2]");
  expect_malformed(with_header(object({entry("topk_ids", "I32", "[1152921504606846976,0,2]", 0, 0)}), 0),
                   "tensor 'topk_ids': expected R, the first extent, of 1 to 65536, found [1152921504606846976, 0, 2]");

  const auto weights = [](const std::string& dtype, const std::string& shape, size_t bytes) {
    return with_header(
        object({entry("rank0.topk_ids", "I32", "[2,2]", 0, 16), entry("rank0.topk_weights", dtype, shape, 16, 16 + bytes)}),
        16 + bytes);
  };
  const std::string of_weights = "tensor 'rank0.topk_weights': expected ";
  expect_malformed(weights("F32", "[2,3]", 24), of_weights + "shape [2, 2] as its ids, found [2, 3]");
  expect_malformed(weights("F32", "[4]", 16), of_weights + "shape [2, 2] as its ids, found [4]");
  expect_malformed(weights("F64", "[2,2]", 32),
                   of_weights + "float32, float16 or bfloat16 weights (F32, F16, BF16; '<f4', '<f2' in .npy), found 'F64'");
  expect_malformed(weights("I32", "[2,2]", 16),
                   of_weights + "float32, float16 or bfloat16 weights (F32, F16, BF16; '<f4', '<f2' in .npy), found 'I32'");
  expect_malformed(with_header(object({entry("rank0.topk_weights", "F32", "[1,1]", 0, 4)}), 4),
                   of_weights + "a tensor of topk_ids beside it, found none");
}

TEST(MalformedSafetensors, WeightsMustBeFinite) {
  constexpr float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> weights(8, 1.0f);
  const auto read = [&](int rank) {  // two ranks in one tensor
    const std::string image =
        safetensors(object({entry("topk_ids", "I32", "[2,2,2]", 0, 32), entry("topk_weights", "F32", "[2,2,2]", 32, 64)}),
                    std::string(32, '\0') + images::bytes_of(weights));
    return RoutingFile::parse(span_of(image), "file").read(kNoLayer, rank, 4);
  };
  EXPECT_EQ(read(1).topk_weights, std::vector<float>(4, 1.0f));
  for (const auto& [value, found] : {std::pair(nan, "nan"), std::pair(infinity, "inf"), std::pair(-infinity, "-inf")}) {
    weights[5] = value;
    EXPECT_EQ(read(0).topk_weights.size(), 4u) << "the other rank's weights are fine";
    try {
      read(1);
      ADD_FAILURE() << found << " was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::io);
      EXPECT_EQ(std::string(error.what()),
                "file: tensor 'topk_weights': expected finite weights, found " + std::string(found) + " at [1, 0, 1]");
    }
  }
}

TEST(MalformedSafetensors, NamesAndRanks) {
  const auto tensors = [](std::vector<std::string> names, std::vector<std::string> shapes = {}) {
    std::vector<std::string> entries;
    for (size_t i = 0; i < names.size(); ++i) {
      const std::string shape = i < shapes.size() ? shapes[i] : "[1,2]";
      entries.push_back(entry(names[i], names[i].ends_with("weights") ? "F32" : "I32", shape, 8 * i, 8 * i + 8));
    }
    return with_header(object(entries), 8 * names.size());
  };
  const std::string wanted = "file: expected tensors named [layer{l}.][rank{r}.]topk_ids, found ";
  expect_malformed(
      tensors({"ids", "layer.rank0.topk_ids", "rank0topk_ids", "layer1.rank1234567.topk_ids", "rank0.layer0.topk_ids"}),
      wanted + "'ids', 'layer.rank0.topk_ids', 'layer1.rank1234567.topk_ids', 'rank0.layer0.topk_ids', 'rank0topk_ids'");
  expect_malformed(tensors({"a\\u0001\\u001b" + std::string(80, 'x')}),
                   wanted + "'a\\x01\\x1b" + std::string(57, 'x') + "...'");
  expect_malformed(tensors({"rank1.topk_ids"}),
                   "layer without number: expected ranks 0, 1, 2, ... without gaps, found rank 1 but no rank 0");
  expect_malformed(tensors({"layer7.rank0.topk_ids", "layer7.rank2.topk_ids"}),
                   "layer 7: expected ranks 0, 1, 2, ... without gaps, found rank 2 but no rank 1");
  expect_malformed(tensors({"layer7.rank0.topk_ids", "layer07.rank0.topk_ids"}),
                   "tensor 'layer7.rank0.topk_ids': expected one tensor of this layer, rank and kind, found two, differing in "
                   "leading zeros");
  expect_malformed(tensors({"topk_ids", "rank0.topk_ids"}),
                   "tensor 'topk_ids': expected either this tensor or tensors by rank in its layer, found both");
  expect_malformed(tensors({"rank0.topk_ids", "rank1.topk_ids"}, {"[1,2]", "[2,1]"}),
                   "tensor 'rank1.topk_ids': expected K 2 as on the layer's other ranks, found [2, 1]");
  expect_malformed(tensors({"rank0.topk_ids", "rank0.topk_weights", "rank1.topk_ids"}),
                   "tensor 'rank1.topk_ids': expected weights, as on the layer's other ranks, found none");
  expect_malformed(tensors({"rank0.topk_ids", "rank1.topk_ids", "rank1.topk_weights"}),
                   "tensor 'rank0.topk_ids': expected weights, as on the layer's other ranks, found none");
}

TEST(MalformedSafetensors, NumExperts) {
  for (const std::string value : {"", "x", "0", "-3", "256 ", "2147483648", "1e3"}) {
    expect_malformed(with_header(object({metadata("num_experts", value), entry("topk_ids", "I32", "[1,1]", 0, 4)}), 4),
                     "metadata entry num_experts: expected an integer of 1 to 2147483647, found '" + value + "'");
  }
}

TEST(MalformedNpy, Preamble) {
  expect_malformed(std::string("\x93NUMPY\x01\x00", 8), "file: expected a .npy file of at least 12 bytes, found 8 bytes");
  expect_malformed(npy(npy_dict("<i4", "(1, 1)"), "abcd", 4), "header: expected format version 1, 2 or 3, found 4.0");
  expect_malformed(npy(npy_dict("<i4", "(1, 1)"), "abcd", 0), "header: expected format version 1, 2 or 3, found 0.0");
  expect_malformed(std::string("\x93NUMPY\x01\x00\xFF\xFF{}", 12), "header: expected a length of at most 2, found 65535");
  expect_malformed(std::string("\x93NUMPY\x02\x00\xFF\xFF\xFF\xFF", 12),
                   "header: expected a length of at most 0, found 4294967295");
  expect_malformed(npy(std::string((1 << 20) + 1, ' '), "", 2), "header: expected a length of at most 1048576, found 1048577");
}

TEST(MalformedNpy, Header) {
  const auto at = [](const std::string& header, const std::string& text) {
    expect_malformed(npy(header, "abcd"), "header: expected " + text);
  };
  at("", "'{', found its end");
  at("  ", "'{', found its end");
  at("[1]", "'{', found '[1]'");
  at("{", "a quoted name or '}', found its end");
  at("{}", "an entry descr, found none");
  at("{'descr': '<i4'}", "an entry fortran_order, found none");
  at("{'descr': '<i4', 'fortran_order': False}", "an entry shape, found none");
  at("{'descr: 3}", "a closing quote, found ''descr: 3}'");
  at("{'descr' '<i4'}", "':', found ''<i4'}'");
  at("{'descr': 3}", "a quoted type as descr, found '3}'");
  at("{'descr': [('a', '<i4')]}", "descr of a plain number, found a structured type '[('a', '<i4')]}'");
  at("{'descr': '<i4', 'descr': '<i4'}", "one entry descr, found two");
  at("{'what': 3}", "entries descr, fortran_order and shape, found 'what'");
  at("{'fortran_order': 0}", "True or False as fortran_order, found '0}'");
  at("{'shape': 3}", "'(' before shape, found '3}'");
  at("{'shape': (3", "',' or ')' in shape, found its end");
  at("{'shape': (3 3)}", "',' or ')' in shape, found '3)}'");
  at("{'shape': (-3,)}", "non-negative integers below 2^63 as shape, found '-3,)}'");
  at("{'shape': (9223372036854775808,)}", "non-negative integers below 2^63 as shape, found '9223372036854775808,)}'");
  at("{'shape': (,)}", "non-negative integers below 2^63 as shape, found ',)}'");
  at("{'shape': (1,1,1,1,1,1,1,1,1)}", "at most 8 dimensions, found more");
  at("{'shape': (1,) 'descr': '<i4'}", "',' or '}', found ''descr': '<i4'}'");
  at("{'descr': '<i4', 'fortran_order': False, 'shape': (1, 1)} x", "nothing after '}', found 'x'");
  at("{'descr': '<i4', 'fortran_order': False, 'shape': (1, 1)" + std::string(3, '\0'), "',' or '}', found '\\x00\\x00\\x00'");
}

TEST(MalformedNpy, Array) {
  const auto at = [](const std::string& dict, size_t bytes, const std::string& text) {
    expect_malformed(npy(dict, std::string(bytes, '\0')), "array: expected " + text);
  };
  const std::string types = "descr '|i1', '<i2', '<i4', '<i8' or the same with u (ids), '<f4' or '<f2' (weights), found ";
  at(npy_dict(">i4", "(1, 1)"), 4, types + "'>i4', which is big endian");
  at(npy_dict(">i8", "(1, 1)"), 8, types + "'>i8', which is big endian");
  at(npy_dict(">u2", "(1, 1)"), 2, types + "'>u2', which is big endian");
  at(npy_dict("|b1", "(1, 1)"), 1, types + "'|b1'");
  at(npy_dict("<f8", "(1, 1)"), 8, types + "'<f8'");
  at(npy_dict("|O", "(1, 1)"), 8, types + "'|O'");
  at(npy_dict("<i4", "(1, 1)", "True"), 4, "C order (save numpy.ascontiguousarray of it), found fortran_order True");
  at(npy_dict("<i4", "(2, 3)"), 20, "24 bytes of data for '<i4' [2, 3], found 20");
  at(npy_dict("<i8", "(2, 3)"), 52, "48 bytes of data for '<i8' [2, 3], found 52");
  at(npy_dict("<i4", "(4611686018427387904, 4)"), 0,
     "more than 2^63 bytes of data for '<i4' [4611686018427387904, 4], found 0");
  at(npy_dict("<f4", "(1, 1)"), 4, "integer ids (I8 to I64, U8 to U64; '|i1' to '<i8', '|u1' to '<u8' in .npy), found '<f4'");
  at(npy_dict("<i4", "(4,)"), 16, "shape [T, K] or [R, T, K], found [4]");
  at(npy_dict("<i4", "()"), 4, "shape [T, K] or [R, T, K], found []");
  at(npy_dict("<i4", "(1, 33)"), 132, "K, the last extent, of 1 to 32, found [1, 33]");
}

/// Files that are often passed in place of a recording, recognized by their signatures and not by their names.
TEST(MalformedFiles, OtherKindsAreNamed) {
  const auto at = [](const std::string& image, const std::string& kind) {
    expect_malformed(image, "file: expected a safetensors or .npy file, found " + kind);
  };
  const auto zip = [](const std::string& member) {
    return std::string("PK\x03\x04\x14\0\0\0\0\0", 10) + std::string(16, '\0') + little_endian(member.size(), 2) +
           std::string(2, '\0') + member + std::string(50, 'x');
  };
  const std::string torch = "a PyTorch file (torch.load it, then save its tensors with safetensors.torch.save_file)";
  const std::string page = "a web page, for example of a login or an error (download the file itself)";
  const std::string text = "JSON text (save the ids with numpy.save or safetensors instead)";
  at("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
     "a Git LFS pointer (git lfs pull fetches the file that it stands for)");
  // The first bytes of a `gzip -n` file: interpreted as a header length, they are 559903, which is valid for a file of that
  // size.
  at(std::string("\x1f\x8b\x08\0\0\0\0\0\0\x03", 10) + std::string(600000, 'x'), "a gzip file (decompress it: gunzip)");
  at(std::string("\x1f\x8b\x08\0\x5e\x1a\x02\x66\x02\xff", 10), "a gzip file (decompress it: gunzip)");
  at("\x28\xb5\x2f\xfd\x24 and so on", "a zstd file (decompress it: unzstd)");
  at(zip("topk_ids.npy"), "a .npz archive (numpy.load it, then numpy.save its array topk_ids as .npy)");
  at(zip("routing/data.pkl"), torch);
  at(zip("holiday.jpg"), "a zip archive (unpack it)");
  at(zip("x").substr(0, 20), "a zip archive (unpack it)");
  at(std::string("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e\x80", 16), torch);
  at(std::string("\x80\x04\x95\x10\0\0\0\0\0\0\0", 11),
     "a Python pickle (load it, then save the ids with numpy.save or safetensors)");
  at("<!DOCTYPE html>\n<html>", page);
  at("\xef\xbb\xbf\n  <HTML lang=\"en\">", page);
  at("{\"topk_ids\": [[1, 2]]}", text);
  at("[[1, 2], [3, 4]]\n", text);
  const std::string base64 =
      "base64 text (base64.b64decode it, numpy.frombuffer with the type and shape that its maker names, then numpy.save the "
      "ids)";
  at("AQAAAAIAAAADAAAABAAAAAUAAAAGAAAABwAAAAgAAAA=\n", base64);
  at("_-8AAAIAAAADAAAABAAAAAUAAAAGAAAA", base64);
  const std::string csv = "CSV text (numpy.loadtxt with dtype=int and its delimiter, then numpy.save the ids)";
  at("token,expert_0,expert_1\n0,17,3\n1,4,250\n", csv);
  at("17;3\r\n4;250\r\n", csv);
  at("17 3\n4 250\n-1 5\n", csv);
  // A header of 559903 bytes begins with gzip's signature, but the file is not gzip.
  const std::string one = object({entry("topk_ids", "I32", "[1,1]", 0, 4)});
  const std::string image = safetensors(one + std::string(559903 - one.size(), ' '), "abcd");
  ASSERT_EQ(image.substr(0, 3), "\x1f\x8b\x08");
  EXPECT_EQ(RoutingFile::parse(span_of(image), "file").topk(kNoLayer), 1);
}

/// Truncates a valid file at every length: each result must be rejected, and nothing may be read beyond its end.
TEST(MalformedFiles, EveryTruncation) {
  const std::string good_safetensors =
      safetensors(object({metadata("num_experts", "9"), entry("rank0.topk_ids", "I32", "[2,2]", 0, 16),
                          entry("rank0.topk_weights", "F16", "[2,2]", 16, 24)}),
                  std::string(24, '\1'));
  const std::string good_npy = npy(npy_dict("<i8", "(3, 2)"), std::string(48, '\1'));
  for (const std::string& good : {good_safetensors, good_npy}) {
    RoutingFile::parse(span_of(good), "file");
    for (size_t length = 0; length < good.size(); ++length) {
      const std::string cut = good.substr(0, length);
      EXPECT_THROW(RoutingFile::parse(span_of(cut), "file"), Error) << length;
    }
  }
}

/// Dumps from serving engines have the token dimension before the layers; such a file is not a recording with that number of
/// ranks.
TEST(MalformedFiles, DumpsOfServingEngines) {
  const auto at = [](const std::string& shape, size_t numbers, const std::string& found) {
    expect_malformed(
        npy(npy_dict("<i4", shape), std::string(4 * numbers, '\0')),
        "array: expected shape [R, T, K] with R at most T and 64 (is it [tokens, layers, K]? then save each layer ids[:, l] as "
        "layer{l}.topk_ids; or each rank as rank{r}.topk_ids), found " +
            found);
  };
  at("(96, 3, 2)", 576, "[96, 3, 2]");
  at("(4, 3, 2)", 24, "[4, 3, 2]");
  at("(65, 65, 1)", 4225, "[65, 65, 1]");
  for (const char* shape : {"(3, 8, 1)", "(4, 6, 1)", "(24, 1, 1)", "(24, 0, 1)"}) {
    const std::string image = npy(npy_dict("<i4", shape), std::string(std::string(shape) == "(24, 0, 1)" ? 0 : 96, '\0'));
    EXPECT_EQ(RoutingFile::parse(span_of(image), "file").topk(kNoLayer), 1) << shape;
  }
}

class BadPaths : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("switchyard_bad_paths_" + std::to_string(::getpid()));
    fs::create_directory(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string put(const std::string& name, const std::string& content) const {
    std::ofstream(folder_ / name, std::ios::binary) << content;
    return (folder_ / name).string();
  }
  static void expect_error(const std::string& path, const std::string& text) {
    try {
      RoutingFile::open(path);
      ADD_FAILURE() << "no error; expected: " << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::io);
      EXPECT_EQ(std::string(error.what()), text);
    }
  }
  fs::path folder_;
};

TEST_F(BadPaths, AreNamed) {
  const std::string none = (folder_ / "none.safetensors").string();
  expect_error(none, none + ": cannot open: No such file or directory");
  expect_error(folder_.string(),
               folder_.string() + ": folder: expected files named [layer{l}.][rank{r}.]topk_ids.npy, found none");
  const std::string pipe = (folder_ / "pipe").string();
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  expect_error(pipe, pipe + ": file: expected a regular file, found a pipe, device or folder");
  const std::string text = put("text.npy", "this is not an array");
  expect_error(text, text + ": file: expected the mark of .npy files in the first 6 bytes, found another beginning");
}

TEST_F(BadPaths, NameTheFileOfAPair) {
  const std::string ids = put("a.topk_ids.npy", npy(npy_dict("<i4", "(1, 1)"), "abcd"));
  const std::string weights = put("a.topk_weights.npy", npy(npy_dict("<f4", "(1, 2)"), "abcdefgh"));
  expect_error(ids, weights + ": array: expected shape [1, 1] as its ids, found [1, 2]");
  const std::string other = put("rank0.topk_ids.npy", npy(npy_dict("<i8", "(1, 1)"), "abcd"));
  expect_error(folder_.string(), other + ": array: expected 8 bytes of data for '<i8' [1, 1], found 4");
}

TEST_F(BadPaths, ChangesAfterOpenAreNoticed) {
  const std::string path = put("a.npy", npy(npy_dict("<i4", "(1, 1)"), "abcd"));
  const RoutingFile file = RoutingFile::open(path);
  const auto size = std::to_string(fs::file_size(path)), less = std::to_string(fs::file_size(path) - 2);
  fs::resize_file(path, fs::file_size(path) - 2);
  try {
    file.read(kNoLayer, 0, 4);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::io);
    EXPECT_EQ(std::string(error.what()),
              path + ": file: expected " + size + " bytes as when it was opened, found " + less + " bytes");
  }
}

}  // namespace
}  // namespace switchyard
